"""Quality against cost: what a score is worth when the prompts with the highest scores go to the large model.

PGR(c) is the share of the gap between the models that is closed at c percent on the large one; APGR is its mean over
c (0.5 at random), CPT(x) the least c that closes x percent. Definitions of RouteLLM, arXiv 2406.18665.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
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
        quality: Array = np.interp(STEPS, self.share, self.quality)
        closed: Array = (quality - self.quality[0]) / self.gap
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
    order = np.argsort(-scores, kind="stable")
    gains = np.concatenate(([0.0], np.cumsum((strong - weak)[order], dtype=np.float64)))
    new = np.flatnonzero(np.diff(scores[order]) != 0) + 1
    cuts = np.concatenate(([0], new, [len(scores)]))
    sent = np.arange(len(scores) + 1)
    quality = (weak.sum(dtype=np.float64) + np.interp(sent, cuts, gains[cuts])) / len(scores)
    return Curve(sent / len(scores), quality)


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
