"""Spending and failures, from calls to the next routing decision; before a real nats-server."""

from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from gateway.admission.overload import (
    ANSWERS_MIN,
    HUNG_S,
    AnswerKind,
    OverloadControl,
    OverloadRules,
    SchedulingParams,
)
from gateway.streaming.load_table import ModelLoadTable
from gateway.streaming.model_run import ModelRun
from sluice.errors import DeadlinePassed
from sluice.internal.v1 import frame_pb2
from sluice.settings.routing import BreakerRules
from sluice.v1 import inference_pb2 as pb
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.cascades import explained
from tests.gateway.kit.runs import new_run
from tests.gateway.kit.wire import Opened, Wire, error_of, events_of, prompt, resumed

ROUTING = {
    "default": "large",
    "breaker": BreakerRules(failures=2, open_s=60.0),
    "budgets": [{"tenants": ["acme"], "per_hour": 0.1, "model": "small"}],
    "fallbacks": {"large": ["small"]},
}
ACME = (("sluice-tenant", "acme"),)


@pytest.mark.wire(routing=ROUTING)
async def test_a_model_that_fails_is_left_alone(wire: Wire) -> None:
    for _ in range(2):
        await fails(wire)
    _, error = await error_of(wire.stub.Generate(prompt(model="large")))
    assert error.reason == "MODEL_UNAVAILABLE"
    assert error.retry_after_s is not None
    assert error.retry_after_s > 50
    call, task = await wire.begin(prompt(model="large", allow_degraded=True))
    started = (await wire.end(call, task, "hello"))[0].started
    assert (started.model, started.route.degraded) == ("small", True)


async def test_what_callers_do_wrong_opens_no_breaker(opened: Opened) -> None:
    refused = frame_pb2.TaskError(
        reason="REQUEST_INVALID", message="a dead end", field="sampling.regex"
    )
    async with opened(routing=ROUTING) as wire:
        for _ in range(4):
            call, task = await wire.begin(prompt(model="large"), "large")
            await wire.batcher.send(task, frame(0, end=frame_pb2.TASK_END_FAILED, error=refused))
            status, error = await error_of(call)
            assert status is grpc.StatusCode.INVALID_ARGUMENT
            assert [one.field for one in error.violations] == ["sampling.regex"]
            assert error.message == "sampling.regex: a dead end"
        call = wire.stub.Generate(prompt(model="large"))
        await wire.batcher.send(await wire.batcher.task("large"), last(0, wire.tokens("hello")))
        assert (await events_of(call))[0].started.model == "large"


async def fails(wire: Wire) -> None:
    """A request to the large model, whose engine fails."""
    call, task = await wire.begin(prompt(model="large"), "large")
    broken = frame_pb2.TaskError(reason="ENGINE_FAILED", message="no luck")
    await wire.batcher.send(task, frame(0, end=frame_pb2.TASK_END_FAILED, error=broken))
    assert (await error_of(call))[1].reason == "ENGINE_FAILED"


@pytest.mark.wire(routing=ROUTING, prices={"large": (0.0, 1000000.0)})
async def test_a_tenant_over_its_budget_gets_the_smaller_model(wire: Wire) -> None:
    for tenant, model in ((ACME, "large"), (ACME, "small"), ((), "large")):
        call, task = await wire.begin(prompt(model=""), model, metadata=tenant)
        assert (await wire.end(call, task, "hello"))[0].started.model == model


PRICES = {"large": (0.0, 1e6)}


@pytest.mark.wire(routing=ROUTING, prices=PRICES)
async def test_concurrent_calls_do_not_overshoot_a_budget(wire: Wire) -> None:
    calls = [wire.stub.Generate(prompt(model=""), metadata=ACME) for _ in range(4)]
    task = await wire.batcher.task("large")
    for _ in range(3):
        other = await wire.batcher.task("small")
        await wire.batcher.send(other, last(0, wire.tokens("hello")))
    models = [(await wire.end(call, task, "hello"))[0].started.model for call in calls]
    assert sorted(models) == ["large", "small", "small", "small"]


@pytest.mark.wire(routing=ROUTING, prices=PRICES)
async def test_naming_a_model_does_not_skip_the_budget(wire: Wire) -> None:
    call, task = await wire.begin(prompt(model="large"), "large", metadata=ACME)
    await wire.end(call, task, "hello")
    code, error = await error_of(wire.stub.Generate(prompt(model="large"), metadata=ACME))
    assert (code.name, error.reason) == ("RESOURCE_EXHAUSTED", "BUDGET_SPENT")
    assert error.retry_after_s is not None
    for request in (prompt(model="large", allow_degraded=True), prompt(model="small")):
        call, task = await wire.begin(request, metadata=ACME)
        assert (await wire.end(call, task, "hello"))[0].started.model == "small"


