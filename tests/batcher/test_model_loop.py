"""The loop of one model, without workers: its policy at a moment, what the log says of it, and its requests."""

import logging
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from batcher.core.queued_request import PREFIX_TOKENS
from batcher.model_loop import BatcherProcess, ModelLoop
from sluice.internal.v1 import task_pb2
from sluice.settings import BatcherSettings, ModelSettings, Settings
from sluice.settings.models import PrefixCache
from tests.batcher.batchers import ECHO, settings_of

DAY, NIGHT = (datetime(2026, 5, 4, hour, tzinfo=UTC) for hour in (12, 23))
NIGHTLY = {"name": "window", "schedule": [{"from": "22:00", "to": "06:00", "max_rows": 64}]}


def settings(policy: Any) -> Settings:
    batcher = BatcherSettings.model_validate({"policy": policy})
    return settings_of("nats://127.0.0.1:1", "127.0.0.1:2", ECHO, batcher)


def loop_of(policy: Any, model: ModelSettings = ECHO) -> ModelLoop:
    nothing: Any = None  # without workers nobody is called
    metrics: Any = SimpleNamespace(on_model=lambda *_: None)
    process = BatcherProcess("b", nothing, nothing, nothing, metrics)
    return ModelLoop(process, model, ["127.0.0.1:1"], settings(policy))


async def test_policy_follows_its_schedule(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    loop = loop_of(NIGHTLY)
    loop.follow_schedule(DAY, {})
    caplog.clear()
    assert loop.policy.max_rows == 32
    loop.follow_schedule(DAY, {})
    assert not caplog.messages
    loop.follow_schedule(NIGHT, {})
    assert (loop.policy.max_rows, loop.policy.schedule) == (64, ())
    assert "activated scheduled policy window for model echo (" in caplog.text
    assert "max_rows 64" in caplog.text
    loop.follow_schedule(DAY, {})
    assert loop.policy.max_rows == 32


async def test_policy_of_a_reload_is_the_one_of_the_moment() -> None:
    whole_day = {"from": "00:00", "to": "24:00", "max_rows": 64}
    loop = loop_of("continuous")
    loop.change(settings({"name": "window", "schedule": [whole_day]}))
    assert (loop.policy.name, loop.policy.max_rows) == ("window", 64)


async def test_policy_that_gains_nothing_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    note = "policy length for model echo: no gain, engine echo pads nothing"
    loop = loop_of("length")
    assert not caplog.messages
    loop.log_notes()
    loop.change(settings("length"))
    assert caplog.messages == [note]
    loop.change(settings({"name": "length", "wait_s": 1.0}))
    assert caplog.messages == [note] * 2


@pytest.mark.parametrize(("prefix_cache", "keys"), [("off", 0), ("tenant", 2), ("mesh", 1)])
async def test_tasks_get_the_placement_key_of_the_model(
    prefix_cache: PrefixCache, keys: int
) -> None:
    loop = loop_of("continuous", ModelSettings(name="m", path="m", prefix_cache=prefix_cache))
    for tenant in ("acme", "other"):
        task = task_pb2.Task(
            request_id=tenant,
            tenant=tenant,
            priority_class="standard",
            prompt_token_ids=range(PREFIX_TOKENS),
        )
        loop.on_task(task, {}, 1)
    assert len(loop.table.requests) == 2
    assert len({request.prefix for request in loop.table.requests.values()} - {0}) == keys
