"""What a router is worth on its held-out outcomes: quality against the share of prompts on the large model.

PGR(c) is the share of the gap between the models that is closed at c percent on the large one; APGR is its mean over
c (0.5 at random), CPT(x) the least c that closes x percent. Definitions of RouteLLM, arXiv 2406.18665.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned.calibration import Calibration, quality
from gateway.routing.learned.model import LearnedRouter

Array = NDArray[Any]
DRAWS: Final = 500
STEPS: Final = np.linspace(0, 1, 11)
CPTS: Final = (20, 50, 80)
QUALITIES: Final = (0.90, 0.95, 0.99)
_MORE: Final = 1e-12


@dataclass(frozen=True)
class Curve:
    """Quality with 0, 1, ... n prompts on the large model; both arrays have n + 1 entries."""

    share: Array
    quality: Array

    @property
    def gap(self) -> float:
        """Quality of the large model alone, less that of the small one."""
        return float(self.quality[-1] - self.quality[0])

    def recovered(self) -> Array:
        """PGR at `STEPS`. The gap must not be zero."""
        closed: Array = np.interp(STEPS, self.share, self.quality) - self.quality[0]
        closed /= self.gap
        return closed

    def apgr(self) -> float:
        """Mean of PGR, by trapezoids."""
        closed = self.recovered()
        return float((closed[1:] + closed[:-1]).sum() / 2 / (len(STEPS) - 1))

    def cpt(self, percent: float) -> float:
        """The least percentage on the large model that closes ``percent`` of the gap; 100 when none does before."""
        return 100 * _reach(STEPS, self.recovered(), percent / 100)

    def share_for(self, quality_share: float) -> float:
        """The least share on the large model that keeps ``quality_share`` of its quality."""
        return _reach(self.share, self.quality, quality_share * float(self.quality[-1]))


def trace(scores: Array, weak: Array, strong: Array) -> Curve:
    """The curve of ``scores``; prompts with equal scores count as in random order."""
    return Curve(np.linspace(0, 1, len(scores) + 1), quality(scores, weak, strong))


def figures(curve: Curve) -> dict[str, float]:
    """The numbers of a curve, by name; without those that need a gap where the large model is not better."""
    told = {"weak": float(curve.quality[0]), "strong": float(curve.quality[-1])}
    if curve.gap <= _MORE:
        return told
    told |= {"apgr": curve.apgr()} | {f"cpt{percent}": curve.cpt(percent) for percent in CPTS}
    return told | {
        f"large_share_for_{round(100 * share)}_percent": curve.share_for(share)
        for share in QUALITIES
    }


@dataclass(frozen=True)
class Bands:
    """95 % bootstrap intervals: of the quality at each share, and of each figure."""

    share: Array
    low: Array
    high: Array
    figures: dict[str, tuple[float, float]]


def bootstrap(scores: Array, weak: Array, strong: Array, draws: int, seed: int) -> Bands:
    """Bands over ``draws`` samples of the rows, with replacement."""
    rng = np.random.default_rng(seed)
    share = np.linspace(0, 1, 101)
    curves = []
    for _ in range(draws):
        rows = rng.integers(0, len(scores), len(scores))
        curves.append(trace(scores[rows], weak[rows], strong[rows]))
    low, high = np.percentile(
        [np.interp(share, c.share, c.quality) for c in curves], (2.5, 97.5), axis=0
    )
    return Bands(share, low, high, _intervals([figures(curve) for curve in curves]))


def _intervals(drawn: Sequence[dict[str, float]]) -> dict[str, tuple[float, float]]:
    named: dict[str, list[float]] = {}
    for told in drawn:
        for name, value in told.items():
            named.setdefault(name, []).append(value)
    return {
        name: (float(np.percentile(values, 2.5)), float(np.percentile(values, 97.5)))
        for name, values in named.items()
    }


def _reach(x: Array, y: Array, target: float) -> float:
    hits = np.flatnonzero(y >= target - _MORE)
    if not len(hits):
        return 1.0
    at = int(hits[0])
    if at == 0:
        return float(x[0])
    step = (target - y[at - 1]) / (y[at] - y[at - 1])
    return float(x[at - 1] + step * (x[at] - x[at - 1]))


_TARGETS: Final = (("quality", 0.90), ("quality", 0.95), ("quality", 0.99), ("large share", 0.30))


def heads_of(router: LearnedRouter) -> dict[str, Calibration]:
    """The held-out outcomes of each head by name."""
    heads = {"prompts": router.prompts, "cascade": router.cascade}
    return {name: head.calibration for name, head in heads.items() if head is not None}


def describe(router: LearnedRouter) -> dict[str, Any]:
    """Version, figures and targets of each head, as JSON."""
    heads = {name: _described(held_out) for name, held_out in heads_of(router).items()}
    return {"version": router.version, "heads": heads}


def curve_of(held_out: Calibration) -> Curve:
    """The curve of a head on its held-out outcomes."""
    return trace(held_out.gains, held_out.weak, held_out.strong)


def draw_curve(curve: Curve, bands: Bands, title: str, path: Path) -> None:
    """A PNG at ``path``. Needs matplotlib (the extra `plots`)."""
    # Not a dependency of learning.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    label = "95 % of bootstrap draws"
    axes.fill_between(100 * bands.share, bands.low, bands.high, alpha=0.2, linewidth=0, label=label)
    axes.plot(100 * curve.share, curve.quality, label="this router, held out")
    ends = (float(curve.quality[0]), float(curve.quality[-1]))
    axes.plot((0, 100), ends, linestyle="--", color="grey", label="at random")
    axes.axhline(ends[1], linestyle=":", color="grey", linewidth=1, label="large model alone")
    axes.set(
        xlabel="prompts on the large model, %", ylabel="mean outcome", xlim=(0, 100), title=title
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def _described(held_out: Calibration) -> dict[str, Any]:
    targets = []
    for kind, share in _TARGETS:
        reach = held_out.for_quality if kind == "quality" else held_out.for_large_share
        found = reach(share)
        told = {"threshold": found.value, "large_share": found.large_share}
        targets.append({"target": f"{share:.0%} {kind}", **told, "quality": found.quality})
    return {
        "rows": len(held_out.gains),
        "held_out": figures(curve_of(held_out)),
        "targets": targets,
    }