@pytest.mark.wire(prices={"small": (1000000.0, 1000000.0)})
async def test_resumed_tokens_are_not_billed_again(wire: Wire) -> None:
    answer = wire.tokens("hello world")
    call, task = await wire.begin(resumed(prompt(), answer[:-1]))
    await wire.batcher.send(task, last(len(answer) - 1, answer[-1:]))
    events = await events_of(call)
    usage = events[-1].finished.usage
    assert (usage.completion_tokens, usage.resumed_tokens) == (len(answer), len(answer) - 1)
    (attempt,) = (await explained(wire, task.request_id)).attempts
    assert attempt.resumed_tokens == len(answer) - 1
    assert attempt.cost == len(task.prompt_token_ids) + 1


REQUEST = SchedulingParams(
    "standard", 0.0, rules=OverloadRules(BreakerRules(failures=1, open_s=60.0))
)


class Runs:
    """Runs of one model, and what their ends say about it."""

    def __init__(self) -> None:
        self._live: list[Any] = []
        self.overload = OverloadControl(ModelLoadTable(), self._live)

    def run(self, sent_at: float, token_at: float | None = None, live: bool = False) -> ModelRun:
        run = new_run("r", now=sent_at)
        run.was_accepted = True
        if token_at is not None:
            run.accept(frame(0, [1]), token_at)
        if live:
            self._live.append(SimpleNamespace(runs=[run]))
        return run

    def opens(self, run: ModelRun, now: float) -> bool:
        """Whether the passed deadline of ``run`` counts against the model."""
        self.overload.record_result(REQUEST, run, DeadlinePassed("late"), now)
        return self.overload.breakers.retry_after_s("m", now) > 0


@pytest.mark.parametrize(
    ("sent_at", "token_at", "others", "now", "hangs"),
    [
        (0.0, None, [(5.0, None)], HUNG_S, True),
        (0.0, 1.0, [], HUNG_S, False),
        (0.0, 1.0, [], 1 + HUNG_S, True),
        (0.1, None, [], HUNG_S, False),
        (0.0, None, [(0.0, 1.0)], HUNG_S, False),
    ],
    ids=["silent", "token", "stopped", "short deadline", "works for others"],
)
def test_a_model_hangs_that_gives_nobody_a_token(
    sent_at: float, token_at: float | None, others: list[Any], now: float, hangs: bool
) -> None:
    runs = Runs()
    for other in others:
        runs.run(*other, live=True)
    assert runs.opens(runs.run(sent_at, token_at), now) is hangs


def test_unaccepted_or_superseded_run_proves_nothing() -> None:
    runs = Runs()
    run = runs.run(0.0)
    run.was_accepted = False
    assert not runs.opens(run, HUNG_S)
    runs.overload.record_result(REQUEST, runs.run(0.0, token_at=1.0), None, 2.0)
    assert not runs.opens(runs.run(0.0), HUNG_S)


@pytest.mark.parametrize(
    ("end", "is_whole"), [(frame_pb2.TASK_END_STOP, True), (frame_pb2.TASK_END_LENGTH, False)]
)
def test_lengths_of_whole_answers_are_learned(
    end: frame_pb2.TaskEnd.ValueType, is_whole: bool
) -> None:
    runs = Runs()
    for tokens, known in [(7, 0), (90, 80)] * ANSWERS_MIN:
        run = runs.run(0.0)
        run.resumed = known
        run.accept(frame(0, range(tokens), end=end), 1.0)
        runs.overload.record_result(REQUEST, run, None, 2.0)
    kind = AnswerKind("m", REQUEST.tenant, REQUEST.workload)
    assert runs.overload.lengths.expect(kind, 0, 0) == (7, is_whole)


@pytest.mark.wire(routing=ROUTING)
async def test_a_broken_model_is_not_ready(wire: Wire) -> None:
    for _ in range(2):
        await fails(wire)
    models = (await wire.stub.ListModels(pb.ListModelsRequest())).models
    assert {one.name: one.ready for one in models} == {"small": True, "large": False}
    await wire.health_becomes("", HealthCheckResponse.SERVING)
    await wire.health_becomes("model.large", HealthCheckResponse.NOT_SERVING)
    assert await wire.health("") == HealthCheckResponse.SERVING
