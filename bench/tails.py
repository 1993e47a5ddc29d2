"""Percentiles in open loop: callers that do not wait for each other, on the shipped small tier.

    python bench/tails.py [--json] [--runs N] [PART ...]

A mesh as `sluice up` starts it, but for the large tier, which would share the cores; each kind of caller is a process
of foreign clients (bench/support/caller.py, which defines prompts, arrivals and answers). Calls of all rounds are one
sample: at least 1,000 a side for a p99. Every other round runs backwards.

`open_loop`  `openloop_ttft_L_pQQ`: first message with visible text, calls with answers of 8, 16, 32 and 64 tokens at
             L % of what direct Triton answers at most (`openloop_saturation` of the settings: calls/s with 64 rows
             under way, measured first). ours: through the mesh; peer: the same arrivals as tokens straight into the
             same worker in Triton, at most 64 rows under way, rows that wait together in one batch, no queue delay:
             first token. `also` has the peer with a queue delay of 5 ms and the ratio to it, with its interval.
`isolated`   `isolated_ttft_L_pQQ`: the same at other loads, with the model's process on a core of its own and all
             others, callers included, on the other cores, on both sides; `also` has what the mesh adds, ms.
`bulk`       `interactive_beside_bulk_N_pQQ`: interactive one-token calls, `RATE` a second, beside N callers of class
             bulk with answers of 16 to 112 tokens, one after the other; peer: the same calls alone.
             `bulk_beside_interactive_N`: tokens/s of bulk with the interactive calls; peer: without, within one flood
             after `SETTLE_S` s. "Without" is a few seconds after interactive calls, within `spare_s` of the batcher's
             policy: its limits on bulk prompts hold on both sides, and what they cost bulk is not in this ratio.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import Figure, Part, options_of, paired, percentiles, run_parts
from bench.support.meshes import mesh_of, mesh_settings, program
from sluice import settings as config

MODEL: Final = "small"
RATE: Final = 10.0
ANSWER_S: Final = 300.0
SETTLE_S: Final = 1.5
BULK_S: Final = 6.0
BULK_CALLERS: Final = (32, 64)
LOADS: Final = (10, 60, 90)
ISOLATED_LOADS: Final = (10, 30, 60)
QUEUE_S: Final = 0.005
ENGINE: Final = "triton_python"
"""Start of the name of the process that runs an engine: Triton's stub for Python models."""


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
        line = await asyncio.wait_for(stdout.readline(), ANSWER_S)
        answer: list[float] = json.loads(line)
        return answer

    async def interactive(self, seed: int) -> list[float]:
        """Milliseconds to first tokens of one-token calls."""
        return await self.do(do="open", model=MODEL, rate=RATE, seed=seed, single=True)

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


def small_tier() -> config.Settings:
    """The shipped settings with one tier."""
    return mesh_settings(*(one for one in config.Settings().models if one.name == MODEL))


async def bulk(given: argparse.Namespace) -> list[Figure]:
    """See the module."""
    first_ms: dict[int, list[list[float]]] = {callers: [] for callers in (0, *BULK_CALLERS)}
    rates: dict[int, list[tuple[float, float]]] = {callers: [] for callers in BULK_CALLERS}
    async with (
        mesh_of(small_tier()) as mesh,
        client(mesh.address) as person,
        client(mesh.address) as flood,
    ):
        await _beside(person, flood, 32, 0)
        for round_ in range(1, given.runs + 1):
            order = list(first_ms)
            for callers in order if round_ % 2 else reversed(order):
                if callers:
                    found, of_bulk = await _beside(person, flood, callers, round_)
                    rates[callers].append(of_bulk)
                else:
                    found = await person.interactive(round_)
                first_ms[callers].append(found)
    figures = []
    for callers in BULK_CALLERS:
        note = f"{RATE:g} calls/s, {callers} bulk callers"
        figures += percentiles(
            f"interactive_beside_bulk_{callers}", first_ms[callers], first_ms[0], note
        )
        figures.append(
            paired(
                f"bulk_beside_interactive_{callers}",
                *zip(*rates[callers], strict=True),
                unit="tokens/s",
                higher_is_better=True,
                note=note,
            )
        )
    return figures


