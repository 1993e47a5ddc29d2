"""A foreign client in a process of its own: the plain stubs, driven by JSON lines on standard input.

    {"do": "open", "model": "small", "rate": 10, "seconds": 8, "seed": 1}   -> milliseconds to first tokens
    {"do": "flood", "model": "small", "callers": 32, "tokens": 64}          -> [], at once; goes on until "stop"
    {"do": "count"}                                                         -> [tokens of the flood so far]
    {"do": "stop"}                                                          -> []

A flood is of class bulk, or interactive with "urgent". "open" is an open loop: Poisson arrivals, each at its time
whether or not earlier ones have ended, one token each. With "worker" (an address of Triton) the same calls go straight
into the worker, as the batcher does it.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import grpc
import uvloop

from bench.support.triton_direct import DirectWorker, rows
from sluice.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    Stub = inference_pb2_grpc.InferenceServiceAsyncStub

CALL_S: Final = 60.0
PROMPT: Final = "What is the total of 314, 272, 973, 323, 486?"


class Caller:
    """Calls one gateway."""

    def __init__(self, stub: "Stub") -> None:
        self._stub = stub
        self._flood: list[asyncio.Task[None]] = []
        self._tokens = 0

    async def do(self, command: dict[str, Any]) -> list[float]:
        """Executes one command."""
        match command.pop("do"):
            case "open":
                return await self._open(**command)
            case "flood":
                self._start(**command)
            case "count":
                return [float(self._tokens)]
            case "stop":
                await self._stop()
        return []

    async def _open(
        self,
        model: str,
        rate: float,
        seconds: float,
        seed: int,
        worker: str = "",
        prompt: list[int] | None = None,
    ) -> list[float]:
        arrivals = list(poisson(rate, seconds, seed))
        if not worker:
            return await play(arrivals, lambda: self._first_ms(model))
        async with DirectWorker(worker, model) as direct:
            return await play(arrivals, lambda: direct.first_ms(rows([prompt or []], 1, [])))

    async def _first_ms(self, model: str) -> float:
        request = _request(model, inference_pb2.PRIORITY_INTERACTIVE, 1)
        begun = time.perf_counter()
        async for response in self._stub.Generate(request, timeout=CALL_S):
            if response.delta.token_ids:
                first_ms = (time.perf_counter() - begun) * 1000
        return first_ms

    def _start(self, model: str, callers: int, tokens: int, urgent: bool = False) -> None:
        self._tokens = 0
        priority = inference_pb2.PRIORITY_INTERACTIVE if urgent else inference_pb2.PRIORITY_BULK
        request = _request(model, priority, tokens)
        self._flood = [asyncio.create_task(self._repeat(request)) for _ in range(callers)]

    async def _repeat(self, request: inference_pb2.GenerateRequest) -> None:
        while True:
            async for response in self._stub.Generate(request, timeout=CALL_S):
                self._tokens += len(response.delta.token_ids)

    async def _stop(self) -> None:
        for task in self._flood:
            task.cancel()
        await asyncio.gather(*self._flood, return_exceptions=True)


def poisson(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Moments within ``seconds``; the same for the same seed."""
    draws, at = random.Random(seed), 0.0
    while (at := at + draws.expovariate(rate)) < seconds:
        yield at


async def play(arrivals: list[float], call: Callable[[], Awaitable[float]]) -> list[float]:
    """Makes each call at its time; their results."""
    begun, calls = time.perf_counter(), []
    for at in arrivals:
        await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
        calls.append(asyncio.ensure_future(call()))
    return list(await asyncio.gather(*calls))


def _request(
    model: str, priority: "inference_pb2.Priority.ValueType", tokens: int
) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.SamplingParams(max_tokens=tokens, min_tokens=tokens)
    return inference_pb2.GenerateRequest(
        prompt=PROMPT, model=model, priority=priority, sampling=sampling
    )


async def main(address: str) -> None:
    """Answers each line of standard input with one of standard output."""
    async with grpc.aio.insecure_channel(address) as channel:
        caller = Caller(inference_pb2_grpc.InferenceServiceStub(channel))
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(await caller.do(json.loads(line))), flush=True)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
