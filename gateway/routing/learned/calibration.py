"""Calibration on held-out outcomes of training: maps raw gains to calibrated ones, and targets to thresholds.

Every row was predicted by a model that had not seen it. A prompt goes to the large model when its gain is at least the
threshold.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SLOPE_MIN: Final = 0.05
"""A raw gain that turned out to say nothing still keeps its order."""
SLOPE_MAX: Final = 3.0
ALWAYS: Final = -1.0
"""The threshold that every gain reaches."""
NEVER: Final = 2.0


@dataclass(frozen=True, slots=True)
class Threshold:
    """A threshold and what it did on held-out outcomes."""

    value: float
    """The large model for gains of at least this."""
    large_share: float
    quality: float
    """Mean outcome."""


@dataclass(frozen=True)
class Calibration:
    """Straight lines from raw to calibrated predictions, and the held-out rows behind them."""

    lines: NDArray[np.float64]
    """[2, 2]: slope and intercept of the gain, then of P(weak right)."""
    gains: NDArray[np.float32]
    """Calibrated gain of each held-out row."""
    weak: NDArray[np.float32]
    strong: NDArray[np.float32]

    def gain(self, raw: float) -> float:
        """The calibrated gain, in [-1, 1]."""
        slope, intercept = self._lines[0]
        return min(1.0, max(-1.0, slope * raw + intercept))

    def weak_right(self, raw: float) -> float:
        """The calibrated P(small right)."""
        slope, intercept = self._lines[1]
        return min(1.0, max(0.0, slope * raw + intercept))

    def for_quality(self, share: float) -> Threshold:
        """The least use of the large model that kept ``share`` (0 to 1) of the large model's quality.

        The large model everywhere keeps all of it, so there is always one.
        """
        enough = self.quality[self._cuts] >= share * self.quality[-1] - 1e-9
        return self._threshold(int(self._cuts[enough][0]))

    def for_large_share(self, share: float) -> Threshold:
        """At most ``share`` (0 to 1) of prompts on the large model."""
        allowed = self._cuts <= share * len(self.gains) + 1e-9
        return self._threshold(int(self._cuts[allowed][-1]))

    @cached_property
    def quality(self) -> Array:
        """Mean outcome with 0, 1, ... all held-out rows on the large model."""
        return quality(self.gains, self.weak, self.strong)

    @cached_property
    def _lines(self) -> list[list[float]]:
        lines: list[list[float]] = self.lines.tolist()
        return lines

    @cached_property
    def _cuts(self) -> Array:
        return cuts(np.sort(self.gains)[::-1])

    def _threshold(self, sent: int) -> Threshold:
        """Sends the ``sent`` rows with the highest gains; one of `_cuts`."""
        ordered = np.sort(self.gains)[::-1]
        if sent == 0:
            value = NEVER
        elif sent == len(ordered):
            value = ALWAYS
        else:
            value = (float(ordered[sent - 1]) + float(ordered[sent])) / 2
        return Threshold(value, sent / len(ordered), float(self.quality[sent]))


def calibrate(raw: Array, labels: Array, weights: Array) -> Calibration:
    """Lines fitted to held-out predictions.

    Args:
        raw: [rows, 2], predicted P(weak right), P(strong right).
        labels: [rows, 2], the outcomes of both.
        weights: [rows].
    """
    gains, weak, strong = raw[:, 1] - raw[:, 0], labels[:, 0], labels[:, 1]
    lines = np.array([_line(gains, strong - weak, weights), _line(raw[:, 0], weak, weights)])
    calibrated = np.clip(lines[0, 0] * gains + lines[0, 1], -1, 1)
    return Calibration(lines, *(each.astype(np.float32) for each in (calibrated, weak, strong)))


def cuts(descending: Array) -> Array:
    """How many rows can be sent, from none to all: equal scores go together."""
    between = np.flatnonzero(np.diff(descending)) + 1
    return np.concatenate(([0], between, [len(descending)]))


def quality(scores: Array, weak: Array, strong: Array) -> Array:
    """[rows + 1]: mean outcome with the 0, 1, ... highest scores on the large model; ties count as in random order."""
    order = np.argsort(-scores, kind="stable")
    gains = np.concatenate(([0.0], np.cumsum((strong - weak)[order], dtype=np.float64)))
    known = cuts(scores[order])
    sent = np.arange(len(scores) + 1)
    mean: Array = (weak.sum(dtype=np.float64) + np.interp(sent, known, gains[known])) / len(scores)
    return mean


def _line(x: Array, y: Array, weights: Array) -> tuple[float, float]:
    mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
    spread = np.average((x - mean_x) ** 2, weights=weights)
    together = np.average((x - mean_x) * (y - mean_y), weights=weights)
    slope = float(np.clip(together / max(spread, 1e-9), SLOPE_MIN, SLOPE_MAX))
    return slope, float(mean_y - slope * mean_x)
