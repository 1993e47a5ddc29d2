"""Callers in closed loop, and what they cost the servers that answer them: processor time by process.

Prompts are held-out tasks of all kinds and levels of the shipped tiers, so that lengths are mixed, and a number before
each makes it a new one: no prefix is in a cache. Callers send the same bytes to all servers, with the prompt where any
version of the API reads it, and parse nothing of the answer: they cost the same whatever the messages are. Each sends
its next request when the last has ended. CPU time is user and system time of the servers' processes over a run, divided
by what was answered in it; what they do while idle in that time counts, the client does not.
"""

import asyncio
import functools
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import grpc
import psutil

from bench.support.bare_stream import EVENTS
from bench.support.meshes import ports_of, program
from model_workers.tiers.tasks import heldout
from sluice.v1 import inference_pb2
from supervisor.mesh import Mesh

CALL_S: Final = 120.0
SEED: Final = 5001
_NUMBERS: Final = itertools.count(os.getpid() % 1_000 * 100_000)
"""Of prompts; other processes have others."""
GENERATE: Final = "/sluice.v1.InferenceService/Generate"

Processes = Mapping[str, psutil.Process]
Item = TypeVar("Item")


def task_prompts(count: int, seed: int) -> list[str]:
    """Prompts of all kinds and levels, drawn from the seed, with a new number before each."""
    texts = random.Random(seed).choices(_tasks(), k=count)
    return [f"{next(_NUMBERS)}: {text}" for text in texts]


@functools.cache
def _tasks() -> list[str]:
    return [example.prompt for example in heldout(n_per_cell=100, seed=SEED)]


def requests(
    prompts: Iterable[str], model: str, tokens: Sequence[int]
) -> list[inference_pb2.GenerateRequest]:
    """A request a prompt, with exactly so many tokens of answer, in turn."""
    return [
        inference_pb2.GenerateRequest(
            prompt=prompt,
            model=model,
            sampling=inference_pb2.SamplingParams(
                max_tokens=tokens[number % len(tokens)], min_tokens=tokens[number % len(tokens)]
            ),
        )
        for number, prompt in enumerate(prompts)
    ]


async def closed_loop(
    callers: int, items: Iterable[Item], call: Callable[[Item], Awaitable[object]]
) -> float:
    """Makes ``call`` for each of ``items``, so many at a time; seconds."""
    left, begun = iter(items), time.perf_counter()

    async def caller() -> None:
        for item in left:
            await call(item)

    await asyncio.gather(*(caller() for _ in range(callers)))
    return time.perf_counter() - begun


@dataclass(frozen=True)
class Server:
    """One side: a mesh or the bare server."""

    channel: grpc.aio.Channel
    model: str
    processes: Processes

    async def ask(self, request: inference_pb2.GenerateRequest) -> None:
        """Reads the answer to its end."""
        size = 0
        async for message in self.channel.unary_stream(GENERATE)(_packed(request), timeout=CALL_S):
            size += len(message)
        assert size, "every request is answered"


def _packed(request: inference_pb2.GenerateRequest) -> bytes:
    """With the prompt once more, where releases before this message had it."""
    text = request.prompt.encode()
    length = [len(text)] if len(text) < 128 else [len(text) & 127 | 128, len(text) >> 7]
    return request.SerializeToString() + b"\x0a" + bytes(length) + text


@dataclass(frozen=True)
class Cost:
    """What a run took: seconds of CPU by process, and of the clock."""

    cpu_s: Mapping[str, float]
    wall_s: float

    @property
    def all_s(self) -> float:
        """CPU of all processes."""
        return sum(self.cpu_s.values())


@dataclass(frozen=True)
class Load:
    """What callers ask in a run; ``seed`` draws prompts."""

    callers: int
    answers: int
    tokens: Sequence[int] = (1,)

    def of(self, model: str, seed: int) -> list[inference_pb2.GenerateRequest]:
        return requests(task_prompts(self.answers, seed), model, self.tokens)

    @property
    def answer_tokens(self) -> int:
        return sum(self.tokens[number % len(self.tokens)] for number in range(self.answers))


async def interleaved(servers: Sequence[Server], load: Load, slices: int, seed: int) -> list[Cost]:
    """What each of ``servers`` took for ``slices`` loads in turns, all in all; a slice before them is left out."""
    found: list[list[Cost]] = [[] for _ in servers]
    for number in range(slices + 1):
        order = list(zip(servers, found, strict=True))
        for server, costs in order if number % 2 else reversed(order):
            asked = load.of(server.model, seed * (slices + 1) + number)
            costs.append(
                await cost(server.processes, lambda s=server, a=asked: closed_loop(load.callers, a, s.ask))  # type: ignore[misc]
            )  # fmt: skip
    return [summed(costs[1:]) for costs in found]


async def cost(processes: Processes, work: Callable[[], Awaitable[float]]) -> Cost:
    """What ``work``, which returns its seconds, takes the processes."""
    before = cpu_s(processes)
    wall_s = await work()
    after = cpu_s(processes)
    return Cost({name: after[name] - before[name] for name in after}, wall_s)


def summed(costs: Sequence[Cost]) -> Cost:
    """All of them."""
    names = costs[0].cpu_s
    cpu = {name: sum(one.cpu_s[name] for one in costs) for name in names}
    return Cost(cpu, sum(one.wall_s for one in costs))


def cpu_s(processes: Processes) -> dict[str, float]:
    """Seconds of CPU so far, by process."""
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def processes_of(mesh: Mesh) -> dict[str, psutil.Process]:
    """The processes of a mesh and their children (a Triton's stub), by name."""
    return families({state.name: state.pid for state in mesh.state.processes})


def families(pids: Mapping[str, int]) -> dict[str, psutil.Process]:
    """Processes with their children, by name."""
    found = {}
    for name, pid in pids.items():
        process = found[name] = psutil.Process(pid)
        for number, child in enumerate(process.children(recursive=True)):
            found[f"{name} child {number}"] = child
    return found


@asynccontextmanager
async def bare_server() -> AsyncIterator[Server]:
    """A grpc.aio server under uvloop that sends the messages that a gateway sends, in a process of its own."""
    async with program("bare_stream") as process:
        (port,) = await ports_of(process)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Server(channel, EVENTS, {"bare": psutil.Process(process.pid)})
