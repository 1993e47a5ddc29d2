"""The loop of one model, without workers."""

from typing import Any
from unittest.mock import patch

import pytest

from batcher.core.row import PREFIX_TOKENS, Row
from batcher.metrics import BatcherMetrics
from batcher.model_loop import ModelLoop, Process
from sluice.internal.v1 import task_pb2
from sluice.settings import ModelSettings, Settings
from sluice.settings.models import PrefixCache
from sluice.telemetry.instruments import Instruments


@pytest.mark.parametrize(("prefix_cache", "keys"), [("off", 0), ("tenant", 2), ("mesh", 1)])
async def test_tasks_get_the_placement_key_of_the_model(
    prefix_cache: PrefixCache, keys: int
) -> None:
    nothing: Any = None  # without workers nobody is told anything
    metrics = BatcherMetrics(Instruments())
    model = ModelSettings(name="m", path="m", prefix_cache=prefix_cache)
    process = Process("b", nothing, nothing, nothing, nothing, metrics)
    rows: list[Row] = []
    loop = ModelLoop(process, model, ["127.0.0.1:1"], Settings())
    with patch.object(loop, "_add", lambda row, _: rows.append(row)):
        for tenant in ("acme", "other"):
            task = task_pb2.Task(
                request_id=tenant, tenant=tenant, prompt_token_ids=range(PREFIX_TOKENS)
            )
            loop.on_task(task, {}, 1)
    assert len(rows) == 2
    assert len({row.prefix for row in rows} - {0}) == keys
