"""Two pictures: throughput against latency per policy, and the queue over time. Needs matplotlib (extra `plots`)."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from simulator.planner import LoadPoint
from simulator.results import History
from simulator.trace import SimulationError
from sluice.wire.subjects import CLASSES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI: Final = 130
MARKERS: Final = "osD^vX"
"""Policies that do the same have the same line; the markers show both."""


def check() -> None:
    """Raises SimulationError when there is nothing to plot with."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SimulationError(
            "plots need matplotlib, which is not installed: pip install 'matplotlib>=3.9,<4'"
        ) from error


def plot_load(curves: Mapping[str, Sequence[LoadPoint]], file: Path) -> None:
    """Writes tokens/s against the p99 of TTFT, one picture a class that arrives, one line a policy."""
    first = next(iter(curves.values()))
    names = [c.priority_class for c in first[0].summary.classes]
    figure, axes = _panels(len(names))
    from matplotlib.ticker import LogFormatter

    for axis, name in zip(axes, names, strict=True):
        for (policy, points), marker in zip(curves.items(), cycle(MARKERS), strict=False):
            at = [(p.summary.tokens_per_s, _p99(p, name)) for p in points]
            shown = [(x, y) for x, y in at if y is not None]
            axis.plot(
                [x for x, _ in shown], [y for _, y in shown], marker=marker, label=policy, alpha=0.8
            )
        axis.set(title=name, xlabel="tokens/s, all classes", ylabel="TTFT p99, s", yscale="log")
        for ticks in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            ticks(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
        axis.grid(visible=True, alpha=0.3)
    _legend(figure, axes[0])
    figure.suptitle(
        f"Each point: the trace {first[0].speed:g} to {first[-1].speed:g} times as fast"
    )
    figure.savefig(file, dpi=DPI)


def plot_queue(histories: Mapping[str, History], file: Path) -> None:
    """Writes the tasks that wait over time, stacked by class, one picture a policy; all to one scale."""
    figure, axes = _panels(len(histories))
    highest = max(
        (sum(s.queued) for history in histories.values() for s in history.samples), default=0
    )
    for axis, (policy, history) in zip(axes, histories.items(), strict=True):
        times = [sample.at_s for sample in history.samples]
        for_class = [[sample.queued[rank] for sample in history.samples] for rank in range(3)]
        axis.stackplot(times, for_class, labels=CLASSES, alpha=0.85)
        axis.set(title=policy, xlabel="s", ylabel="tasks waiting", ylim=(0, max(1, highest * 1.05)))
        axis.grid(visible=True, alpha=0.3)
    _legend(figure, axes[0])
    figure.savefig(file, dpi=DPI)


def _panels(count: int) -> "tuple[Figure, list[Axes]]":
    # Not pyplot: it never frees figures, and may need a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(4.4 * columns, 3.4 * rows + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    axes = [axis for line in grid for axis in line]
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, axes[:count]


def _legend(figure: "Figure", axes: "Axes") -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def _p99(point: LoadPoint, name: str) -> float | None:
    return next(c.ttft_s.p99 for c in point.summary.classes if c.priority_class == name)
