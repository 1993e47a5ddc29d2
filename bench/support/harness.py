"""The harness of all benchmarks: interleaved runs of both sides, medians, and one JSON object a line.

A figure is the median over rounds; each round runs ours and the peer once, in alternating order, so that a drift of the
machine meets both. `ratio` is written so that higher is better for us.
"""

import json
import os
import platform
import statistics
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

Run = Callable[[], Awaitable[float]]

MIN_RUNS = 5


@dataclass(frozen=True)
class Figure:
    """One line of output. `ours` and `peer` are medians in `unit`; None where a side is missing."""

    figure: str
    ours: float | None
    peer: float | None
    ratio: float | None
    unit: str
    runs: int
    machine: str
    note: str


def machine() -> str:
    """The machine in words: processor, cores, Python."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
            names = [
                line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")
            ]
        model = names[0] if names else model
    except OSError:
        pass
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


async def compare(
    figure: str,
    ours: Run,
    peer: Run,
    *,
    unit: str,
    higher_is_better: bool,
    note: str,
    runs: int = MIN_RUNS,
) -> Figure:
    """Runs both sides `runs` times, alternating who goes first, after one warm-up of each."""
    await ours()
    await peer()
    results: tuple[list[float], list[float]] = ([], [])
    for round_ in range(runs):
        sides = [(ours, results[0]), (peer, results[1])]
        for run, result in sides if round_ % 2 == 0 else reversed(sides):
            result.append(await run())
    a, b = statistics.median(results[0]), statistics.median(results[1])
    spread = f"ours {min(results[0]):.4g} to {max(results[0]):.4g}, peer {min(results[1]):.4g} to {max(results[1]):.4g}"
    ratio = a / b if higher_is_better else b / a
    return Figure(figure, a, b, ratio, unit, runs, machine(), f"{note}; {spread}")


def emit(figures: list[Figure], as_json: bool) -> None:
    """Prints the figures, as JSON lines or as a table."""
    if as_json:
        for figure in figures:
            print(json.dumps(asdict(figure)))
        return
    print(f"{'figure':28} {'ours':>12} {'peer':>12} {'ratio':>8}  unit")
    for f in figures:
        cells = [
            f"{value:.4g}" if value is not None else "missing"
            for value in (f.ours, f.peer, f.ratio)
        ]
        print(f"{f.figure:28} {cells[0]:>12} {cells[1]:>12} {cells[2]:>8}  {f.unit}")
        print(f"  {f.note}")
    sys.stdout.flush()
