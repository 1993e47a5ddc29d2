"""Memory of every process of the mesh over many requests: 32 callers in closed loop, short answers of the echo engine.

Prints the resident memory of each process at intervals and, after one round to warm up, its growth per 1,000 requests
with the 95 % confidence interval of the slope. What the mesh keeps by design is bounded by settings, and the bounds are
set so low here that the first round reaches them: `records.max_mib` 8 (NATS holds an index of the records in memory,
about 0.3 KB each), and replays of idempotency keys (none here).

    scripts/robustness soak [--json] [--runs ROUNDS] [--tokens N] [--rate R]
        a round has 20,000 requests: 5 rounds are 100,000, 50 a million; R requests a second leave cores to others
    scripts/robustness soak --hold N [--prompt-words W] [--json]
        what a request costs in each process while N of them wait, run, and have ended

A held request costs what the private memory of a process (USS: pages that no other process has) grows by from N / 2 to
N of them, divided by N / 2; before that N have come and gone, or `WARM_UP`. All are interactive, the prompt is a
number and W words. A waiting one has had Started, and its row is at the batcher: the only slot of its model is taken.
A running one has had at least `FEW` tokens. A token costs what all of them grow by from there to `MANY`, divided by N
and the tokens between. Then all are cancelled, and `TURNS` times N more come and go. An ended request costs what is
left after these more than before them, divided by their number: by then memory is there that was needed once, and is
used again.
"""

import argparse
import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import grpc
from scipy.stats import linregress

from bench.support.harness import MIN_RUNS, Figure, emit, machine
from bench.support.meshes import echo, mesh_of, mesh_settings
from sluice.settings import GatewaySettings, JobsSettings, RecordsSettings, Settings
from sluice.v1 import inference_pb2, inference_pb2_grpc
from tests.robustness.mesh_memory import memory_of
from tests.support.settings import tuned

Costs = dict[str, dict[str, float]]

if TYPE_CHECKING:
    Stub = inference_pb2_grpc.InferenceServiceAsyncStub

FEW_RECORDS: Final = RecordsSettings(max_mib=8)
ROUND: Final = 20_000
"""Requests."""
SAMPLES: Final = 10
"""Of a round."""
CALLERS: Final = 32
MODEL: Final = "echo"
TOKENS: Final = 4
"""Of an answer."""
CALL_S: Final = 60.0
BUSY: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
"""On a busy machine a worker may be taken for lost, or answer late."""
HELD_S: Final = 1e6
WAITING, RUNNING, TOKEN = "waiting", "running", "token"
CONTEXT: Final = 100_000
STEP_MS: Final = 1000.0
ANSWER: Final = 512
FEW, MANY = 4, 36
"""Tokens."""
WARM_UP: Final = 64
"""Most requests before the first sample: never more than the gateway and the model have room for."""
TURNS: Final = 2
SETTLED_S: Final = 3.0
"""Before a sample: what has ended is released then, and what was written has left."""
_T95: Final = 2.0
"""Of Student's distribution, for the tens of samples of a run."""


@dataclass(frozen=True)
class Growth:
    """A line through samples of memory, KiB per 1,000 requests."""

    slope: float
    half_width: float
    """Of the 95 % confidence interval."""


@dataclass
class Samples:
    """Resident memory by process, in KiB, after each number of requests."""

    requests: list[int] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=dict)
    refused: int = 0
    """Requests that ended with one of `BUSY`."""

    def add(self, requests: int, memory: Mapping[str, float]) -> None:
        self.requests.append(requests)
        for name, kib in memory.items():
            self.memory.setdefault(name, []).append(kib)

    def growth(self, name: str, after: int) -> Growth:
        """Of one process, after ``after`` requests."""
        points = zip(self.requests, self.memory[name], strict=True)
        return growth([(count, kib) for count, kib in points if count >= after])


