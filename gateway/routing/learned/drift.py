"""Has the traffic moved away from what the router learned from? Pure measures, for whoever watches."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BINS: Final = 10
_SHARE_MIN: Final = 1e-4
"""Empty bins count as nearly empty, since their logarithm would be infinite."""


def stability_index(reference: NDArray[Any], recent: NDArray[Any]) -> float:
    """Population stability index of two samples of scores, over the reference's deciles.

    0 for equal distributions; by custom up to 0.1 is stable and above 0.25 has shifted. Neither may be empty.
    """
    inner = np.unique(np.quantile(reference, np.linspace(0, 1, BINS + 1)[1:-1]))
    before, now = (_shares(sample, inner) for sample in (reference, recent))
    return float(((now - before) * np.log(now / before)).sum())


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

    @property
    def drifted(self) -> bool:
        """Whether the bias cannot be chance."""
        return abs(self.bias) > self.half_width


def accuracy(
    predicted: Sequence[float], outcomes: Sequence[float], confidence: float = 0.95
) -> Accuracy:
    """Compares predicted chances with outcomes, both in [0, 1], one pair a row and at least one.

    For gains, pass (gain + 1) / 2 on both sides.
    """
    assert len(predicted) == len(outcomes) > 0
    errors = np.asarray(outcomes, np.float64) - np.asarray(predicted, np.float64)
    # An error given its prediction spans a range of 1.
    half_width = sqrt(log(2 / (1 - confidence)) / (2 * len(errors)))
    return Accuracy(len(errors), float(errors.mean()), half_width, float((errors**2).mean()))


def _shares(sample: NDArray[Any], inner: NDArray[Any]) -> NDArray[np.float64]:
    counts = np.bincount(np.searchsorted(inner, sample, side="right"), minlength=len(inner) + 1)
    shares: NDArray[np.float64] = np.maximum(counts / len(sample), _SHARE_MIN)
    return shares
