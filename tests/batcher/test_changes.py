"""What a running batcher takes from a changed configuration, and what it refuses."""

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from batcher.app import check_change
from sluice.internal.v1.frame_pb2 import TASK_END_LENGTH
from sluice.settings import Settings, SettingsError, TenantSettings
from sluice.settings.batching import Policy
from tests.batcher.batchers import ECHO, running_batcher, settings_of
from tests.batcher.gateway_double import GatewayDouble
from tests.batcher.worker_double import SLOTS, WorkerDouble, frame


def settings(**changes: Any) -> Settings:
    made = settings_of("nats://127.0.0.1:1", "127.0.0.1:2", ECHO)
    for path, value in changes.items():
        made = changed(made, path.split("__"), value)
    return made


def changed(model: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    name, *rest = path
    return model.model_copy(update={name: changed(getattr(model, name), rest, value)})


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"batcher__policy": Policy(name="fixed")},
        {"batcher__drain_s": 7.0},
        {"tenants": {"a": TenantSettings(weight=2.0)}},
        {"gateway__stall_s": 9.0},
    ],
)
def test_policies_weights_and_limits_can_change(change: dict[str, Any]) -> None:
    check_change(settings(), settings(**change))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"nats__replicas": 3}, "nats.replicas"),
        ({"triton__url": "127.0.0.1:9"}, "triton.url"),
    ],
)
def test_anything_else_is_refused_by_its_key(change: dict[str, Any], key: str) -> None:
    with pytest.raises(SettingsError, match=rf"^{key}: cannot be changed while"):
        check_change(settings(), settings(**change))


async def test_sighup_activates_another_policy_and_loses_nothing(
    nats_url: str, gateway: GatewayDouble, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = tmp_path / "sluice.yaml"
    async with WorkerDouble.running() as worker:
        before = settings_of(nats_url, worker.address, ECHO)
        async with running_batcher(before, config=config):
            await gateway.batcher_live()
            worker.busy = SLOTS
            await gateway.until(lambda: gateway.reports[-1].models[0].running == SLOTS)
            tasks = [await gateway.ask(max_tokens=3) for _ in range(SLOTS)]
            await gateway.until(lambda: gateway.reports[-1].models[0].queued == SLOTS)
            assert worker.batches == []
            await reload(config, changed(before, ["nats", "replicas"], 3))
            await gateway.until(lambda: "nats.replicas: cannot be changed" in caplog.text)
            await reload(config, changed(before, ["batcher", "policy"], Policy(max_rows=1)))
            await gateway.until(lambda: f"reloaded configuration {config}" in caplog.text)
            worker.busy = 0
            await worker.until(lambda: len(worker.batches) == SLOTS)
            assert [len(batch.tasks) for batch in worker.batches] == [1] * SLOTS
            sent = {row.task.request_id for batch in worker.batches for row in batch.tasks}
            assert sent == {task.request_id for task in tasks}


def test_a_changed_model_needs_another_generation() -> None:
    other = ECHO.model_copy(update={"slots": 9})
    with pytest.raises(SettingsError, match=r"^models: echo: .* give the changed model a new ge"):
        check_change(settings(), settings(models=(other,)))
    cheaper = ECHO.model_copy(update={"prompt_price": 9.0})
    check_change(settings(), settings(models=(cheaper,)))
    later = other.model_copy(update={"generation": 1})
    check_change(settings(), settings(models=(later,), retiring=(ECHO,)))


async def test_replaced_model_gets_tasks_beside_the_former_one(
    nats_url: str, gateway: GatewayDouble, tmp_path: Path
) -> None:
    config = tmp_path / "sluice.yaml"
    async with WorkerDouble.running() as first, WorkerDouble.running() as second:
        old = ECHO.model_copy(update={"triton_url": first.address})
        new = ECHO.model_copy(update={"triton_url": second.address, "generation": 1})
        before = settings_of(nats_url, first.address, old)
        async with running_batcher(before, config=config):
            await gateway.batcher_live()
            running = await gateway.ask(max_tokens=2)
            batch = await first.batch(0)
            await first.admit(batch)
            both = before.model_copy(update={"models": (new,), "retiring": (old,)})
            await reload(config, both)
            await gateway.batcher_live("echo--1")
            await gateway.ask(max_tokens=2, model="echo--1")
            (row,) = (await second.batch(0)).tasks
            assert row.task.model == "echo--1"
            await first.step(frame(batch.tasks[0], 0, (5, 6), TASK_END_LENGTH))
            await gateway.finished(running)
            await reload(config, before.model_copy(update={"models": (new,)}))
            await gateway.until(
                lambda: [model.model for model in gateway.reports[-1].models] == ["echo--1"]
            )


async def reload(config: Path, settings: Settings) -> None:
    """Writes the file and sends SIGHUP."""
    await asyncio.to_thread(config.write_text, settings.to_yaml())
    os.kill(os.getpid(), signal.SIGHUP)