def growth(points: Sequence[tuple[int, float]]) -> Growth:
    """The line of least squares through requests and KiB."""
    line = linregress([count / 1000 for count, _ in points], [kib for _, kib in points])
    return Growth(line.slope, _T95 * line.stderr)


async def soak(
    stub: "Stub",
    requests: int,
    take: Callable[[int], Mapping[str, float]],
    every: int,
    tokens: int = TOKENS,
    rate: float = math.inf,
) -> Samples:
    """Sends ``requests`` requests, at most ``rate`` a second; ``take`` takes a sample at the beginning and after
    ``every`` requests.
    """
    samples, numbers = Samples(), iter(range(1, requests + 1))
    samples.add(0, take(0))
    begun = time.monotonic()

    async def caller() -> None:
        for number in numbers:
            await asyncio.sleep(begun + number / rate - time.monotonic())
            try:
                async for _ in stub.Generate(_request(number, tokens), timeout=CALL_S):
                    pass
            except grpc.aio.AioRpcError as error:
                if error.code() not in BUSY:
                    raise
                samples.refused += 1
                await asyncio.sleep(1)
            if number % every == 0:
                samples.add(number, take(number))

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return samples


def _request(number: int, tokens: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        prompt=f"request {number} of many",
        model=MODEL,
        sampling=inference_pb2.SamplingParams(max_tokens=tokens),
    )


def hold_settings(count: int) -> Settings:
    """A model whose only slot is taken for long, and one that computes ``count`` rows, slowly."""
    waiting, running = (
        echo(slots, name=name, echo_step_ms=STEP_MS, context_tokens=CONTEXT)
        for name, slots in ((WAITING, 1), (RUNNING, count))
    )
    gateway = tuned(
        GatewaySettings,
        address="127.0.0.1:0",
        max_concurrent_requests=2 * count,
        max_timeout_s=HELD_S,
    )
    jobs = JobsSettings(replicas=0)
    return mesh_settings(waiting, running, gateway=gateway, jobs=jobs, records=FEW_RECORDS)


class Held:
    """Calls of one model that are kept open.

    Attributes:
        prompt_tokens: of each.
    """

    def __init__(self, stub: "Stub", model: str, words: int) -> None:
        self._stub, self._model, self._words = stub, model, words
        self._calls: list[Any] = []
        self.prompt_tokens = 0

    async def add(self, count: int) -> None:
        """Begins ``count`` more; returns when each has had Started, a running one `FEW` tokens."""
        calls = [self._begin() for _ in range(count)]
        self._calls += calls
        for call in calls:
            self.prompt_tokens = (await call.read()).started.prompt_tokens
        if self._model == RUNNING:
            await self.have(FEW)

    def _begin(self) -> Any:
        request = inference_pb2.GenerateRequest(
            prompt=f"{len(self._calls)} {'word ' * self._words}",
            model=self._model,
            priority=inference_pb2.PRIORITY_INTERACTIVE,
            sampling=inference_pb2.SamplingParams(max_tokens=ANSWER),
        )
        return self._stub.Generate(request, timeout=HELD_S)

    async def have(self, tokens: int) -> None:
        """Returns when each has had so many tokens."""
        for call in self._calls:
            index = 0
            while index < tokens:
                delta = (await call.read()).delta
                index = delta.index + len(delta.token_ids)

    async def end(self) -> None:
        """Cancels all."""
        for call in self._calls:
            call.cancel()
            await call.code()
        self._calls.clear()