async def _beside(
    person: Client, flood: Client, callers: int, seed: int
) -> tuple[list[float], tuple[float, float]]:
    """Milliseconds to first tokens, and tokens/s of bulk beside and alone."""
    await flood.do(do="flood", model=MODEL, callers=callers)
    await asyncio.sleep(SETTLE_S)
    alone = await flood.tokens_per_s(BULK_S) if seed % 2 else 0.0
    (before,) = await flood.do(do="count")
    begun = asyncio.get_running_loop().time()
    found = await person.interactive(seed)
    (after,) = await flood.do(do="count")
    beside = (after - before) / (asyncio.get_running_loop().time() - begun)
    alone = alone or await flood.tokens_per_s(BULK_S)
    await flood.do(do="stop")
    await asyncio.sleep(SETTLE_S)
    return found, (beside, alone)


async def open_loop(given: argparse.Namespace) -> list[Figure]:
    """See the module."""
    found, settings = await _open(given, LOADS, ("ours", "peer", "queued"))
    return [
        figure
        for load in LOADS
        for figure in _beside_both(load, found[load], settings)
    ]  # fmt: skip


async def isolated(given: argparse.Namespace) -> list[Figure]:
    """See the module."""
    found, settings = await _open(given, ISOLATED_LOADS, ("ours", "peer"), place=place_engine)
    return [
        _with_added(figure)
        for load in ISOLATED_LOADS
        for figure in _percentiles(f"isolated_ttft_{load}", load, found[load], "peer", settings)
    ]


Samples = Mapping[int, Mapping[str, list[list[float]]]]
"""Milliseconds to first tokens by load, side and round."""


async def _open(
    given: argparse.Namespace,
    loads: Sequence[int],
    names: Sequence[str],
    place: Callable[[], None] = lambda: None,
) -> tuple[Samples, dict[str, Any]]:
    """What each side gave at each load, in rounds of alternating order, and the settings of the figures."""
    found: dict[int, dict[str, list[list[float]]]] = {
        load: {name: [] for name in names} for load in loads
    }
    async with mesh_of(small_tier()) as mesh, client(mesh.address) as caller:
        place()
        worker = mesh.worker_address(MODEL)
        for _ in range(2):  # the first one warms up
            (saturation,) = await caller.do(do="saturate", model=MODEL, worker=worker)
        wheres: dict[str, dict[str, Any]] = {
            "ours": {}, "peer": {"worker": worker}, "queued": {"worker": worker, "queue_s": QUEUE_S}
        }  # fmt: skip
        for round_ in range(1, given.runs + 1):
            for load in loads:
                common = {"do": "open", "model": MODEL, "rate": saturation * load / 100}
                for name in names if round_ % 2 else reversed(names):
                    times = await caller.do(**common, seed=round_, **wheres[name])
                    found[load][name].append(times)
    return found, {"openloop_saturation": saturation, "queue_s": QUEUE_S}


def place_engine() -> None:
    """Give the model's process the last core, and all other processes of this mesh and its callers the others."""
    *others, last = sorted(os.sched_getaffinity(0))
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        cores = {last} if process.name().startswith(ENGINE) else set(others)
        for thread in process.threads():
            with suppress(ProcessLookupError):  # threads end at any time
                os.sched_setaffinity(thread.id, cores)


def _beside_both(
    load: int, found: Mapping[str, list[list[float]]], settings: Mapping[str, Any]
) -> list[Figure]:
    """Percentiles at one load."""
    plain, queued = (
        _percentiles(f"openloop_ttft_{load}", load, found, side, settings)
        for side in ("peer", "queued")
    )
    return [_with_queued(*pair) for pair in zip(plain, queued, strict=True)]


def _percentiles(
    name: str,
    load: int,
    found: Mapping[str, list[list[float]]],
    side: str,
    settings: Mapping[str, Any],
) -> list[Figure]:
    saturation = settings["openloop_saturation"]
    note = f"{saturation * load / 100:.0f} of {saturation:.0f} calls/s"
    return percentiles(name, found["ours"], found[side], note, settings)


def _with_added(one: Figure) -> Figure:
    """The figure with the milliseconds that the mesh adds."""
    if one.ours is None or one.peer is None:
        return one
    return replace(one, also={"added_ms": one.ours - one.peer})


def _with_queued(one: Figure, other: Figure) -> Figure:
    """The figure with the peer that has a queue delay beside it."""
    if one.ours is None:
        return one
    also: dict[str, Any] = {
        "queued_ms": other.peer, "queued_ratio": other.ratio, "queued_low": other.low, "queued_high": other.high
    }  # fmt: skip
    samples = {**one.samples, "queued": other.samples["peer"]} if one.samples else {}
    return replace(one, also=also, samples=samples)


PARTS: Final[Mapping[str, Part]] = {"open_loop": open_loop, "isolated": isolated, "bulk": bulk}


def main() -> None:
    uvloop.run(run_parts(options_of(__doc__), PARTS))


if __name__ == "__main__":
    main()
