"""A cascade on a call's way: what each batcher's side gets, and what the caller sees; before a real nats-server."""

from collections.abc import AsyncIterator

import pytest

from sluice.internal.v1.frame_pb2 import TASK_END_LENGTH, TASK_END_STOP, Logprobs
from sluice.v1 import inference_pb2 as pb
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.cascades import BAD, GOOD, explained, notices, saying
from tests.gateway.kit.wire import Opened, Wire, events_of, is_served, prompt, resumed, text_of

CASCADE = {"first": "small", "second": "large", "commit_tokens": 4, "mode": "hold"}


@pytest.fixture
async def cascade(opened: Opened) -> AsyncIterator[Wire]:
    routing = {"default": "small", "cascade": CASCADE}
    async with opened(routing=routing) as wire:
        yield wire


async def test_a_sure_answer_is_committed_and_streams_on(cascade: Wire) -> None:
    call = cascade.stub.Generate(prompt(model=""))
    task = await cascade.batcher.task("small")
    assert task.sampling.logprobs
    await cascade.batcher.send(task, saying(cascade, GOOD, -0.01))
    count = len(cascade.tokens(GOOD))
    await cascade.batcher.send(task, last(count, cascade.tokens("hello")))
    events = await events_of(call)
    assert events[0].started.route.strategy == pb.ROUTE_STRATEGY_CASCADE
    assert text_of(events).startswith("hello world")
    assert not any(event.delta.logprobs for event in events)  # the caller asked for none
    assert events[-1].finished.model == "small"
    assert len(events[-1].finished.attempts) == 1


async def test_held_answer_in_doubt_is_given_by_the_second_model(cascade: Wire) -> None:
    call = cascade.stub.Generate(prompt(model=""))
    first = await cascade.batcher.task("small")
    await cascade.batcher.send(first, saying(cascade, BAD, -3.0))
    second = await cascade.batcher.task("large")
    await cascade.batcher.cancelled(first)
    assert second.request_id == f"{first.request_id}-2"
    assert second.prompt_token_ids == first.prompt_token_ids
    assert second.sampling.seed == first.sampling.seed
    assert not second.sampling.logprobs
    assert second.timeout_ms <= first.timeout_ms
    assert first.waited_us > 0
    assert second.waited_us == 0, "it did not wait for admission"
    await cascade.batcher.send(second, last(0, cascade.tokens("hello")))
    events = await events_of(call)
    (notice,) = notices(events)
    assert (notice.kind, notice.model) == (pb.NOTICE_KIND_ESCALATED, "large")
    assert text_of(events) == "hello"
    finished = events[-1].finished
    assert finished.model == "large"
    assert [(leg.model, leg.usage.completion_tokens) for leg in finished.attempts] == [
        ("small", len(cascade.tokens(BAD))),
        ("large", 1),
    ]
    await cascade.forgotten(second)
    record = await explained(cascade, first.request_id)
    assert [leg.model for leg in record.attempts] == ["small", "large"]
    assert "log-probability" in record.attempts[0].escalation_reason
    assert [one.model for one in record.route.candidates] == ["small", "large"]


async def test_an_answer_before_the_commit_point_is_checked_whole(cascade: Wire) -> None:
    call = cascade.stub.Generate(prompt(model=""))
    first = await cascade.batcher.task("small")
    await cascade.batcher.send(first, saying(cascade, "hello", -0.01, end=TASK_END_LENGTH))
    second = await cascade.batcher.task("large")
    await cascade.forgotten(first)  # it has ended: nothing is to be cancelled
    await cascade.batcher.send(second, last(0, cascade.tokens("world")))
    events = await events_of(call)
    assert "unfinished" in notices(events)[0].message
    assert text_of(events) == "world"
    call = cascade.stub.Generate(prompt(model=""))
    task = await cascade.batcher.task("small")
    await cascade.batcher.send(task, saying(cascade, "hello", -0.01, end=TASK_END_STOP))
    assert text_of(await events_of(call)) == "hello"


async def test_an_answer_that_the_policy_ends_is_not_escalated(opened: Opened) -> None:
    safety = {"policies": {"default": {"actions": {"secret.*": "block"}}}}
    routing = {"default": "small", "cascade": CASCADE | {"commit_tokens": 64}}
    async with opened(routing=routing, safety=safety) as wire:
        call, task = await wire.begin(prompt(model=""))
        await wire.batcher.send(
            task, saying(wire, "The key is AKIAQ3ZK7WPX2MNB5TRD, keep it.", -0.01)
        )
        await wire.batcher.cancelled(task)
        events = await events_of(call)
    assert events[-1].finished.reason == pb.FINISH_REASON_CONTENT_FILTER
    assert "AKIA" not in text_of(events)


async def test_first_answer_is_kept_without_a_second_worker(opened: Opened) -> None:
    routing = {"default": "small", "cascade": CASCADE}
    async with opened(routing=routing) as wire:
        await wire.batcher.report("small")
        await wire.until(lambda: not is_served(wire.gateway, "large"))
        call, task = await wire.begin(prompt(model=""))
        await wire.batcher.send(task, saying(wire, BAD, -3.0, end=TASK_END_STOP))
        events = await events_of(call)
        assert text_of(events) == BAD
        record = await explained(wire, task.request_id)
    assert "no worker serves large" in record.attempts[0].kept_reason


async def test_a_replaced_answer_streams_to_callers_that_accept_it(opened: Opened) -> None:
    routing = {"default": "small", "cascade": CASCADE | {"mode": "replace", "commit_tokens": 16}}
    async with opened(routing=routing) as wire:
        call, first = await wire.begin(prompt(model="", accept_replace=True))
        await wire.batcher.send(first, saying(wire, BAD, -0.01))
        assert (await call.read()).HasField("started")
        assert (await call.read()).delta.text == BAD
        count = len(wire.tokens(BAD))
        unsure = Logprobs(logprob=-30.0, top_token_ids=[1, 2], top_logprobs=[-30.0, -31.0])
        await wire.batcher.send(first, frame(count, [5], logprobs=[unsure]))
        second = await wire.batcher.task("large")
        events = await wire.end(call, second, "hello")
        assert notices(events)[0].kind == pb.NOTICE_KIND_ESCALATED
        assert next(event.delta.index for event in events if event.HasField("delta")) == 0
        assert text_of(events) == "hello"

        call = wire.stub.Generate(prompt(model=""))  # one that does not say so waits
        first = await wire.batcher.task("small")
        await wire.batcher.send(first, saying(wire, BAD, -3.0))
        second = await wire.batcher.task("large")
        assert text_of(await wire.end(call, second, "hello")) == "hello"


async def test_elsewhere_the_model_of_the_held_tokens_continues(cascade: Wire) -> None:
    call = cascade.stub.Generate(resumed(prompt(model=""), cascade.tokens("hello"), "large"))
    task = await cascade.batcher.task("large")
    assert list(task.produced_token_ids) == cascade.tokens("hello")
    await cascade.batcher.send(task, last(1, cascade.tokens("hello")))
    events = await events_of(call)
    assert events[0].started.model == "large"
    assert not notices(events)
