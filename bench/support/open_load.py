"""Plays a trace on a running mesh in open loop: each request at its time, whether or not earlier ones have ended.

What comes back is a trace as well: what was sent and measured, so that the very same can be simulated.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Final

import grpc

from simulator.trace import Arrival
from sluice.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    Stub = inference_pb2_grpc.InferenceServiceAsyncStub

CALL_S: Final = 120.0
TENANT_KEY: Final = "sluice-tenant"
PRIORITIES: Final = {
    "interactive": inference_pb2.PRIORITY_INTERACTIVE,
    "standard": inference_pb2.PRIORITY_STANDARD,
    "bulk": inference_pb2.PRIORITY_BULK,
}
DIGITS: Final = "0123456789"
"""One token each of the shipped tokenizer: digits stand alone. Random ones, so that prompts share no prefix."""


class OpenLoad:
    """Asks one model of one gateway."""

    def __init__(self, stub: "Stub", model: str) -> None:
        self._stub = stub
        self._model = model
        self._chance = Random(1)

    async def play(self, trace: Iterable[Arrival]) -> list[Arrival]:
        """Sends all of ``trace``; what was answered, with its real lengths and the times as the caller saw them."""
        begun = time.perf_counter()
        calls = []
        for arrival in trace:
            await asyncio.sleep(max(0.0, begun + arrival.at_s - time.perf_counter()))
            calls.append(asyncio.create_task(self.ask(arrival, begun)))
        answered = await asyncio.gather(*calls)
        return [arrival for arrival in answered if arrival is not None]

    async def repeat(self, arrival: Arrival, callers: int, requests: int) -> int:
        """``requests`` like ``arrival`` of each of ``callers``, one after the other; how many were answered."""

        async def caller() -> int:
            return sum([await self.ask(arrival, 0.0) is not None for _ in range(requests)])

        return sum(await asyncio.gather(*(caller() for _ in range(callers))))

    async def flood(
        self, arrivals: Iterator[Arrival], outstanding: int, seconds: float
    ) -> list[Arrival]:
        """Requests of ``arrivals``, so many at a time, for ``seconds``; those that were answered in that time."""
        begun = time.perf_counter()
        answered: list[Arrival] = []

        async def one_after_the_other() -> None:
            for arrival in arrivals:
                done = await self.ask(arrival, begun)
                if done is not None:
                    answered.append(done)

        tasks = [asyncio.create_task(one_after_the_other()) for _ in range(outstanding)]
        await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return answered

    async def ask(self, arrival: Arrival, begun: float) -> Arrival | None:
        """Sends one request now, whose answer is as long as it may be; None when it was refused or late."""
        sent = time.perf_counter()
        first_s: float | None = None
        longest = arrival.max_tokens
        request = inference_pb2.GenerateRequest(
            prompt="".join(self._chance.choices(DIGITS, k=arrival.prompt_tokens)),
            raw_prompt=True,
            model=self._model,
            priority=PRIORITIES[arrival.priority_class],
            sampling=inference_pb2.SamplingParams(max_tokens=longest, min_tokens=longest),
        )
        call = self._stub.Generate(
            request, timeout=CALL_S, metadata=((TENANT_KEY, arrival.tenant),)
        )
        try:
            async for response in call:
                if first_s is None and response.delta.token_ids:
                    first_s = time.perf_counter() - sent
                if response.HasField("finished"):
                    usage = response.finished.usage
                    return replace(
                        arrival,
                        at_s=sent - begun,
                        prompt_tokens=usage.prompt_tokens,
                        answer_tokens=max(1, usage.completion_tokens),
                        ttft_s=first_s,
                        latency_s=time.perf_counter() - sent,
                    )
        except grpc.aio.AioRpcError:
            return None
        finally:
            call.cancel()
        return None
