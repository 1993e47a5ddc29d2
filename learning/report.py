"""The value of a router on its held-out outcomes: quality against the share of prompts on the large model.

PGR(c) is the share of the gap between the models that is closed at c percent on the large one; APGR
is its mean over c (0.5 at random), CPT(x) the least c that closes x percent. Definitions of
RouteLLM, arXiv 2406.18665.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned.model import Calibration, LearnedRouter, quality

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
        """Return PGR at `STEPS`. The gap must not be zero."""
        closed: Array = np.interp(STEPS, self.share, self.quality) - self.quality[0]
        closed /= self.gap
        return closed

    def apgr(self) -> float:
        """Return the mean of PGR, by trapezoids."""
        closed = self.recovered()
        return float((closed[1:] + closed[:-1]).sum() / 2 / (len(STEPS) - 1))

    def cpt(self, percent: float) -> float:
        """Return the least percentage on the large model that closes `percent` of the gap; 100 if none does."""
        return 100 * _reach(STEPS, self.recovered(), percent / 100)

    def share_for(self, quality_share: float) -> float:
        """Return the least share on the large model that keeps `quality_share` of its quality."""
        return _reach(self.share, self.quality, quality_share * float(self.quality[-1]))


def trace(scores: Array, weak: Array, strong: Array) -> Curve:
    """Return the curve of `scores`; prompts with equal scores count as in random order."""
    return Curve(np.linspace(0, 1, len(scores) + 1), quality(scores, weak, strong))


def figures(curve: Curve) -> dict[str, float]:
    """Return the figures of a curve by name; those that need a gap are left out where the large model is no better."""
    result = {"weak": float(curve.quality[0]), "strong": float(curve.quality[-1])}
    # There is no gap to close, so shares of it have no value.
    if curve.gap <= _MORE:
        return result
    result |= {"apgr": curve.apgr()} | {f"cpt{percent}": curve.cpt(percent) for percent in CPTS}
    return result | {
        f"large_share_for_{round(100 * share)}_percent": curve.share_for(share)
        for share in QUALITIES
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


def describe(router: LearnedRouter) -> dict[str, Any]:
    """Return version, figures and targets of each head, as JSON."""
    heads = {"prompts": router.prompts, "cascade": router.cascade}
    described = {
        name: _described(head.calibration) for name, head in heads.items() if head is not None
    }
    return {"version": router.version, "heads": described}


def curve_of(held_out: Calibration) -> Curve:
    """Return the curve of a head on its held-out outcomes."""
    return trace(held_out.gains, held_out.weak, held_out.strong)


def _described(held_out: Calibration) -> dict[str, Any]:
    targets = []
    for kind, share in _TARGETS:
        reach = held_out.for_quality if kind == "quality" else held_out.for_large_share
        threshold = reach(share)
        values = {"threshold": threshold.value, "large_share": threshold.large_share}
        targets.append({"target": f"{share:.0%} {kind}", **values, "quality": threshold.quality})
    return {
        "rows": len(held_out.gains),
        "held_out": figures(curve_of(held_out)),
        "targets": targets,
    }
