"""Benchmark of the batcher: cost of a decision, padding saved by its order, and shares under a mixed load.

    python bench/batcher.py [--json] [--runs N] [--only core|order|loads]

Seeds are 1 to N; policies are as shipped.

- core: a decision is a task that is added and one that is handed out, in processor time of this process; what ends a
  task is not counted. `core_decisions_per_s`: 1,000,000 queued tasks of 3 classes and 20 tenants, batches of up to 32
  rows; the peer is a bare heap by class and order of arrival, of the same tasks. `core_single_per_s`: the same one
  row at a time. `core_growth_1k_to_1m`: microseconds of a decision with 1,000,000 queued beside 1,000.
- order: what lengths that fit together save an engine that pads, which the shipped one for decoders does not.
  Lognormal prompts (median 200, sigma 1, at most 4,096), up to 32 rows a batch; the peer takes them in order of
  arrival. `padding_efficiency`: tokens of prompts over cells. `padded_throughput_vs_fifo`: simulated static batches.
- loads: simulated as bench/support/mixed_load.py describes. `goodput_vs_fifo` and `goodput_vs_priority`: interactive
  requests with a first token within 0.5 s that arrived after the flood, a second. `interactive_ttft_vs_alone`: p99 of
  the same requests beside the flood, the peer without it; `interactive_ttft_vs_priority`. `bulk_share_of_leftover`:
  tokens/s of bulk beside interactive traffic, the peer is half of what bulk gets alone. `tenant_share_error`: two
  tenants of equal weight with 450 documents each waiting, one behind the other's; `flooded_tenant_share_error`:
  100,000 and 10,000. The peer takes all in order of arrival.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.support import core_load, mixed_load
from bench.support.harness import Figure, emit, machine, options_of
from sluice.settings.batching import Policy

FEW, MANY = 1_000, 1_000_000
DECISIONS = 20_000
BACKLOG = 10_000
LENGTH = Policy.model_validate({"name": "length", "max_rows": core_load.BATCH_ROWS})
FIXED = Policy.model_validate({"name": "fixed", "max_rows": core_load.BATCH_ROWS})


Round = Mapping[str, mixed_load.Seen]


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
    heap = core_load.HeapLoad(MANY, 1)
    found = [
        (
            many.decisions_per_s(DECISIONS, core_load.BATCH_ROWS),
            few.decisions_per_s(DECISIONS, core_load.BATCH_ROWS),
            many.decisions_per_s(DECISIONS, 1),
            heap.decisions_per_s(DECISIONS),
        )
        for _ in range(runs)
    ]
    at_many, at_few, single, bare = (statistics.median(side) for side in zip(*found, strict=True))
    per_s = f"{MANY} queued, {core_load.TENANTS} tenants, 3 classes; peer: a bare heap"
    rows = [
        ("core_decisions_per_s", at_many, bare, at_many / bare, "1/s",
         f"{per_s}; batches of up to {core_load.BATCH_ROWS}"),
        ("core_single_per_s", single, bare, single / bare, "1/s", f"{per_s}; one by one"),
        ("core_growth_1k_to_1m", 1e6 / at_many, 1e6 / at_few, at_many / at_few, "us/decision",
         f"{MANY} queued; peer: {FEW}"),
    ]  # fmt: skip
    return [
        Figure(name, ours, peer, ratio, unit, runs, machine(), note)
        for name, ours, peer, ratio, unit, note in rows
    ]


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
    seeds = range(1, runs + 1)
    seen = [_round(seed) for seed in seeds]
    offered = statistics.median(mixed_load.offered_per_s(mixed_load.interactive(n)) for n in seeds)

    def figure(
        name: str, unit: str, note: str, ours: Callable[[Round], float], peer: Callable[[Round], float],
        *, higher: bool,
    ) -> Figure:  # fmt: skip
        a, b = (statistics.median(side(one) for one in seen) for side in (ours, peer))
        over = (a, b) if higher else (b, a)
        spread = f"ours {min(map(ours, seen)):.4g} to {max(map(ours, seen)):.4g}"
        ratio = over[0] / over[1] if over[1] else None
        return Figure(name, a, b, ratio, unit, runs, machine(), f"{note}; {spread}")

    def goodput(peer: str) -> Figure:
        return figure(
            f"goodput_vs_{'fifo' if peer == 'fcfs' else peer}",
            "requests/s in SLO",
            f"simulated; {offered:.3g}/s arrive after the flood; TTFT below 0.5 s; peer: {peer}",
            lambda one: one["ours"].goodput_per_s,
            lambda one: one[peer].goodput_per_s,
            higher=True,
        )

    def ttft(peer: str) -> Figure:
        return figure(
            f"interactive_ttft_vs_{peer}",
            "ms",
            f"simulated; p99 beside a flood of bulk; peer: {peer}",
            lambda one: one["ours"].ttft_p99_s * 1e3,
            lambda one: one[peer].ttft_p99_s * 1e3,
            higher=False,
        )

    leftover = figure(
        "bulk_share_of_leftover",
        "tokens/s",
        "simulated; peer: half of what bulk gets alone",
        lambda one: one["ours"].work_per_s["bulk"],
        lambda one: one["bulk"].work_per_s["bulk"] * (1 - mixed_load.SHARE),
        higher=True,
    )
    return [goodput("fcfs"), goodput("priority"), ttft("alone"), ttft("priority"), leftover,
            *_tenant_figures(runs)]  # fmt: skip


def _round(seed: int) -> Round:
    """One seed: all policies on the same traffic, and each half of it alone."""
    urgent, flood = mixed_load.interactive(seed), mixed_load.bulk(seed, mixed_load.FLOOD_AT_S)
    both = mixed_load.together(urgent, flood)
    full = mixed_load.bulk(seed)
    beside = mixed_load.play(mixed_load.together(urgent, full), mixed_load.OURS)
    ours = mixed_load.play(both, mixed_load.OURS)
    return {
        "ours": replace(ours, work_per_s=beside.work_per_s),
        "fcfs": mixed_load.play(both, mixed_load.FCFS),
        "priority": mixed_load.play(both, mixed_load.PRIORITY),
        "alone": mixed_load.play(urgent, mixed_load.OURS),
        "bulk": mixed_load.play(full, mixed_load.OURS),
    }


def _tenant_figures(runs: int) -> list[Figure]:
    ours, fcfs = mixed_load.OURS, mixed_load.FCFS
    loads = (
        ("tenant_share_error", mixed_load.tenant_error, "few tasks wait"),
        ("flooded_tenant_share_error", mixed_load.flooded_tenant_error, "more tasks wait"),
    )
    return [
        paired(
            name,
            lambda seed, load=load: (load(ours, seed), load(fcfs, seed)),  # type: ignore[misc]
            lambda a, b: b / a,
            unit="share",
            runs=runs,
            note=f"simulated; two tenants of equal weight, {when}; peer: order of arrival",
        )
        for name, load, when in loads
    ]


PARTS: Final[Mapping[str, Callable[[int], list[Figure]]]] = {
    "core": core_figures,
    "order": order_figures,
    "loads": load_figures,
}


def main(args: argparse.Namespace) -> None:
    """Runs the figures asked for and prints them."""
    names = [args.only] if args.only else list(PARTS)
    emit([figure for name in names for figure in PARTS[name](args.runs)], args.json)


if __name__ == "__main__":
    parser = options_of(__doc__, "seeds of each load")
    parser.add_argument("--only", choices=PARTS, help="one part")
    main(parser.parse_args())
