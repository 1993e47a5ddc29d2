"""Shadows: what their model is asked, what becomes of it, and that no caller notices; before a real nats-server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.upstream import shadow_runner
from sluice.internal.v1.frame_pb2 import TASK_END_FAILED, TaskError
from sluice.internal.v1.task_pb2 import Task
from sluice.settings.routing import BreakerRules
from sluice.telemetry import names
from sluice.v1 import inference_pb2 as pb
from sluice.v1.admin_pb2 import RequestRecord
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.cascades import explained
from tests.gateway.kit.wire import Wire, open_wire, prompt, text_of

ROUTING = {
    "default": "small",
    "shadows": [{"model": "large", "of": "small", "share": 1}],
    "outcomes": {"pair": ["small", "large"]},
}


@pytest.fixture
def opened(nats_url: str, model_folder: Path) -> Any:
    """Opens a gateway whose large model shadows the small one."""

    @asynccontextmanager
    async def open_with(**more: Any) -> AsyncIterator[Wire]:
        async with open_wire(nats_url, model_folder, **{"routing": ROUTING, **more}) as wire:
            yield wire

    return open_with


async def answered(wire: Wire, said: str = "hello world", **fields: Any) -> Task:
    """The task of a request that the small model has answered."""
    call, task = await wire.begin(prompt(**{"model": "", **fields}))
    assert text_of(await wire.end(call, task, said)) == said
    return task


async def shadow_of(wire: Wire, said: str = "hello world") -> Task:
    """The next task of a shadow, answered."""
    task = await wire.batcher.task("large", "bulk")
    await wire.batcher.send(task, last(0, wire.tokens(said)))
    return task


def is_shadowed(record: RequestRecord) -> bool:
    return bool(record.shadows)


async def dropped(wire: Wire, task: Task) -> str:
    """Why the shadow of the request of ``task`` was dropped."""
    (run,) = (await explained(wire, task.request_id, is_shadowed)).shadows
    assert not run.HasField("agreement")
    return run.dropped


async def test_the_shadow_gets_the_same_prompt_after_the_answer(opened: Any) -> None:
    async with opened(prices={"small": (1, 1), "large": (10, 1e6)}) as wire:
        fields = {"labels": {"task": "greeting"}, "priority": pb.PRIORITY_STANDARD}
        call = wire.stub.Generate(
            prompt("what is it", model="", sampling=pb.SamplingParams(max_tokens=7), **fields)
        )
        task = await wire.batcher.task("small", "standard")
        assert wire.span(names.SPAN_SHADOW) is None
        assert text_of(await wire.end(call, task, "hello world")) == "hello world"
        shadow = await shadow_of(wire, "hello there")
        assert shadow.request_id == f"{task.request_id}-s1"
        assert shadow.prompt_token_ids == task.prompt_token_ids
        assert (shadow.sampling.seed, shadow.sampling.max_tokens) == (task.sampling.seed, 7)
        assert (shadow.priority_class, shadow.workload) == ("bulk", "greeting")
        (run,) = (await explained(wire, task.request_id, is_shadowed)).shadows
        assert (run.model, run.agreement, run.dropped) == ("large", 0.5, "")
        assert run.completion_tokens == len(wire.tokens("hello there"))
        assert run.cost >= run.completion_tokens
        span = wire.span(names.SPAN_SHADOW)
        assert span.attributes[names.SHADOW_AGREEMENT] == 0.5
        assert span.parent.span_id == wire.span(names.SPAN_GENERATE).context.span_id
        assert len(wire.gateway.registry) == 0


async def test_the_cost_of_a_shadow_is_in_no_budget(opened: Any) -> None:
    routing = ROUTING | {"budgets": [{"per_hour": 1.0, "model": "large"}]}
    async with opened(routing=routing, prices={"small": (0, 0), "large": (0, 1e9)}) as wire:
        task = await answered(wire)
        await shadow_of(wire)
        await explained(wire, task.request_id, is_shadowed)
        # Had it been counted, the large model would answer now.
        again = await answered(wire)
        record = await explained(wire, again.request_id)
        assert record.route.strategy == pb.ROUTE_STRATEGY_RULES


async def test_only_the_share_is_drawn_and_a_pinned_request_may_be(opened: Any) -> None:
    routing = ROUTING | {"shadows": [{"model": "large", "of": "small", "share": 1e-9}]}
    async with opened(routing=routing) as wire:
        task = await answered(wire)
        assert not (await explained(wire, task.request_id)).shadows
    async with opened() as wire:
        task = await answered(wire, model="small")
        shadow = await shadow_of(wire)
        assert shadow.request_id.startswith(task.request_id)


async def test_the_number_of_running_shadows_is_bounded(opened: Any) -> None:
    async with opened() as wire:
        wire.gateway.generator.shadows.in_flight_max = 1
        first, second = await answered(wire), await answered(wire)
        assert await dropped(wire, second) == "in_flight"
        await shadow_of(wire)
        (run,) = (await explained(wire, first.request_id, is_shadowed)).shadows
        assert run.agreement == 1
        third = await answered(wire)
        assert (await shadow_of(wire)).request_id.startswith(third.request_id)


async def test_the_record_says_why_a_shadow_was_dropped(opened: Any) -> None:
    routing = ROUTING | {"breaker": BreakerRules(failures=1, open_s=60)}
    safety = {"policies": {"default": {"output": {"actions": {"pii.iban": "block"}}}}}
    async with opened(routing=routing, safety=safety) as wire:
        task = await answered(wire)
        await shadow_of(wire, "to DE89370400440532013000 then")
        assert await dropped(wire, task) == "safety_blocked"
        wire.gateway.generator.shadows.limit_s = 0.3
        task = await answered(wire)
        await wire.batcher.cancelled(await wire.batcher.task("large", "bulk"))
        assert await dropped(wire, task) == "deadline_exceeded"
        wire.gateway.generator.shadows.limit_s = 60.0
        task = await answered(wire)
        shadow = await wire.batcher.task("large", "bulk")
        error = TaskError(reason="ENGINE_FAILED", message="broken")
        await wire.batcher.send(shadow, frame(0, end=TASK_END_FAILED, error=error))
        assert await dropped(wire, task) == "engine_failed"
        # Which counts for the breaker.
        assert await dropped(wire, await answered(wire)) == "model_unavailable"


async def test_a_gateway_that_shuts_down_waits_for_no_shadow(opened: Any) -> None:
    async with opened() as wire:
        await answered(wire)
        shadow = await wire.batcher.task("large", "bulk")
        heard = asyncio.ensure_future(wire.batcher.cancelled(shadow))
        drained = asyncio.ensure_future(wire.gateway.drain())
        await heard
        await drained
        assert len(wire.gateway.registry) == 0


GUARD = {"model": "large", "template": "llama_guard", "budget_s": 30, "action": {"route": "small"}}


@pytest.mark.parametrize(
    "policy",
    [
        {"actions": {"pii.iban": {"route": "small"}}},
        {"output": {"actions": {"pii.iban": "block"}}},
        {"guard": {"harm": GUARD}},
    ],
    ids=["governed", "blocked", "guarded"],
)
async def test_a_request_that_the_policy_acted_on_is_not_shadowed(
    opened: Any, policy: dict[str, Any]
) -> None:
    iban = "DE89370400440532013000"
    async with opened(safety={"policies": {"default": policy}}) as wire:
        call, task = await wire.begin(prompt(f"pay {iban}", model=""))
        if "guard" in policy:
            check = await wire.batcher.task("large")
            await wire.batcher.send(check, last(0, wire.tokens("unsafe\nS1")))
        await wire.end(call, task, f"to {iban} then")
        assert not (await explained(wire, task.request_id)).shadows
        assert len(wire.gateway.registry) == 0


async def test_an_error_in_learning_does_not_fail_the_answer(
    opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(shadow_runner, "learnable", broken)
    async with opened() as wire:
        task = await answered(wire)
        assert f"recording the end of request {task.request_id} failed" in caplog.text
        assert len(wire.gateway.registry) == 0