async def hold(
    stub: "Stub", count: int, words: int, take: Callable[[], Awaitable[Mapping[str, float]]]
) -> tuple[Costs, int]:
    """Bytes by state and process; how many tokens a prompt has. ``take`` takes a sample, KiB by process."""
    found: Costs = {}
    first = Held(stub, WAITING, 1)
    await first.add(1)
    for model in (WAITING, RUNNING):
        held = Held(stub, model, words)
        await held.add(min(WARM_UP, count))
        await held.end()
        await held.add(count // 2)
        half = await take()
        await held.add(count - count // 2)
        whole = await take()
        found[model] = _cost(half, whole, count - count // 2)
        if model == RUNNING:
            await held.have(MANY)
            found[TOKEN] = _cost(whole, await take(), count * (MANY - FEW))
        await held.end()
        once = await take()
        for _ in range(TURNS):
            await held.add(count)
            await held.end()
        found[f"{model}_ended"] = _cost(once, await take(), count * TURNS)
    await first.end()
    return found, held.prompt_tokens


def _cost(before: Mapping[str, float], after: Mapping[str, float], number: int) -> dict[str, float]:
    return {name: 1024 * (after[name] - before[name]) / number for name in after}


def held_figures(costs: Costs, count: int, prompt_tokens: int) -> list[Figure]:
    """What a request costs in each state and process."""
    of = f"{count} requests, prompts of {prompt_tokens} tokens"
    return [
        _figure(
            f"held_{state}_{name}",
            round(cost),
            "bytes a token" if state == TOKEN else "bytes a request",
            f"{name}: {of}",
        )
        for state, by_process in costs.items()
        for name, cost in by_process.items()
    ]


def growth_figures(samples: Samples, tokens: int) -> list[Figure]:
    """The growth of each process."""
    last = samples.requests[-1]
    warm, figures = min(ROUND, last // 2), []
    for name, memory in samples.memory.items():
        grown = samples.growth(name, warm)
        note = (
            f"{name}: {grown.slope:+.1f} ± {grown.half_width:.1f} KiB per 1,000 requests over {last:,} requests, the"
            f" first {warm:,} not counted; {memory[0] / 1024:.0f} MiB at start, {memory[-1] / 1024:.0f} MiB at the end;"
            f" {CALLERS} callers in closed loop, answers of {tokens} tokens; {samples.refused} refused"
        )
        unit = "KiB per 1,000 requests"
        figures.append(_figure(f"soak_growth_{name}", grown.slope, unit, note, len(memory)))
    return figures


def _figure(name: str, value: float, unit: str, note: str, runs: int = 1) -> Figure:
    return Figure(name.replace("-", "_"), value, None, None, unit, runs, machine(), note)


def _show(count: int, memory: Mapping[str, float]) -> None:
    if count == 0:
        print("".join(f"{name:>18}" for name in ("requests", *memory)))
    cells = "".join(f"{kib / 1024:14.1f} MiB" for kib in memory.values())
    print(f"{count:18,}{cells}", flush=True)


async def main(args: argparse.Namespace) -> None:
    """Runs the rounds and prints what each process holds, or what a request costs."""
    settings = (
        hold_settings(args.hold) if args.hold else mesh_settings(echo(CALLERS), records=FEW_RECORDS)
    )
    async with (
        mesh_of(settings) as mesh,
        grpc.aio.insecure_channel(mesh.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        def take(count: int) -> Mapping[str, float]:
            memory = memory_of(mesh)
            if not args.json:
                _show(count, memory)
            return memory

        async def settled() -> Mapping[str, float]:
            await asyncio.sleep(SETTLED_S)
            return memory_of(mesh, private=True)

        if args.hold:
            costs, prompt_tokens = await hold(stub, args.hold, args.prompt_words, settled)
            found = held_figures(costs, args.hold, prompt_tokens)
        else:
            requests, every = args.runs * ROUND, ROUND // SAMPLES
            samples = await soak(stub, requests, take, every, args.tokens, args.rate)
            found = growth_figures(samples, args.tokens)
    emit(found, args.json)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--runs", type=int, default=MIN_RUNS, help="rounds of 20,000 requests")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of an answer")
    parser.add_argument("--rate", type=float, default=math.inf, help="requests a second at most")
    parser.add_argument("--hold", type=int, default=0, help="requests at the same time, to 1,024")
    parser.add_argument("--prompt-words", type=int, default=32, help="of the prompts")
