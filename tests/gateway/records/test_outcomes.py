"""What is kept of requests to learn from, and of whom: from the call to `StreamOutcomes`; before a real nats-server."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import nats
import pytest

from gateway.identity.authenticator import Authenticator
from gateway.identity.caller import ANY, Caller
from sluice.internal.v1.frame_pb2 import TASK_END_STOP, Logprobs
from sluice.internal.v1.task_pb2 import Task
from sluice.settings.routing import RoutingSettings
from sluice.v1.admin_pb2 import (
    OUTCOME_SOURCE_CASCADE,
    OUTCOME_SOURCE_GRADE,
    OUTCOME_SOURCE_SHADOW,
    OUTCOME_SOURCE_UNSPECIFIED,
    StreamOutcomesRequest,
    StreamOutcomesResponse,
    SubmitFeedbackRequest,
)
from sluice.v1.admin_pb2_grpc import AdminServiceStub
from sluice.wire import subjects
from sluice.wire.clock import ms_of, timestamp
from tests.gateway.kit.batcher import BOUND_S, frame, last
from tests.gateway.kit.wire import Wire, error_of, events_of, open_wire, prompt, typed

IBAN = "DE89370400440532013000"
REDACTS = {"policies": {"default": {"actions": {"pii.*": "redact"}}}}
KEPT = {"tenants": ["acme"], "pair": ["small", "large"]}
SHADOWS = [{"model": "large", "of": "small", "share": 1}]
BACK = [{"model": "small", "of": "large", "share": 1}]
CASCADE = {"first": "small", "second": "large", "commit_tokens": 4, "mode": "hold"}


@pytest.fixture
def opened(nats_url: str, model_folder: Path) -> Any:
    @asynccontextmanager
    async def open_with(routing: dict[str, Any], **more: Any) -> AsyncIterator[Wire]:
        routing = {"default": "small", "outcomes": KEPT, **routing}
        async with open_wire(nats_url, model_folder, routing=routing, **more) as wire:
            yield wire

    return open_with


async def answered(
    wire: Wire, text: str = "hello", said: str = "hello world", tenant: str = "acme", **fields: Any
) -> Task:
    """The task of a request of ``tenant`` that has been answered."""
    fields = {"model": "", **fields}
    call = wire.stub.Generate(prompt(text, **fields), metadata=(("sluice-tenant", tenant),))
    task = await wire.batcher.task(fields["model"] or "small")
    await wire.batcher.send(task, last(0, wire.tokens(said)))
    await events_of(call)
    return task


async def shadowed(wire: Wire, said: str, model: str = "large") -> None:
    task = await wire.batcher.task(model, "bulk")
    await wire.batcher.send(task, last(0, wire.tokens(said)))


async def graded(wire: Wire, request_id: str, grade: float) -> None:
    """Grades a request as soon as something is kept of it."""
    stub: Any = AdminServiceStub(wire.channel)
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                await stub.SubmitFeedback(SubmitFeedbackRequest(request_id=request_id, grade=grade))
                return
            except grpc.aio.AioRpcError as failure:
                if typed(failure).reason != "RECORD_UNKNOWN":
                    raise
            await asyncio.sleep(0.01)


async def listed(wire: Wire, **fields: Any) -> list[StreamOutcomesResponse]:
    stub: Any = AdminServiceStub(wire.channel)
    return [one async for one in stub.StreamOutcomes(StreamOutcomesRequest(**fields))]


async def not_kept(wire: Wire, **fields: Any) -> str:
    stub: Any = AdminServiceStub(wire.channel)
    _, error = await error_of(stub.StreamOutcomes(StreamOutcomesRequest(**fields)))
    assert error.reason == "OUTCOMES_NOT_KEPT"
    return error.message


async def outcome_of(
    wire: Wire, task: Task, wanted: Callable[[StreamOutcomesResponse], bool]
) -> StreamOutcomesResponse:
    """What is listed of a request, once it is as ``wanted``."""
    async with asyncio.timeout(BOUND_S):
        while True:
            for one in await listed(wire):
                if one.request_id == task.request_id and wanted(one):
                    return one
            await asyncio.sleep(0.01)


async def test_a_strong_shadow_is_the_reference(opened: Any) -> None:
    async with opened({"shadows": SHADOWS}) as wire:
        task = await answered(wire, "what is it", labels={"task": "greeting"})
        await shadowed(wire, "hello there")
        found = await outcome_of(wire, task, lambda one: one.HasField("weak"))
    assert (found.tenant, found.workload, found.policy) == ("acme", "greeting", "")
    assert (found.weak_model, found.strong_model) == ("small", "large")
    assert (found.prompt, found.weak_answer) == ("what is it", "hello world")
    assert (found.weak, found.strong) == (0.5, 1.0)
    assert found.weak_source == found.strong_source == OUTCOME_SOURCE_SHADOW
    assert ms_of(found.answer_time) > 1.7e12


@pytest.mark.parametrize(
    ("said", "weak", "kept"),
    [("hello", pytest.approx(2 / 3), "hello"), (f"it is {IBAN} then", 0.0, None)],
    ids=["kept", "what the policy finds is not kept"],
)
async def test_a_shadow_of_the_weak_model_gives_its_answer(
    opened: Any, said: str, weak: float, kept: str | None
) -> None:
    async with opened({"default": "large", "shadows": BACK}, safety=REDACTS) as wire:
        task = await answered(wire, model="large")
        await shadowed(wire, said, "small")
        found = await outcome_of(wire, task, lambda one: one.HasField("weak"))
        assert (found.weak, found.strong) == (weak, 1.0)
        assert (found.weak_answer if found.HasField("weak_answer") else None) == kept


async def test_the_last_grade_is_joined_whenever_it_comes(opened: Any, nats_url: str) -> None:
    async with opened({}) as wire:
        task = await answered(wire)
        await graded(wire, task.request_id, 0.25)
        found = await outcome_of(wire, task, lambda one: one.weak == 0.25)
        assert (found.weak_source, found.strong_source) == (
            OUTCOME_SOURCE_GRADE,
            OUTCOME_SOURCE_UNSPECIFIED,
        )
        assert not found.HasField("strong")
        # The record is too old by now; the outcome is kept longer.
        await purged(nats_url, subjects.RECORDS_STREAM)
        await graded(wire, task.request_id, 0.75)
        assert (await outcome_of(wire, task, lambda one: one.weak == 0.75)).prompt == "hello"
        stub: Any = AdminServiceStub(wire.channel)
        _, error = await error_of(
            stub.SubmitFeedback(SubmitFeedbackRequest(request_id="req-no", grade=1))
        )
        assert error.reason == "RECORD_UNKNOWN"


async def escalated(wire: Wire, *, complete: bool) -> Task:
    """The first task of a request that the second model has answered."""
    call = wire.stub.Generate(prompt(model=""), metadata=(("sluice-tenant", "acme"),))
    first = await wire.batcher.task()
    tokens = wire.tokens("world world" if complete else "world world world world")
    unsure = [
        Logprobs(logprob=-3.0, top_token_ids=[one, 0], top_logprobs=[-3.0, -9.0]) for one in tokens
    ]
    end = TASK_END_STOP if complete else None
    await wire.batcher.send(first, frame(0, tokens, logprobs=unsure, end=end))
    second = await wire.batcher.task("large")
    await wire.batcher.send(second, last(0, wire.tokens("hello world")))
    await events_of(call)
    return first


@pytest.mark.parametrize(
    ("cascade", "complete", "weak"),
    [({}, True, 0.5), ({}, False, 0.0), ({"hint": True}, True, None)],
    ids=["complete draft", "part of a draft", "hinted answer"],
)
async def test_a_cascade_that_goes_over_compares_draft_and_answer(
    opened: Any, cascade: dict[str, bool], complete: bool, weak: float | None
) -> None:
    async with opened({"cascade": CASCADE | cascade}) as wire:
        first = await escalated(wire, complete=complete)
        await graded(wire, first.request_id, 1)
        found = await outcome_of(wire, first, lambda one: one.strong_source == OUTCOME_SOURCE_GRADE)
    assert (found.weak if found.HasField("weak") else None) == weak
    if weak is not None:
        assert found.weak_source == OUTCOME_SOURCE_CASCADE
        assert found.HasField("weak_answer") is complete


async def test_the_text_is_that_which_the_model_saw(opened: Any) -> None:
    async with opened({}, safety=REDACTS) as wire:
        task = await answered(wire, f"pay to {IBAN}")
        await graded(wire, task.request_id, 1)
        found = await outcome_of(wire, task, lambda one: True)
        assert found.prompt == "pay to <IBAN_1>"
        leaking = await answered(wire, said=f"it is {IBAN} then")
        await graded(wire, leaking.request_id, 1)
        found = await outcome_of(wire, leaking, lambda one: True)
        assert not found.HasField("weak_answer")


async def test_of_other_tenants_nothing_is_kept(opened: Any, nats_url: str) -> None:
    async with opened({"shadows": SHADOWS}) as wire:
        strange = await answered(wire, "a secret of another", tenant="other")
        await shadowed(wire, "hello")
        await graded(wire, strange.request_id, 1)
        task = await answered(wire)
        await shadowed(wire, "hello")
        await outcome_of(wire, task, lambda one: True)
        assert [one.tenant for one in await listed(wire)] == ["acme"]
        assert "of other" in await not_kept(wire, tenants=["acme", "other"])
    assert await subjects_in(nats_url) == [subjects.outcome("acme", task.request_id)]


async def test_who_does_not_let_them_be_kept_any_more_gets_nothing(
    opened: Any, nats_url: str
) -> None:
    async with opened({}) as wire:
        await graded(wire, (await answered(wire)).request_id, 1)
    async with opened({"outcomes": KEPT | {"tenants": ["other"]}}) as wire:
        assert await listed(wire) == []
    async with opened({"outcomes": {}}) as wire:
        assert "routing.outcomes.tenants" in await not_kept(wire)


@pytest.mark.parametrize("roles", [ANY, {"caller"}, {"operator"}, {"auditor"}])
async def test_a_caller_of_another_machine_gets_no_prompts(
    opened: Any, monkeypatch: pytest.MonkeyPatch, roles: frozenset[str]
) -> None:
    monkeypatch.setattr("gateway.api.admin_service.is_local", lambda peer: False)
    caller = Caller("acme", frozenset(roles))

    async def called(*_: Any) -> Caller:
        return caller

    monkeypatch.setattr(Authenticator, "caller_of", called)
    async with opened({}) as wire:
        stub: Any = AdminServiceStub(wire.channel)
        code, error = await error_of(stub.StreamOutcomes(StreamOutcomesRequest()))
        assert (code.name, error.reason) == ("PERMISSION_DENIED", "PERMISSION_DENIED")
        assert "from the gateway's machine" in error.message


async def test_a_tenant_can_opt_in_while_the_gateway_runs(opened: Any) -> None:
    async with opened({"outcomes": {}}) as wire:
        await answered(wire)
        routing = RoutingSettings.model_validate({"outcomes": KEPT, "shadows": SHADOWS})
        await wire.reload(wire.settings.model_copy(update={"routing": routing}))
        task = await answered(wire)
        await shadowed(wire, "hello")
        found = await outcome_of(wire, task, lambda one: True)
        assert [one.request_id for one in await listed(wire)] == [found.request_id]


async def test_since_leaves_the_older_out(opened: Any) -> None:
    async with opened({"shadows": SHADOWS}) as wire:
        ids = []
        for _ in range(3):
            task = await answered(wire)
            await shadowed(wire, "hello")
            found = await outcome_of(wire, task, lambda one: True)
            ids.append(task.request_id)
        assert [one.request_id for one in await listed(wire)] == ids
        since = int(ms_of(found.answer_time))
        assert 1 <= len(await listed(wire, since_time=timestamp(since), tenants=["acme"])) < 3
        assert await listed(wire, since_time=timestamp(since + 1)) == []


async def test_shadows_and_outcomes_follow_the_routing_policy(opened: Any) -> None:
    policy = {"cascade": CASCADE, "shadows": SHADOWS}
    routing = {"policies": {"p": policy}, "select": [{"policy": "p", "labels": {"team": "p"}}]}
    async with opened({**routing, "outcomes": {"tenants": ["acme"]}}) as wire:
        await answered(wire)
        task = await answered(wire, "2 + 2?", said="hello", labels={"team": "p"})
        await shadowed(wire, "hello")
        found = await outcome_of(wire, task, lambda one: one.HasField("weak"))
        assert (found.policy, found.weak_model, found.strong_model) == ("p", "small", "large")
        assert [one.request_id for one in await listed(wire)] == [task.request_id]


async def purged(url: str, stream: str) -> None:
    client = await nats.connect(url)
    try:
        await client.jetstream().purge_stream(stream)
    finally:
        await client.close()


async def subjects_in(url: str) -> Sequence[str]:
    """All subjects of which an outcome is kept."""
    client = await nats.connect(url)
    try:
        name = subjects.OUTCOMES_STREAM
        info = await client.jetstream().stream_info(name, subjects_filter=f"{subjects.OUTCOMES}.>")
        return list(info.state.subjects or {})
    finally:
        await client.close()
