"""Figures of bench/mesh.py in open loop: callers that do not wait for each other, on the shipped small tier.

Both figures: the mesh as `sluice up` starts it, two processes of foreign clients (plain grpc.aio stubs), one for each
kind of caller; arrivals are Poisson, drawn from the number of the round. Percentiles are over the calls of all rounds
together, so that a p99 stands for hundreds of calls.

`interactive_beside_bulk_N_pQQ`: interactive callers ask for one token, `RATE` calls/s for `SECONDS` s a round; N
callers of class bulk ask for answers of `TOKENS` tokens, one after the other. ours: QQ of the time to the first token
beside bulk, peer: alone, the same arrivals. `bulk_beside_interactive_N`: tokens/s of bulk with the interactive calls,
over without, both measured within one flood after `SETTLE_S` s. A round is alone, beside 32, beside 64; every other one
runs backwards. "Without" begins a few seconds after interactive calls, within `spare_s` of the batcher's policy:
its limits on bulk prompts hold on both sides, and what they cost bulk is not in this ratio.

`openloop_ttft_L_pQQ`: one-token calls arrive at L % of the mesh's capacity, which is its calls/s with
`CAPACITY_CALLERS` callers in closed loop, measured first. ours: through the mesh; peer: the same arrivals straight into
the same worker in Triton, with the same tokens.
"""

import asyncio
import json
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from bench.support.harness import Figure, machine
from bench.support.meshes import program

MODEL: Final = "small"
RATE: Final = 10.0
SECONDS: Final = 6.0
TOKENS: Final = 64
SETTLE_S: Final = 1.5
BULK_S: Final = 2.5
BULK_CALLERS: Final = (32, 64)
CAPACITY_CALLERS: Final = 32
LOADS: Final = (0.1, 0.3, 0.6, 0.9)
LOAD_S: Final = 4.0
QUANTILES: Final = (50, 90, 99)


class Client:
    """A process of `bench/support/caller.py`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def do(self, **command: Any) -> list[float]:
        """Sends a command, and waits for its answer."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(command).encode() + b"\n")
        line = await asyncio.wait_for(stdout.readline(), 120)
        answer: list[float] = json.loads(line)
        return answer

    async def tokens_per_s(self, seconds: float) -> float:
        """Tokens/s of the flood from now on."""
        (before,) = await self.do(do="count")
        await asyncio.sleep(seconds)
        (after,) = await self.do(do="count")
        return (after - before) / seconds


@asynccontextmanager
async def client(address: str) -> AsyncIterator[Client]:
    """A process that calls ``address``."""
    async with program("caller", address, line_bytes_max=1 << 24) as process:
        yield Client(process)


async def interactive_beside_bulk(address: str, runs: int) -> list[Figure]:
    """See the module."""
    first_ms: dict[int, list[float]] = {callers: [] for callers in (0, *BULK_CALLERS)}
    bulk: dict[int, list[tuple[float, float]]] = {callers: [] for callers in BULK_CALLERS}
    async with client(address) as person, client(address) as flood:
        await _beside(person, flood, 32, 0)
        for round_ in range(1, runs + 1):
            order = list(first_ms)
            for callers in order if round_ % 2 else reversed(order):
                found, rates = await _beside(person, flood, callers, round_)
                first_ms[callers] += found
                if callers:
                    bulk[callers].append(rates)
    return [
        figure
        for callers in BULK_CALLERS
        for figure in (
            *percentiles(
                f"interactive_beside_bulk_{callers}", first_ms[callers], first_ms[0], runs
            ),
            _kept(callers, bulk[callers], runs),
        )
    ]


async def _beside(
    person: Client, flood: Client, callers: int, seed: int
) -> tuple[list[float], tuple[float, float]]:
    """Milliseconds to first tokens, and tokens/s of bulk beside and alone."""
    alone = beside = 0.0
    if callers:
        await flood.do(do="flood", model=MODEL, callers=callers, tokens=TOKENS)
        await asyncio.sleep(SETTLE_S)
        if seed % 2:
            alone = await flood.tokens_per_s(BULK_S)
    counting = asyncio.ensure_future(flood.tokens_per_s(SECONDS))
    found = await person.do(do="open", model=MODEL, rate=RATE, seconds=SECONDS, seed=seed)
    beside = await counting
    if callers:
        if not seed % 2:
            alone = await flood.tokens_per_s(BULK_S)
        await flood.do(do="stop")
        await asyncio.sleep(SETTLE_S)
    return found, (beside, alone)


async def openloop_ttft(address: str, worker: str, prompt: list[int], runs: int) -> list[Figure]:
    """See the module; ``prompt``: the tokens that the gateway makes of the callers' prompt."""
    ours: dict[float, list[float]] = {load: [] for load in LOADS}
    peer: dict[float, list[float]] = {load: [] for load in LOADS}
    async with client(address) as caller:
        capacity = await _capacity(caller)
        for round_ in range(1, runs + 1):
            for load in LOADS:
                common = {
                    "do": "open", "model": MODEL, "rate": load * capacity, "seconds": LOAD_S, "seed": round_
                }  # fmt: skip
                sides = [(ours[load], {}), (peer[load], {"worker": worker, "prompt": prompt})]
                for results, where in sides if round_ % 2 else reversed(sides):
                    results += await caller.do(**common, **where)
    return [
        figure
        for load in LOADS
        for figure in percentiles(
            f"openloop_ttft_{round(100 * load)}",
            ours[load],
            peer[load],
            runs,
            f"{load * capacity:.0f} of {capacity:.0f} calls/s",
        )
    ]


async def _capacity(caller: Client) -> float:
    """Calls/s of one token each."""
    await caller.do(do="flood", model=MODEL, callers=CAPACITY_CALLERS, tokens=1, urgent=True)
    await asyncio.sleep(SETTLE_S)
    capacity = await caller.tokens_per_s(BULK_S)
    await caller.do(do="stop")
    return capacity


def percentiles(
    name: str, ours: list[float], peer: list[float], runs: int, note: str = ""
) -> list[Figure]:
    """A figure for each of `QUANTILES`, over the calls of all runs; milliseconds."""
    where = f"{len(ours)} calls; {note}".removesuffix("; ")
    return [
        Figure(f"{name}_p{q}", a, b, b / a, "ms", runs, machine(), where)
        for q in QUANTILES
        for a, b in [(quantile(ours, q), quantile(peer, q))]
    ]


def _kept(callers: int, rates: list[tuple[float, float]], runs: int) -> Figure:
    beside, alone = (statistics.median(side) for side in zip(*rates, strict=True))
    name = f"bulk_beside_interactive_{callers}"
    return Figure(name, beside, alone, beside / alone, "tokens/s", runs, machine(), "")


def quantile(values: list[float], percent: int) -> float:
    """The value that so many percent of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
