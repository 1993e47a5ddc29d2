"""Shadows: what their model is asked, what becomes of it, and that no caller notices; before a real nats-server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.upstream import shadow_runner
from sluice.internal.v1.frame_pb2 import TASK_END_FAILED, TaskError
from sluice.internal.v1.task_pb2 import Task
from sluice.settings.routing import BreakerRules
from sluice.telemetry import names
from sluice.v1 import inference_pb2 as pb
from sluice.v1 import safety_pb2
from sluice.v1.admin_pb2 import GetRequestRecordRequest, RequestRecord
from sluice.v1.admin_pb2_grpc import AdminServiceStub
from tests.gateway.kit.batcher import BOUND_S, frame, last
from tests.gateway.kit.wire import Wire, is_served, open_wire, prompt, text_of, typed

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


async def explained(
    wire: Wire, request_id: str, wanted: Callable[[RequestRecord], Any] = lambda r: r.shadows
) -> RequestRecord:
    """The record, once it holds what is ``wanted``."""
    stub: Any = AdminServiceStub(wire.channel)
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                record = (
                    await stub.GetRequestRecord(GetRequestRecordRequest(request_id=request_id))
                ).record
                if wanted(record):
                    return record
            except grpc.aio.AioRpcError as failure:
                if typed(failure).reason != "RECORD_UNKNOWN":
                    raise
            await asyncio.sleep(0.01)


async def test_the_shadow_gets_the_same_prompt_after_the_answer(
    opened: Any,
) -> None:
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
        (run,) = (await explained(wire, task.request_id)).shadows
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
        await explained(wire, task.request_id)
        # Had it been counted, the large model would answer now.
        again = await answered(wire)
        assert (
            await explained(wire, again.request_id, lambda r: r.attempts)
        ).route.strategy == pb.ROUTE_STRATEGY_RULES


async def test_only_the_share_is_drawn_and_a_pinned_request_may_be(opened: Any) -> None:
    routing = ROUTING | {"shadows": [{"model": "large", "of": "small", "share": 1e-9}]}
    async with opened(routing=routing) as wire:
        task = await answered(wire)
        record = await explained(wire, task.request_id, lambda r: r.attempts)
        assert not record.shadows
    async with opened() as wire:
        task = await answered(wire, model="small")
        shadow = await shadow_of(wire)
        assert shadow.request_id.startswith(task.request_id)


async def test_an_unavailable_model_gets_no_shadow(opened: Any) -> None:
    async with opened() as wire:
        await wire.batcher.report("small")
        await wire.until(lambda: not is_served(wire.gateway, "large"))
        task = await answered(wire)
        (run,) = (await explained(wire, task.request_id)).shadows
        assert run.dropped == "model_unavailable"
        assert not run.HasField("agreement")


async def test_the_number_of_running_shadows_is_bounded(opened: Any) -> None:
    async with opened() as wire:
        wire.gateway.generator.shadows.in_flight_max = 1
        first, second = await answered(wire), await answered(wire)
        (run,) = (await explained(wire, second.request_id)).shadows
        assert run.dropped == "in_flight"
        await shadow_of(wire)
        (run,) = (await explained(wire, first.request_id)).shadows
        assert run.agreement == 1
        third = await answered(wire)
        assert (await shadow_of(wire)).request_id.startswith(third.request_id)


async def test_a_failed_shadow_is_recorded_and_counts_for_the_breaker(opened: Any) -> None:
    routing = ROUTING | {"breaker": BreakerRules(failures=1, open_s=60)}
    async with opened(routing=routing) as wire:
        task = await answered(wire)
        shadow = await wire.batcher.task("large", "bulk")
        error = TaskError(reason="ENGINE_FAILED", message="broken")
        await wire.batcher.send(shadow, frame(0, end=TASK_END_FAILED, error=error))
        (run,) = (await explained(wire, task.request_id)).shadows
        assert run.dropped == "engine_failed"
        task = await answered(wire)
        (run,) = (await explained(wire, task.request_id)).shadows
        assert run.dropped == "model_unavailable"


async def test_a_shadow_has_a_limit(opened: Any) -> None:
    async with opened() as wire:
        wire.gateway.generator.shadows.limit_s = 0.3
        task = await answered(wire)
        shadow = await wire.batcher.task("large", "bulk")
        await wire.batcher.cancelled(shadow)
        (run,) = (await explained(wire, task.request_id)).shadows
        assert run.dropped == "deadline_exceeded"


async def test_a_gateway_that_shuts_down_waits_for_no_shadow(opened: Any) -> None:
    async with opened() as wire:
        await answered(wire)
        shadow = await wire.batcher.task("large", "bulk")
        heard = asyncio.ensure_future(wire.batcher.cancelled(shadow))
        drained = asyncio.ensure_future(wire.gateway.drain())
        await heard
        await drained
        assert len(wire.gateway.registry) == 0


@pytest.mark.parametrize(
    "safety",
    [
        {"actions": {"pii.iban": {"route": "small"}}},
        {"output": {"actions": {"pii.iban": "block"}}},
    ],
    ids=["governed", "blocked"],
)
async def test_a_request_that_the_policy_acted_on_is_not_shadowed(
    opened: Any, safety: dict[str, Any]
) -> None:
    iban = "DE89370400440532013000"
    async with opened(safety={"policies": {"default": safety}}) as wire:
        call, task = await wire.begin(prompt(f"pay {iban}", model=""))
        await wire.end(call, task, f"to {iban} then")
        assert not (await explained(wire, task.request_id, lambda r: r.attempts)).shadows
        # The next one is the first that is asked.
        fine = await answered(wire)
        assert (await shadow_of(wire)).request_id.startswith(fine.request_id)


async def test_answer_ended_by_policy_is_not_compared(
    opened: Any,
) -> None:
    safety = {"output": {"actions": {"pii.iban": "block"}}}
    async with opened(safety={"policies": {"default": safety}}) as wire:
        task = await answered(wire)
        await shadow_of(wire, "to DE89370400440532013000 then")
        (run,) = (await explained(wire, task.request_id)).shadows
        assert (run.dropped, run.HasField("agreement")) == ("safety_blocked", False)


async def test_a_request_that_a_guard_acted_on_is_not_shadowed(opened: Any) -> None:
    guard = {
        "model": "large",
        "template": "llama_guard",
        "budget_s": 30,
        "action": {"route": "small"},
    }
    async with opened(safety={"policies": {"default": {"guard": {"harm": guard}}}}) as wire:
        call, task = await wire.begin(prompt("a plan", model=""))
        check = await wire.batcher.task("large")
        await wire.batcher.send(check, last(0, wire.tokens("unsafe\nS1")))
        await wire.end(call, task, "hello")
        record = await explained(wire, task.request_id, lambda r: r.attempts)
        assert [one.action for one in record.decisions] == [safety_pb2.SAFETY_ACTION_ROUTE]
        assert not record.shadows


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
