"""What a request costs as callers become more, and what a stream or a connection holds in memory.

    python bench/growth.py [--json] [--runs N] [--plot FILE]

A whole mesh with the echo engine, 64 slots, no tracing, the plain stubs; limits are raised so that 4,096 streams come
in: `max_concurrent_requests` 8,192, no shares kept. Prompt and answer (one token) are those of `request_cost`.

- `request_cpu_N_streams`, N of `STREAMS`: milliseconds of CPU a request of all processes of the mesh, N callers in
  closed loop who share one connection; peer: a bare grpc.aio server with the same messages; the ratio is bare over
  ours. `also` has the processes. A round measures every N on both sides; medians over rounds, after a warm-up round.
- `stream_memory`: what all processes hold more while `STREAMS[-1]` callers have read the first event of an answer as
  long as the context allows, and read no further, KiB a stream; resident memory, the highest over that of before. One
  run. Those that overload control refuses are left out, and the note says how many came in.
- `connection_memory`: the same of as many connections that said hello over HTTP/2 and then nothing.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import grpc
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support import request_cost
from bench.support.harness import MIN_RUNS, Figure, emit, machine, run_count
from bench.support.request_cost import Cost, Server, bare_server, medians, processes_of
from sluice.v1 import inference_pb2_grpc
from supervisor.mesh import Mesh, running_mesh
from tests.robustness.abuse import abuse, settings_of
from tests.robustness.attacks import MODEL

REQUESTS: Final[Mapping[int, int]] = {1: 300, 64: 1_000, 512: 2_048, 4_096: 8_192}
"""In a run, by the number of streams."""
STREAMS: Final = tuple(REQUESTS)
HOLD_S: Final = 5.0
HELD: Final = {"stream_memory": "slow", "connection_memory": "idle"}
"""Figures of memory, and the attack of tests/robustness/abuse.py that holds what they measure."""
Costs = Mapping[int, Sequence[Cost]]


async def growth(runs: int, streams: Sequence[int] = STREAMS) -> list[Figure]:
    """The figures above, of the numbers of ``streams``."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        settings = settings_of(streams[-1], raised=True)
        async with running_mesh(settings, state_dir=Path(folder)) as mesh:
            figures = await cpu(mesh, runs, streams)
            return figures + [await memory(name, mesh, streams[-1]) for name in HELD]


async def cpu(mesh: Mesh, runs: int, streams: Sequence[int]) -> list[Figure]:
    """`request_cpu_N_streams`."""
    async with grpc.aio.insecure_channel(mesh.address) as channel, bare_server() as bare:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        ours = Server(stub, MODEL, processes_of(mesh))
        found: dict[int, tuple[list[Cost], list[Cost]]] = {count: ([], []) for count in streams}
        for number in range(runs + 1):
            for count, costs in found.items():
                sides = list(zip((ours, bare), costs, strict=True))
                for server, kept in sides if number % 2 else reversed(sides):
                    kept.append(await request_cost.run(server, count, REQUESTS[count]))
    return [_cpu_figure(count, *(kept[1:] for kept in costs)) for count, costs in found.items()]


def _cpu_figure(count: int, mesh: list[Cost], bare: list[Cost]) -> Figure:
    ours, peer = request_cost.total(mesh), request_cost.total(bare)
    rate = statistics.median(one.requests_per_s for one in mesh)
    also = {**request_cost.in_ms(medians(mesh)), "requests_per_s": rate}
    note = f"all processes, {count} callers in closed loop; peer: a bare grpc.aio server with the same messages"
    name, settings = f"request_cpu_{count}_streams", {"requests": REQUESTS[count]}
    ratio = peer / ours
    return Figure(name, ours, peer, ratio, "ms of CPU", len(mesh), machine(), note, settings, also)


async def memory(name: str, mesh: Mesh, count: int) -> Figure:
    """`stream_memory` or `connection_memory`."""
    line = await abuse(mesh, HELD[name], count, HOLD_S)
    opened = sum(n for outcome, n in line["outcomes"].items() if outcome.endswith(" OK"))
    also = {
        f"{process}_kib": 1024 * (highest - before) / opened
        for process, (before, highest, _) in line["rss_mib"].items()
    }
    note = f"{opened:,} of {count:,} held at once, all processes"
    return Figure(name, sum(also.values()), None, None, "KiB", 1, machine(), note, {}, also)


def draw(figures: Sequence[Figure], path: Path) -> None:
    """CPU a request over the number of streams, by process, as a PNG. Needs matplotlib (extra `plots`)."""
    from matplotlib.figure import Figure as Page

    found = [one for one in figures if one.figure.startswith("request_cpu_")]
    counts = [int(one.figure.split("_")[2]) for one in found]
    names = [name for name in found[0].also if name.endswith("_ms")]
    page = Page(figsize=(7, 4.2), layout="constrained")
    axes = page.subplots()
    axes.stackplot(
        counts,
        [[one.also[name] for one in found] for name in names],
        labels=[name.removesuffix("_ms").replace("_", " ") for name in names],
        alpha=0.7,
    )
    bare = [one.peer or 0.0 for one in found]
    axes.plot(counts, bare, "k--", marker="o", label="bare grpc.aio server")
    axes.set(xscale="log", xlabel="concurrent streams", ylabel="ms of CPU a one-token request")
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    page.savefig(path, dpi=130)


async def main(options: argparse.Namespace) -> None:
    """Prints the figures."""
    figures = await growth(options.runs, options.streams)
    if options.plot:
        draw(figures, options.plot)
    emit(figures, options.json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--runs", type=run_count, default=MIN_RUNS, help="rounds of both sides")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="writes a PNG")
    parser.add_argument(
        "--streams", type=int, nargs="+", choices=STREAMS, default=STREAMS, metavar="N"
    )
    uvloop.run(main(parser.parse_args()))
