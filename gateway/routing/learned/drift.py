"""Has the traffic moved away from what the router learned from? Pure measures; `monitor` decides by them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import NormalDist
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BINS: Final = 10
BLUR: Final = 0.05
"""What of a gain is noise. Held-out rows were predicted by routers that learned from fewer rows than the one in use:
where prompts resemble each other all gains are within a hair, and fall on this or that side of a bin's edge."""
_SHARE_MIN: Final = 1e-4
"""Empty bins count as nearly empty, since their logarithm would be infinite."""


class Reference:
    """Gains that others are compared with, in its deciles; at least one.

    Attributes:
        rows: how many.
    """

    def __init__(self, scores: NDArray[Any]) -> None:
        self.rows = len(scores)
        self._inner = np.unique(np.quantile(scores, np.linspace(0, 1, BINS + 1)[1:-1]))
        self._before = self._shares(scores)

    def stability_index(self, recent: NDArray[Any]) -> float:
        """Population stability index of ``recent``, at least one score.

        0 for equal distributions; by custom up to 0.1 is stable and above 0.25 has shifted.
        """
        now = self._shares(recent)
        return float(((now - self._before) * np.log(now / self._before)).sum())

    def chance_index(self, rows: int, confidence: float) -> float:
        """What the index of ``rows`` scores of the very same source stays below with ``confidence``.

        Times rows * others / (rows + others) it is distributed as chi-squared, nearly (Yurdakul, Naranjo 2020), with
        one degree of freedom less than bins; the quantile is Wilson and Hilferty's.
        """
        freedom = max(1, len(self._inner))
        spread = 2 / (9 * freedom)
        quantile = freedom * (1 - spread + NormalDist().inv_cdf(confidence) * sqrt(spread)) ** 3
        return quantile * (1 / rows + 1 / self.rows)

    def _shares(self, scores: NDArray[Any]) -> NDArray[np.float64]:
        """Of each bin, a score counting for all bins within `BLUR` of it."""
        parts = (self._inner[:, None] - scores) / (2 * BLUR) + 0.5
        below = np.clip(parts, 0, 1).mean(axis=1)
        shares: NDArray[np.float64] = np.diff(below, prepend=0.0, append=1.0)
        return np.maximum(shares, _SHARE_MIN)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How far predicted chances were from outcomes, on average."""

    rows: int
    bias: float
    """Mean of outcome less prediction: above 0 the router was too pessimistic."""
    half_width: float
    """The true bias is inside bias +- this with the confidence asked for (Hoeffding: for any distribution)."""
    brier: float
    """Mean squared error; 0 is perfect."""


def accuracy(
    predicted: Sequence[float],
    outcomes: Sequence[float],
    confidence: float,
    learned_rows: int,
) -> Accuracy:
    """Compares predicted chances with outcomes, both in [0, 1], one pair a row and at least one.

    The predictions were calibrated on ``learned_rows`` outcomes, which are known no better than by chance either.
    """
    assert len(predicted) == len(outcomes) > 0
    errors = np.asarray(outcomes, np.float64) - np.asarray(predicted, np.float64)
    # The difference of two means; an error given its prediction spans a range of 1.
    half_width = sqrt(log(2 / (1 - confidence)) / 2 * (1 / len(errors) + 1 / learned_rows))
    return Accuracy(len(errors), float(errors.mean()), half_width, float((errors**2).mean()))
