"""Benchmark of the batcher: cost of a decision, padding saved by its order, and shares under a mixed load.

The core's figures are processor time of this process; the loads run in the simulator, which asks the same core; with
--mesh they run on the embedded mesh as well.

    python bench/batcher.py [--json] [--runs N] [--mesh]
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support import core_load, mesh_load, mixed_load
from bench.support.harness import MIN_RUNS, Figure, emit, machine, run_count
from sluice.settings.batching import Policy

FEW, MANY = 1_000, 1_000_000
DECISIONS = 20_000
BACKLOG = 10_000
LENGTH = Policy.model_validate({"name": "length", "max_rows": core_load.BATCH_ROWS})
FIXED = Policy.model_validate({"name": "fixed", "max_rows": core_load.BATCH_ROWS})


def paired(
    figure: str,
    sides: Callable[[int], tuple[float, float]],
    ratio: Callable[[float, float], float],
    *,
    unit: str,
    runs: int,
    note: str,
) -> Figure:
    """Both sides on the traffic of each of ``runs`` seeds; medians, and their ratio."""
    results = [sides(seed) for seed in range(1, runs + 1)]
    ours, peer = (statistics.median(side) for side in zip(*results, strict=True))
    spread = " to ".join(f"{pick(r[0] for r in results):.4g}" for pick in (min, max))
    return Figure(
        figure, ours, peer, ratio(ours, peer), unit, runs, machine(), f"{note}; ours {spread}"
    )


def core_figures(runs: int) -> list[Figure]:
    """Decisions a second with a million queued, and how their time grows from a thousand."""
    few, many = (core_load.CoreLoad(Policy(), queued, 1) for queued in (FEW, MANY))
    found = [
        (
            many.decisions_per_s(DECISIONS, core_load.BATCH_ROWS),
            few.decisions_per_s(DECISIONS, core_load.BATCH_ROWS),
            many.decisions_per_s(DECISIONS, 1),
        )
        for _ in range(runs)
    ]
    at_many, at_few, single = (statistics.median(side) for side in zip(*found, strict=True))
    growth = Figure(
        "core_growth_1k_to_1m",
        1e6 / at_many,
        1e6 / at_few,
        at_few / at_many,
        "us/decision",
        runs,
        machine(),
        f"ours with {MANY} queued, peer with {FEW}; ratio: how many times as long",
    )
    note = (
        f"a decision: a task is added and handed out; {MANY} queued, {core_load.TENANTS} tenants, 3 classes, "
        f"batches of up to {core_load.BATCH_ROWS}; one by one {single:.0f}; target 100000"
    )
    rate = Figure("core_decisions_per_s", at_many, None, None, "1/s", runs, machine(), note)
    return [rate, growth]


def order_figures(runs: int) -> list[Figure]:
    """What lengths that fit together save an engine that pads."""

    def efficiency(seed: int) -> tuple[float, float]:
        found = (core_load.filling(policy, BACKLOG, seed) for policy in (LENGTH, FIXED))
        ours, peer = (filled.efficiency for filled in found)
        return ours, peer

    def throughput(seed: int) -> tuple[float, float]:
        ours, peer = (mixed_load.padded_tokens_per_s(p, seed, 8) for p in (LENGTH, FIXED))
        return ours, peer

    rows = core_load.filling(LENGTH, BACKLOG, 1).rows
    lengths = "lognormal lengths, median 200, sigma 1, cap 4096, up to 32 rows a batch"
    return [
        paired(
            "padding_efficiency",
            efficiency,
            lambda a, b: a / b,
            unit="tokens/cell",
            runs=runs,
            note=f"{lengths}; policy length, {rows:.1f} rows a batch; peer: order of arrival",
        ),
        paired(
            "padded_throughput_vs_fifo",
            throughput,
            lambda a, b: a / b,
            unit="tokens/s",
            runs=runs,
            note=f"simulated engine with static batches, {lengths}, answers of 8 tokens; peer: order of arrival",
        ),
    ]


def load_figures(runs: int) -> list[Figure]:
    """Interactive traffic at half of the capacity beside a flood of bulk, and two tenants."""
    ours, fcfs = mixed_load.OURS, mixed_load.FCFS

    def goodput(seed: int) -> tuple[float, float]:
        trace = mixed_load.together(
            mixed_load.interactive(seed), mixed_load.bulk(seed, mixed_load.FLOOD_AT_S)
        )
        a, b = (mixed_load.play(trace, p).interactive_goodput_per_s for p in (ours, fcfs))
        return a, b

    def ttft(seed: int) -> tuple[float, float]:
        urgent = mixed_load.interactive(seed)
        loads = (mixed_load.together(urgent, mixed_load.bulk(seed)), urgent)
        a, b = (mixed_load.play(trace, ours).interactive_ttft_p99_s * 1e3 for trace in loads)
        return a, b

    def tenants(seed: int) -> tuple[float, float]:
        weights = {"many": 1.0, "few": 1.0}
        a, b = (mixed_load.tenant_error(p, seed, weights) for p in (ours, fcfs))
        return a, b

    where = "simulated large tier on a CPU, 60 s, interactive Poisson at 50 % of capacity"
    return [
        paired(
            "goodput_vs_fifo",
            goodput,
            lambda a, b: a / b,
            unit="requests/s in SLO",
            runs=runs,
            note=f"{where}, bulk flood from second 10; TTFT below 0.5 s; peer: first come, first served; target 2",
        ),
        paired(
            "interactive_ttft_vs_alone",
            ttft,
            lambda a, b: b / a,
            unit="ms",
            runs=runs,
            note=f"{where}, p99 beside a bulk flood; peer: the same without it; target 1/1.2",
        ),
        paired(
            "bulk_share_of_leftover",
            mixed_load.leftover_share,
            lambda a, b: a / b,
            unit="tokens/s",
            runs=runs,
            note=f"{where}; peer: half of what bulk gets alone; target 0.85",
        ),
        paired(
            "tenant_share_error",
            tenants,
            lambda a, b: b / a,
            unit="share",
            runs=runs,
            note="two tenants of equal weight over 60 s, one sends ten times as much; peer: first come, first served;"
            " target 0.1",
        ),
    ]


def main(args: argparse.Namespace) -> None:
    """Runs the figures asked for and prints them."""
    figures = core_figures(args.runs) + order_figures(args.runs) + load_figures(args.runs)
    if args.mesh:
        figures += asyncio.run(mesh_load.figures(args.runs))
    emit(figures, args.json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--runs", type=run_count, default=MIN_RUNS, help="seeds of each load")
    parser.add_argument("--mesh", action="store_true", help="on the embedded mesh, too")
    main(parser.parse_args())
