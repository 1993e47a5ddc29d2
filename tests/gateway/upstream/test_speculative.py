"""A cascade whose two models begin together: what each batcher's side gets, and what the caller sees; before a real
nats-server."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.routing.cascade import limit
from sluice.internal.v1.frame_pb2 import (
    ROW_END_CANCELLED,
    ROW_END_FAILED,
    ROW_END_STOP,
    BatchInfo,
    RowError,
)
from sluice.telemetry import names
from sluice.v1 import inference_pb2 as pb
from sluice.wire.enums import word_of
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.cascades import BAD, GOOD, explained, notices, saying
from tests.gateway.kit.wire import Wire, events_of, open_wire, prompt, resumed, text_of, tokens_of

CASCADE: dict[str, Any] = {
    "first": "small",
    "second": "large",
    "commit_tokens": 4,
    "start": "together",
}
KEY, OTHER_KEY = "AKIA3XLUV5EKAMQ7TBP2", "AKIA5QWERTZUIOPA7CDE"
BROKEN = RowError(reason="ENGINE_FAILED", message="no luck")


def routing(**cascade: Any) -> dict[str, Any]:
    return {"default": "small", "cascade": CASCADE | cascade}


@pytest.fixture
async def wire(nats_url: str, model_folder: Path) -> AsyncIterator[Wire]:
    async with open_wire(nats_url, model_folder, routing=routing()) as opened:
        yield opened


async def test_both_rows_run_and_a_sure_first_answer_cancels_the_second(wire: Wire) -> None:
    call = wire.stub.Generate(prompt(model=""))
    first, second = await wire.batcher.task("small"), await wire.batcher.task("large")
    assert second.request_id == f"{first.request_id}-2"
    assert second.prompt_token_ids == first.prompt_token_ids
    assert second.sampling.seed == first.sampling.seed
    assert second.priority_class == first.priority_class
    assert wire.waits_for(second)
    await wire.batcher.send(second, frame(0, wire.tokens("thrown away")))
    await wire.batcher.send(first, saying(wire, GOOD, -0.01))
    await wire.batcher.cancelled(second)
    assert not wire.waits_for(second)
    cancelled = frame(len(wire.tokens("thrown away")), end=ROW_END_CANCELLED)
    cancelled.final.batch.CopyFrom(BatchInfo(batch_id="ba-2", rows=3))
    await wire.batcher.send(second, cancelled)
    await wire.batcher.send(first, last(len(wire.tokens(GOOD)), wire.tokens(" hello")))
    events = await events_of(call)
    assert events[0].started.route.strategy == pb.ROUTE_STRATEGY_SPECULATIVE
    assert text_of(events).startswith(GOOD)
    assert not notices(events)
    finished = events[-1].finished
    assert finished.model == "small"
    assert [(leg.model, leg.unused) for leg in finished.attempts] == [
        ("small", False),
        ("large", True),
    ]
    record = await explained(wire, first.request_id)
    assert [leg.model for leg in record.attempts] == ["small", "large"]
    thrown_away = record.attempts[1]
    assert thrown_away.unused_reason == "the first answer passed its commit point"
    assert thrown_away.completion_tokens == len(wire.tokens("thrown away"))
    assert (thrown_away.batch_id, thrown_away.batch_rows) == ("ba-2", 3)


async def test_in_doubt_the_second_answer_is_there_at_once(wire: Wire) -> None:
    call = wire.stub.Generate(prompt(model=""))
    first, second = await wire.batcher.task("small"), await wire.batcher.task("large")
    await wire.batcher.send(second, frame(0, wire.tokens("hello world")))
    await wire.batcher.send(first, saying(wire, BAD, -3.0))
    await wire.batcher.cancelled(first)
    assert (await call.read()).started.model == "small"
    notice = (await call.read()).notice
    assert (notice.kind, notice.model) == (pb.NOTICE_KIND_ESCALATED, "large")
    delta = (await call.read()).delta
    assert (delta.index, delta.text) == (0, "hello world")
    await wire.batcher.send(second, last(len(wire.tokens("hello world"))))
    events = await events_of(call)
    assert events[-1].finished.model == "large"
    assert not any(leg.unused for leg in events[-1].finished.attempts)
    await wire.forgotten(second)
    record = await explained(wire, first.request_id)
    assert record.route.strategy == pb.ROUTE_STRATEGY_SPECULATIVE
    assert "log-probability" in record.attempts[0].escalation_reason
    await wire.until(lambda: wire.span(names.SPAN_GENERATE) is not None)
    attributes = wire.span(names.SPAN_GENERATE).attributes
    assert attributes[names.ROUTE_ESCALATED] == record.attempts[0].escalation_reason
    assert attributes[names.GEN_AI_RESPONSE_MODEL] == attributes[names.TIER] == "large"
    assert attributes[names.MODELS_TRIED] == ("small", "large")
    ends = [
        span.attributes[names.END]
        for span in wire.spans.get_finished_spans()
        if span.name == names.SPAN_ATTEMPT
    ]
    assert sorted(ends) == ["answered", "escalated"]


async def test_a_second_row_that_fails_is_replaced_only_when_it_is_needed(wire: Wire) -> None:
    call = wire.stub.Generate(prompt(model=""))
    first, second = await wire.batcher.task("small"), await wire.batcher.task("large")
    await wire.batcher.send(second, frame(0, wire.tokens("hello")))
    await wire.batcher.send(second, frame(1, end=ROW_END_FAILED, error=BROKEN))
    await wire.forgotten(second)
    await wire.batcher.send(first, saying(wire, BAD, -3.0))
    third = await wire.batcher.task("large")
    assert third.request_id == f"{first.request_id}-3"
    assert not third.produced_token_ids
    await wire.batcher.send(third, last(0, wire.tokens("world")))
    events = await events_of(call)
    assert text_of(events) == "world"
    record = await explained(wire, first.request_id)
    assert [leg.model for leg in record.attempts] == ["small", "large", "large"]
    assert "ENGINE_FAILED" in record.attempts[1].unused_reason


async def test_a_caller_that_leaves_cancels_both_rows(wire: Wire) -> None:
    call = wire.stub.Generate(prompt(model=""))
    first, second = await wire.batcher.task("small"), await wire.batcher.task("large")
    await call.read()
    call.cancel()
    await wire.batcher.cancelled(first)
    await wire.batcher.cancelled(second)
    await wire.until(lambda: len(wire.gateway.registry) == 0)


async def test_without_a_worker_the_second_model_does_not_begin(wire: Wire) -> None:
    await wire.batcher.report("small")
    await wire.until(lambda: not wire.gateway.ready("large"))
    call = wire.stub.Generate(prompt(model=""))
    first = await wire.batcher.task("small")
    await wire.ready("small", "large")
    await wire.batcher.send(first, saying(wire, BAD, -3.0))
    second = await wire.batcher.task("large")  # an ordinary cascade: now it begins
    assert second.request_id == f"{first.request_id}-2"
    await wire.batcher.send(second, last(0, wire.tokens("hello")))
    assert text_of(await events_of(call)) == "hello"
    record = await explained(wire, first.request_id)
    assert "no worker serves large" in record.attempts[0].single_start_reason


async def test_the_share_of_a_tenant_bounds_how_many_have_both_at_work(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit, "ALWAYS_ALLOWED", 1)
    calls = [wire.stub.Generate(prompt(model="")) for _ in range(2)]
    firsts = [await wire.batcher.task("small") for _ in calls]
    second = await wire.batcher.task("large")
    (alone,) = [task for task in firsts if f"{task.request_id}-2" != second.request_id]
    for task in firsts:
        await wire.batcher.send(task, saying(wire, GOOD, -0.01, end=ROW_END_STOP))
    for call in calls:
        assert text_of(await events_of(call)) == GOOD
    record = await explained(wire, alone.request_id)
    assert "escalated 50%" in record.attempts[0].single_start_reason
    assert len(record.attempts) == 1
    wire.stub.Generate(prompt(model=""))  # those that were not needed count no more
    first, second = await wire.batcher.task("small"), await wire.batcher.task("large")
    assert second.request_id == f"{first.request_id}-2"


async def test_a_pair_that_would_cost_too_much_starts_with_one_model(
    nats_url: str, model_folder: Path
) -> None:
    prices = {"large": (0.0, 1e6), "small": (0.0, 1e6)}  # one a token
    bounded = routing(max_cost=15.0)
    asked = prompt(model="", sampling=pb.SamplingParams(max_tokens=8))
    async with open_wire(nats_url, model_folder, routing=bounded, prices=prices) as wire:
        call = wire.stub.Generate(asked)
        first = await wire.batcher.task("small")
        await wire.batcher.send(first, saying(wire, "world" * 4, -3.0))
        second = await wire.batcher.task("large")  # 4 of the first answer, and 8: less than 15
        await wire.batcher.send(second, last(0, wire.tokens("hello")))
        assert text_of(await events_of(call)) == "hello"
        record = await explained(wire, first.request_id)
        assert "would cost more" in record.attempts[0].single_start_reason


async def test_discarded_work_is_charged(nats_url: str, model_folder: Path) -> None:
    bounded = routing() | {"budgets": [{"per_hour": 3.0, "model": "small"}]}
    prices = {"large": (0.0, 1e6)}  # the small one is free
    async with open_wire(nats_url, model_folder, routing=bounded, prices=prices) as wire:
        for strategy in ("speculative", "budget"):
            call = wire.stub.Generate(prompt(model=""))
            first = await wire.batcher.task("small")
            if strategy == "speculative":
                second = await wire.batcher.task("large")
                await wire.batcher.send(second, frame(0, wire.tokens(GOOD)))
            await wire.batcher.send(first, saying(wire, GOOD, -0.01, end=ROW_END_STOP))
            events = await events_of(call)
            assert word_of(pb.RouteStrategy, events[0].started.route.strategy) == strategy
            assert text_of(events) == GOOD


async def test_second_rows_that_fail_open_the_breaker_and_then_none_begins(
    nats_url: str, model_folder: Path
) -> None:
    fragile = routing() | {"breaker": {"failures": 1, "open_s": 60.0}}
    async with open_wire(nats_url, model_folder, routing=fragile) as wire:
        for attempt in range(2):
            call = wire.stub.Generate(prompt(model=""))
            first = await wire.batcher.task("small")
            if attempt == 0:
                second = await wire.batcher.task("large")
                await wire.batcher.send(second, frame(0, end=ROW_END_FAILED, error=BROKEN))
                await wire.forgotten(second)
            await wire.batcher.send(first, saying(wire, GOOD, -0.01, end=ROW_END_STOP))
            assert text_of(await events_of(call)) == GOOD
        record = await explained(wire, first.request_id)
    assert "circuit breaker is open" in record.attempts[0].single_start_reason


async def test_a_caller_that_resumes_on_another_gateway_continues_with_one_model(
    wire: Wire,
) -> None:
    call = wire.stub.Generate(resumed(prompt(model=""), wire.tokens("hello"), "small"))
    task = await wire.batcher.task("small")
    assert list(task.produced_token_ids) == wire.tokens("hello")
    await wire.batcher.send(task, last(1, wire.tokens(" world")))
    events = await events_of(call)
    assert tokens_of(events) == wire.tokens(" world")
    assert [leg.model for leg in events[-1].finished.attempts] == ["small"]


async def test_each_answer_has_an_output_filter_of_its_own(wire: Wire) -> None:
    text = f"The key is {KEY}, keep it."
    call = wire.stub.Generate(prompt(model=""))
    first, second = await wire.batcher.task("small"), await wire.batcher.task("large")
    tokens = wire.tokens(text)
    await wire.batcher.send(second, frame(0, tokens[:20]))
    await wire.batcher.send(first, saying(wire, f"Take {OTHER_KEY} at once", -3.0))
    await wire.batcher.send(second, last(20, tokens[20:]))
    assert text_of(await events_of(call)) == "The key is <AWS_ACCESS_KEY_1>, keep it."
    record = await explained(wire, first.request_id)
    (decision,) = record.decisions
    assert (decision.rule, decision.count) == ("secret.aws_access_key", 1)
