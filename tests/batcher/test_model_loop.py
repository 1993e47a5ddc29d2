"""The loop of one model, without workers."""

from types import SimpleNamespace
from typing import Any

import pytest

from batcher.core.queued_request import PREFIX_TOKENS
from batcher.core.requests import RequestTable
from batcher.model_loop import BatcherProcess, ModelLoop
from sluice.internal.v1 import task_pb2
from sluice.settings import ModelSettings, Settings
from sluice.settings.models import PrefixCache


@pytest.mark.parametrize(("prefix_cache", "keys"), [("off", 0), ("tenant", 2), ("mesh", 1)])
async def test_tasks_get_the_placement_key_of_the_model(
    prefix_cache: PrefixCache, keys: int
) -> None:
    nothing: Any = None  # without workers nobody is called
    tables: list[RequestTable] = []
    metrics: Any = SimpleNamespace(on_model=lambda model, workers, table: tables.append(table))
    model = ModelSettings(name="m", path="m", prefix_cache=prefix_cache)
    process = BatcherProcess("b", nothing, nothing, nothing, metrics)
    loop = ModelLoop(process, model, ["127.0.0.1:1"], Settings())
    for tenant in ("acme", "other"):
        task = task_pb2.Task(
            request_id=tenant,
            tenant=tenant,
            priority_class="standard",
            prompt_token_ids=range(PREFIX_TOKENS),
        )
        loop.on_task(task, {}, 1)
    (table,) = tables
    assert len(table.requests) == 2
    assert len({request.prefix for request in table.requests.values()} - {0}) == keys
