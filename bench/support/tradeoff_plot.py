"""Plots routing strategies: accuracy over tokens, and cost over latency."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.support.tradeoffs import Tradeoff

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS: Final = "os^Dv<>pXPhd*"
CLOSE_PERCENT: Final = 93.0
"""Strategies that keep more are shown once more, larger."""


def draw(found: Sequence[Tradeoff], accuracy_min: float, tokens_max: float, path: Path) -> None:
    """Two panels as a PNG at ``path``. Needs matplotlib (extra `plots`)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _quality(left, found, accuracy_min, tokens_max)
    left.set(
        xlabel="tokens computed by the large tier, % of large alone",
        ylabel="right answers, % of large alone",
        title="What is kept (green: the target; bars: 95 % of bootstrap draws)",
        xlim=(-4, 104),
    )
    closer = left.inset_axes((0.36, 0.06, 0.62, 0.62))
    near = [one for one in found if 100 * one.accuracy_share >= CLOSE_PERCENT]
    _quality(closer, found, accuracy_min, tokens_max)
    lows = [100 * one.accuracy_band[0] for one in near]
    closer.set(xlim=(20, 55), ylim=(min([*lows, 98.5]) - 0.3, 102))
    _price(right, found)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False
    )
    figure.savefig(path, dpi=130)


def _quality(
    axes: "Axes", found: Sequence[Tradeoff], accuracy_min: float, tokens_max: float
) -> None:
    target = (-4, 100 * tokens_max)
    axes.fill_between(target, 100 * accuracy_min, 104, alpha=0.12, color="green", linewidth=0)
    for at, one in enumerate(found):
        low, high = one.accuracy_band
        share = 100 * one.accuracy_share
        axes.errorbar(
            100 * one.token_share,
            share,
            yerr=[[max(0.0, share - 100 * low)], [max(0.0, 100 * high - share)]],
            marker=MARKERS[at % len(MARKERS)],
            fillstyle="none",
            markersize=8,
            linestyle="",
            linewidth=1,
            capsize=3,
            label=one.strategy,
            color=f"C{at}",
        )
    axes.set_ylim(None, 104)
    axes.grid(alpha=0.3)


def _price(axes: "Axes", found: Sequence[Tradeoff]) -> None:
    longest = max(one.latency.p95 for one in found)
    for at, one in enumerate(found):
        middle, late = one.latency.p50, one.latency.p95
        axes.barh(at, middle, color=f"C{at}", alpha=0.6)
        axes.plot((middle, late), (at, at), color=f"C{at}", marker="|")
        axes.plot(one.ttft.p50, at, marker="o", color="black", markersize=4)
        axes.text(1.04 * longest, at, f"{one.cost:.4f}", va="center", fontsize=9)
    axes.set_yticks(range(len(found)), [one.strategy for one in found])
    axes.invert_yaxis()
    axes.set(
        xlabel="ms (bar: latency p50, line: to p95, dot: TTFT p50)",
        title="What it costs (at the right: price of 1,000 questions)",
        xlim=(0, 1.2 * longest),
    )
    axes.grid(axis="x", alpha=0.3)
