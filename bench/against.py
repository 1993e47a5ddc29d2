"""What a one-token request costs this tree and another checkout of Sluice, interleaved: is anything slower than it was?

    python bench/against.py CHECKOUT [--json] [--runs N]

CHECKOUT has a complete .venv of its own (`scripts/environment dev` there). Each round begins both meshes anew, which
first alternates, because a process keeps the luck of its addresses for life: of one tree against itself such a pair
differs by up to 5 %. Each is started by its own `sluice up` with one `engine: echo` model, 64 slots and everything else
as shipped; one load generator of this tree calls one mesh and then the other. It sends the same bytes to both, with the
prompt where either reads it, parses nothing of the answer, and counts a request when its stream has ended: so trees
with other messages are compared, and the client costs both the same. What the idle one takes meanwhile counts for
neither.

A round is `SLICES` times `REQUESTS` one-token requests to each side in turn, which goes first alternates; one slice
before them is left out.
`ours` and `peer` are medians over rounds; `ratio` is the median of the rounds' own ratios, above 1 where this tree is
better; `also` has the 95 % interval of that median (bootstrap over rounds, 10,000 draws, seed 1).

- `against_gateway_cpu`: 32 callers; milliseconds of CPU of the gateway's process a request.
- `against_both_cpu`: the same runs; of the gateway's process and the batcher's.
- `against_mesh_cpu`: the same runs; of all processes.
- `against_requests_per_s`: the same runs; requests answered a second.
- `against_lone_cpu`: one caller; of all processes.
- `against_lone_latency`: the same runs; milliseconds from call to end of the answer, mean.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import grpc
import psutil
import uvloop
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support.harness import Figure, emit, machine, run_count
from bench.support.request_cost import (
    MANY,
    MODEL,
    REQUESTS,
    SLOTS,
    Cost,
    Server,
    interleaved,
)

ROUNDS: Final = 7
SLICES: Final = 6
ROOT: Final = Path(__file__).parents[1]
CONFIG: Final = {
    "models": [
        {"name": MODEL, "tier": "small", "path": "builtin:small", "engine": "echo", "slots": SLOTS}
    ],
    "routing": {"default": MODEL},
}
UP_S: Final = 120
DRAWS: Final = 10_000


@asynccontextmanager
async def mesh_of(checkout: Path, folder: Path) -> AsyncIterator[Server]:
    """A mesh of ``checkout``, with its state in ``folder``."""
    sluice, state = _prepared(checkout, folder)
    up = [sluice, "up", "--detach", "--address", "127.0.0.1:0", "--http", "off"]
    up += ["--config", str(folder / "sluice.yaml"), "--state-dir", state]
    await asyncio.to_thread(subprocess.run, up, check=True, timeout=UP_S, cwd=folder)
    try:
        found = json.loads((folder / "state/state.json").read_text(encoding="utf-8"))
        processes = {}
        for one in found["processes"]:
            process = processes[one["name"]] = psutil.Process(one["pid"])
            for number, child in enumerate(process.children(recursive=True)):
                processes[f"{one['name']} child {number}"] = child
        async with grpc.aio.insecure_channel(found["address"]) as channel:
            yield Server(channel, MODEL, processes)
    finally:
        down = [sluice, "down", "--state-dir", state]
        await asyncio.to_thread(subprocess.run, down, check=True, timeout=UP_S, cwd=folder)


@asynccontextmanager
async def _pair(checkout: Path, *, ours_first: bool) -> AsyncIterator[tuple[Server, Server]]:
    """A mesh of this tree and one of ``checkout``."""
    with tempfile.TemporaryDirectory(prefix="sluice-against-") as folder:
        ours, theirs = (
            mesh_of(ROOT, Path(folder, "ours")),
            mesh_of(checkout, Path(folder, "theirs")),
        )
        if ours_first:
            async with ours as a, theirs as b:
                yield a, b
        else:
            async with theirs as b, ours as a:
                yield a, b


def _prepared(checkout: Path, folder: Path) -> tuple[str, str]:
    folder.mkdir()
    (folder / "sluice.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    return str(checkout / ".venv/bin/sluice"), str(folder / "state")


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % of the medians of draws with replacement."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return medians[DRAWS // 40], medians[-DRAWS // 40]


def paired(
    name: str,
    unit: str,
    note: str,
    runs: tuple[list[Cost], list[Cost]],
    of: Callable[[Cost], float],
    callers: int,
) -> Figure:
    """A figure of rounds; the ratio is theirs over ours, of rates ours over theirs."""
    ours, theirs = ([of(one) for one in side] for side in runs)
    pairs = zip(ours, theirs, strict=True)
    ratios = [a / b if unit.endswith("/s") else b / a for a, b in pairs]
    low, high = interval(ratios)
    also = {"ratio_low": low, "ratio_high": high}
    also |= {f"ours_{number}": value for number, value in enumerate(ours)}
    also |= {f"peer_{number}": value for number, value in enumerate(theirs)}
    settings = {"callers": callers, "slots": SLOTS, "requests": SLICES * REQUESTS[callers]}
    values = statistics.median(ours), statistics.median(theirs), statistics.median(ratios)
    return Figure(name, *values, unit, len(ours), machine(), note, settings, also)


async def measure(checkout: Path, head: str, rounds: int) -> list[Figure]:
    """The figures above."""
    many: tuple[list[Cost], list[Cost]] = ([], [])
    lone: tuple[list[Cost], list[Cost]] = ([], [])
    for number in range(rounds):
        async with _pair(checkout, ours_first=number % 2 == 0) as (ours, theirs):
            for callers, found in ((MANY, many), (1, lone)):
                costs = await interleaved(ours, theirs, callers, 1, SLICES)
                for side, of_round in zip(found, costs, strict=True):
                    side.extend(of_round)
    note = f"a one-token request; peer: {head}"

    def cpu_ms(*processes: str) -> Callable[[Cost], float]:
        return lambda cost: sum(cost.cpu_ms[process] for process in processes)

    def every(cost: Cost) -> float:
        return sum(cost.cpu_ms.values())

    return [
        paired("against_gateway_cpu", "ms of CPU", note, many, cpu_ms("gateway"), MANY),
        paired("against_both_cpu", "ms of CPU", note, many, cpu_ms("gateway", "batcher"), MANY),
        paired("against_mesh_cpu", "ms of CPU", note, many, every, MANY),
        paired("against_requests_per_s", "requests/s", note, many, lambda c: c.requests_per_s, MANY),
        paired("against_lone_cpu", "ms of CPU", note, lone, every, 1),
        paired("against_lone_latency", "ms", note, lone, lambda c: 1e3 / c.requests_per_s, 1),
    ]  # fmt: skip


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object a figure")
    parser.add_argument("--runs", type=run_count, default=ROUNDS, help="paired rounds")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    head = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short=8", "HEAD"],
        capture_output=True, text=True, check=True, timeout=30,
    ).stdout.strip()  # fmt: skip
    emit(uvloop.run(measure(checkout, head, options.runs)), options.json)


if __name__ == "__main__":
    main()
