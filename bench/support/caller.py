"""A foreign client in a process of its own: the plain stubs, driven by JSON lines on standard input.

    {"do": "open", "model": "small", "rate": 10, "seed": 1}          -> milliseconds to first tokens
    {"do": "flood", "model": "small", "callers": 32}                 -> [], at once; goes on until "stop"
    {"do": "count"}                                                  -> [tokens of the flood so far]
    {"do": "stop"}                                                   -> []
    {"do": "saturate", "model": "small", "worker": "ADDRESS"}        -> [calls/s that are answered at most]

Prompts are of bench/support/load.py. "open" is an open loop: `CALLS` Poisson arrivals, each at
its time whether or not earlier ones have ended, of class interactive, with `ANSWERS` tokens in turn, or one with
"single"; counted is the first message with visible text. A flood is of class bulk, each caller with its next request
when the last has ended, answers of `BULK` tokens in turn. With "worker" (an address of Triton) the same calls go
straight into the worker as tokens (bench/support/triton_direct.py), with "queue_s" after a queue delay.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import grpc
import uvloop

from bench.support.load import Item, closed_loop, requests, task_prompts
from bench.support.triton_direct import ROWS_MAX, DirectWorker, row
from gateway.config.models import load_catalog
from sluice import settings as config
from sluice.internal.v1 import worker_pb2
from sluice.settings.shipped import SPECIALISTS
from sluice.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    Stub = inference_pb2_grpc.InferenceServiceAsyncStub

CALL_S: Final = 120.0
CALLS: Final = 150
ANSWERS: Final = (8, 16, 32, 64)
BULK: Final = (16, 48, 80, 112)
BULK_PROMPTS: Final = 2_000
"""They are asked again and again."""
SATURATE: Final = 600


class Caller:
    """Calls one gateway."""

    def __init__(self, stub: "Stub") -> None:
        self._stub = stub
        self._flood: asyncio.Task[float] | None = None
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
            case "saturate":
                return [await _saturate(**command)]
        return []

    async def _open(
        self, model: str, rate: float, seed: int, single: bool = False, worker: str = "", queue_s: float = 0.0
    ) -> list[float]:  # fmt: skip
        arrivals, tokens = list(poisson(rate, CALLS, seed)), (1,) if single else ANSWERS
        asked = requests(task_prompts(CALLS, seed), model, tokens)
        for request in asked:
            request.priority = inference_pb2.PRIORITY_INTERACTIVE
        if not worker:
            return await play(arrivals, asked, self._first_ms)
        async with DirectWorker(worker, model, queue_s=queue_s) as direct:
            return await play(arrivals, rows_of(model, asked), direct.ask)

    async def _first_ms(self, request: inference_pb2.GenerateRequest) -> float:
        begun, first_ms = time.perf_counter(), 0.0
        async for response in self._stub.Generate(request, timeout=CALL_S):
            if not first_ms and response.delta.text:
                first_ms = (time.perf_counter() - begun) * 1000
        return first_ms or (time.perf_counter() - begun) * 1000

    def _start(self, model: str, callers: int) -> None:
        self._tokens = 0
        asked = requests(task_prompts(BULK_PROMPTS, callers), model, BULK)
        for request in asked:
            request.priority = inference_pb2.PRIORITY_BULK
        self._flood = asyncio.create_task(closed_loop(callers, cycle(asked), self._read))

    async def _read(self, request: inference_pb2.GenerateRequest) -> None:
        async for response in self._stub.Generate(request, timeout=CALL_S):
            self._tokens += len(response.delta.token_ids)

    async def _stop(self) -> None:
        assert self._flood is not None
        assert not self._flood.done(), "the flood has ended by itself"
        self._flood.cancel()
        await asyncio.gather(self._flood, return_exceptions=True)


async def _saturate(model: str, worker: str) -> float:
    """Calls/s of a worker with as many rows as it takes."""
    asked = rows_of(model, requests(task_prompts(SATURATE, 0), model, ANSWERS))
    async with DirectWorker(worker, model) as direct:
        return len(asked) / await closed_loop(ROWS_MAX, asked, direct.ask)


def rows_of(
    model: str, asked: Sequence[inference_pb2.GenerateRequest]
) -> list[worker_pb2.BatchedTask]:
    """The same calls as the gateway would send them to a worker of a shipped model."""
    tokenizer = load_catalog(config.Settings(models=SPECIALISTS))[model].tokenizer
    return [
        row(
            tokenizer.encode_chat([{"role": "user", "content": one.prompt}]),
            one.sampling.max_tokens,
            one.sampling.min_tokens,
        )
        for one in asked
    ]


def poisson(rate: float, count: int, seed: int) -> Iterator[float]:
    """Moments; the same for the same seed."""
    draws, at = random.Random(seed), 0.0
    for _ in range(count):
        at += draws.expovariate(rate)
        yield at


async def play(
    arrivals: Sequence[float], items: Sequence[Item], call: Callable[[Item], Awaitable[float]]
) -> list[float]:
    """Makes each call at its time; their results."""
    begun, calls = time.perf_counter(), []
    for at, item in zip(arrivals, items, strict=True):
        await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
        calls.append(asyncio.ensure_future(call(item)))
    return list(await asyncio.gather(*calls))


async def main(address: str) -> None:
    """Answers each line of standard input with one of standard output."""
    async with grpc.aio.insecure_channel(address) as channel:
        caller = Caller(inference_pb2_grpc.InferenceServiceStub(channel))
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(await caller.do(json.loads(line))), flush=True)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
