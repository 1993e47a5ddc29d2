"""`generate_batch` of both clients."""

import pytest

from sluice.client import AnswerBatch, AsyncClient, Client
from sluice.errors import InvalidRequest, SafetyBlocked
from sluice.v1 import inference_pb2 as pb
from tests.support.scripted import Fail, ScriptedService, delta, finished, started

WHOLE = [started(), delta(0, "abc"), finished()]
REFUSED = [Fail(SafetyBlocked("not this"))]


async def test_batch_keeps_the_order_of_answers_and_errors() -> None:
    seen: list[int] = []
    async with (
        ScriptedService.serve([WHOLE, REFUSED, WHOLE]) as service,
        AsyncClient(service.address) as client,
    ):
        batch = await client.generate_batch(
            ["a", "b", pb.GenerateRequest(prompt="c")],
            concurrency=1,
            max_tokens=5,
            done=lambda at, _: seen.append(at),
        )
    assert isinstance(batch.outcomes[1], SafetyBlocked)
    assert [answer.text for answer in batch.answers] == ["abc", "abc"]
    assert (batch.failed, batch.prompt_tokens, batch.completion_tokens) == (1, 10, 6)
    assert batch.tokens_per_s == pytest.approx(3 * len(batch.answers) / batch.wall_s)
    assert seen == [0, 1, 2]
    assert [request.prompt for request in service.requests] == ["a", "b", "c"]
    assert service.requests[0].priority == pb.PRIORITY_STANDARD
    assert service.requests[0].sampling.max_tokens == 5
    assert service.requests[2].idempotency_key


def ask(address: str, count: int) -> AnswerBatch:
    with Client(address) as client:
        return client.generate_batch([f"p{n}" for n in range(count)], concurrency=8)


async def test_the_blocking_client_asks_as_many_at_once() -> None:
    import asyncio

    async with ScriptedService.serve([WHOLE]) as service:
        batch = await asyncio.to_thread(ask, service.address, 20)
        empty = await asyncio.to_thread(ask, service.address, 0)
    assert len(batch.answers) == 20
    assert empty.outcomes == ()


async def test_invalid_prompt_is_refused_before_any_call() -> None:
    async with ScriptedService.serve([WHOLE]) as service, AsyncClient(service.address) as client:
        with pytest.raises(InvalidRequest, match=r"prompts\[1\]"):
            await client.generate_batch(["a", "\ud800"])
        with pytest.raises(InvalidRequest, match="idempotency_key"):
            await client.generate_batch(["a"], idempotency_key="k")
    assert not service.requests
