"""GenerateBatch: many requests in one call, through a real gateway; the test is the batcher."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from gateway.api import batch
from sluice.client import Answer, AsyncClient
from sluice.errors import (
    DeadlinePassed,
    InvalidRequest,
    MessageTooLarge,
    PromptTooLong,
    UnknownModel,
)
from sluice.internal.v1.task_pb2 import Task
from sluice.v1 import inference_pb2 as pb
from tests.gateway.kit.batcher import BOUND_S, last
from tests.gateway.kit.cascades import explained
from tests.gateway.kit.wire import Opened, Wire, error_of, prompt


def batch_of(*texts: str, **fields: Any) -> pb.GenerateBatchRequest:
    return pb.GenerateBatchRequest(requests=[prompt(text) for text in texts], **fields)


async def take(wire: Wire, count: int, of_class: str = "standard") -> dict[str, Task]:
    """Return the next tasks, by the text of their prompts."""
    tokenizer = wire.catalog["small"].tokenizer.tokenizer
    tasks = [await wire.batcher.task(priority_class=of_class) for _ in range(count)]
    return {tokenizer.decode(task.prompt_token_ids): task for task in tasks}


async def finish(wire: Wire, tasks: dict[str, Task]) -> None:
    for text, task in tasks.items():
        await wire.batcher.send(task, last(0, wire.tokens(f"re {text}")))


def outcomes(response: pb.GenerateBatchResponse) -> Sequence[str]:
    return [result.answer.text or result.error.reason for result in response.results]


async def test_batch_answers_in_the_order_of_the_requests(opened: Opened) -> None:
    async with opened(prices={"small": (1e6, 2e6)}) as wire:
        call = wire.stub.GenerateBatch(batch_of("one", "two", "three"))
        tasks = await take(wire, 3)
        await finish(wire, dict(reversed(tasks.items())))
        response = await call
        assert outcomes(response) == ["re one", "re two", "re three"]
        answers = [result.answer for result in response.results]
        record = await explained(wire, answers[0].started.request_id)
    assert response.currency == record.currency
    assert len({answer.started.request_id for answer in answers}) == 3
    assert len({answer.started.trace_id for answer in answers}) == 1
    for result in response.results:
        usage = result.answer.finished.usage
        assert result.cost == usage.prompt_tokens + 2 * usage.completion_tokens > 0
    assert record.attempts[0].cost == response.results[0].cost


async def test_batch_gives_each_request_its_own_error(wire: Wire) -> None:
    request = batch_of("one", "x " * 300, "two")
    request.requests.add(prompt="three", model="none")
    request.requests.add(prompt="four", model="small", sampling=pb.SamplingParams(n=2))
    request.requests.add(prompt="five", model="small", priority=pb.PRIORITY_BULK)
    call = wire.stub.GenerateBatch(request)
    await finish(wire, await take(wire, 2))
    response = await call
    reasons = ["PROMPT_TOO_LONG", "MODEL_UNKNOWN", "REQUEST_INVALID", "REQUEST_INVALID"]
    assert outcomes(response) == ["re one", reasons[0], "re two", *reasons[1:]]
    too_long = response.results[1].error
    assert too_long.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert too_long.metadata["context_tokens"] == "256"
    assert too_long.metadata["request_id"]
    assert "priority: differs" in response.results[-1].error.message


@pytest.mark.parametrize(
    ("priority", "of_class"),
    [
        (pb.PRIORITY_UNSPECIFIED, "standard"),
        (pb.PRIORITY_INTERACTIVE, "interactive"),
        (pb.PRIORITY_BULK, "bulk"),
    ],
)
async def test_batch_has_one_priority(
    wire: Wire, priority: "pb.Priority.ValueType", of_class: str
) -> None:
    request = batch_of("one", "two", priority=priority)
    request.requests[0].priority = priority
    call = wire.stub.GenerateBatch(request)
    await finish(wire, await take(wire, 2, of_class))
    assert outcomes(await call) == ["re one", "re two"]


async def test_batch_has_bounds(wire: Wire) -> None:
    many = pb.GenerateBatchRequest(requests=[prompt()] * (batch.REQUESTS_MAX + 1))
    for request in (pb.GenerateBatchRequest(), many, batch_of("one", priority=9)):
        _, error = await error_of(wire.stub.GenerateBatch(request))
        assert isinstance(error, InvalidRequest)
    _, error = await error_of(wire.stub.GenerateBatch(batch_of(*["x" * 9000] * 120)))
    assert isinstance(error, MessageTooLarge)


@pytest.mark.parametrize("timeout_s", [BOUND_S, 100.01, 999.01])
@pytest.mark.wire(max_timeout_s=2000.0)
async def test_batch_requests_end_before_their_call(wire: Wire, timeout_s: float) -> None:
    """gRPC rounds a timeout up on the wire: by 0.1 s, 1 s and 10 s for these."""
    call = wire.stub.GenerateBatch(batch_of("one"), timeout=timeout_s)
    tasks = await take(wire, 1)
    assert tasks["one"].timeout_ms <= 1000 * (timeout_s - batch.RETURN_S)
    await finish(wire, tasks)
    await call


def test_short_batches_keep_most_of_their_time() -> None:
    assert batch.requests_timeout_s(0.1) == pytest.approx(0.095)


@pytest.mark.wire(max_timeout_s=1.0)
async def test_batch_keeps_answers_that_came_before_the_deadline(wire: Wire) -> None:
    call = wire.stub.GenerateBatch(batch_of("one", "two"), timeout=BOUND_S)
    tasks = await take(wire, 2)
    late = tasks.pop("two")
    await finish(wire, tasks)
    await wire.batcher.cancelled(late)
    response = await call
    assert outcomes(response) == ["re one", DeadlinePassed.reason]


async def test_batch_returns_when_most_requests_never_began(opened: Opened) -> None:
    limits = {"max_concurrent_requests": 8, "max_timeout_s": 1.0}
    async with opened(**limits) as wire:
        requests = batch_of(*["one"] * batch.REQUESTS_MAX)
        call = wire.stub.GenerateBatch(requests, timeout=BOUND_S)
        (first, *_) = (await take(wire, 1)).values()
        await wire.batcher.cancelled(first)
        assert set(outcomes(await call)) == {DeadlinePassed.reason}


async def test_batch_ends_with_its_caller(wire: Wire) -> None:
    call = wire.stub.GenerateBatch(batch_of("one", "two"))
    tasks = await take(wire, 2)
    call.cancel()
    for task in tasks.values():
        await wire.batcher.cancelled(task)


@pytest.mark.wire(max_concurrent_requests=8)
async def test_batch_takes_half_of_what_its_tenant_may_have(wire: Wire) -> None:
    call = wire.stub.GenerateBatch(batch_of("one", "two", "three"))
    tasks = await take(wire, 2)
    # The call itself and two of its requests; the third is not refused.
    assert wire.gateway.active == 3
    await finish(wire, tasks)
    await finish(wire, await take(wire, 1))
    assert outcomes(await call) == ["re one", "re two", "re three"]
    await wire.until(lambda: not wire.gateway.active)


async def test_batch_response_has_a_bound(opened: Opened) -> None:
    texts = [f"text {number}" for number in range(20)]
    async with opened(max_message_bytes=1024) as wire:
        call = wire.stub.GenerateBatch(batch_of(*texts))
        await finish(wire, await take(wire, len(texts)))
        response = await call
    found = outcomes(response)
    answered = sum(text.startswith("re ") for text in found)
    assert 0 < answered < len(texts)
    assert found.count(MessageTooLarge.reason) == len(texts) - answered
    assert response.ByteSize() < 2 * batch.ANSWER_RATIO * 1024


@pytest.mark.wire(prices={"small": (1e6, 0.0)})
async def test_clients_ask_with_one_call(wire: Wire) -> None:
    prompts: list[str | pb.GenerateRequest] = ["one", "x " * 300]
    prompts.append(pb.GenerateRequest(prompt="two", model="none"))
    seen: list[int] = []
    async with AsyncClient(wire.gateway.address) as client:
        call = client.generate_batch(
            prompts, model="small", one_call=True, done=lambda at, _: seen.append(at)
        )
        asked = asyncio.ensure_future(call)
        await finish(wire, await take(wire, 1))
        batch = await asked
        assert (await client.generate_batch([], one_call=True)).outcomes == ()
    first, second, third = batch.outcomes
    assert isinstance(first, Answer)
    assert first.text == "re one"
    assert isinstance(second, PromptTooLong)
    assert second.metadata["context_tokens"] == "256"
    assert isinstance(third, UnknownModel)
    assert batch.costs == (first.usage.prompt_tokens, 0, 0)
    assert batch.currency
    assert seen == [0, 1, 2]
