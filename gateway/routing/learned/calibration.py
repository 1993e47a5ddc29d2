"""Held-out outcomes of training: what a raw gain means, and which threshold reaches a target.

Every row was predicted by a model that had not seen it. A prompt goes to the large model when its gain is at least the
threshold.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned.curves import Curve, trace

SLOPE_MIN: Final = 0.05
"""A raw gain that turned out to say nothing still keeps its order."""
SLOPE_MAX: Final = 3.0

ALWAYS: Final = -1.0
"""The threshold that every gain reaches."""
NEVER: Final = 2.0


@dataclass(frozen=True, slots=True)
class Target:
    """A threshold and what it did on held-out outcomes."""

    threshold: float
    """The large model for gains of at least this."""
    large_share: float
    quality: float
    """Mean outcome."""


@dataclass(frozen=True)
class Calibration:
    """Straight lines from raw to calibrated, and the held-out rows behind them."""

    gain_slope: float
    gain_intercept: float
    weak_slope: float
    weak_intercept: float
    gains: NDArray[np.float32]
    """Calibrated gain of each held-out row."""
    weak: NDArray[np.float32]
    strong: NDArray[np.float32]

    def gain(self, raw: float) -> float:
        """The calibrated gain, in [-1, 1]."""
        return min(1.0, max(-1.0, self.gain_slope * raw + self.gain_intercept))

    def weak_right(self, raw: float) -> float:
        """The calibrated P(small right)."""
        return min(1.0, max(0.0, self.weak_slope * raw + self.weak_intercept))

    def for_quality(self, share: float) -> Target:
        """The least use of the large model that kept ``share`` (0 to 1) of the large model's quality.

        The large model everywhere keeps all of it, so there is always one.
        """
        curve = self.curve
        enough = curve.quality[self._cuts] >= share * curve.quality[-1] - 1e-9
        return self._target(int(self._cuts[enough][0]))

    def for_large_share(self, share: float) -> Target:
        """At most ``share`` (0 to 1) of prompts on the large model."""
        allowed = self._cuts <= share * len(self.gains) + 1e-9
        return self._target(int(self._cuts[allowed][-1]))

    @cached_property
    def _cuts(self) -> NDArray[np.int64]:
        """How many rows can be sent: equal gains go together. From none to all."""
        ordered = np.sort(self.gains)[::-1]
        between = np.flatnonzero(np.diff(ordered)) + 1
        return np.concatenate(([0], between, [len(ordered)]))

    @cached_property
    def curve(self) -> Curve:
        """Quality against share on the held-out rows."""
        return trace(self.gains, self.weak, self.strong)

    def _target(self, sent: int) -> Target:
        """Sends the ``sent`` rows with the highest gains; one of `_cuts`."""
        ordered = np.sort(self.gains)[::-1]
        if sent == 0:
            threshold = NEVER
        elif sent == len(ordered):
            threshold = ALWAYS
        else:
            threshold = (float(ordered[sent - 1]) + float(ordered[sent])) / 2
        return Target(threshold, sent / len(ordered), float(self.curve.quality[sent]))


def calibrate(
    raw: NDArray[np.float64],
    weak: NDArray[np.float64],
    strong: NDArray[np.float64],
    row_weights: NDArray[np.float64],
) -> Calibration:
    """Lines fitted to held-out predictions ``raw`` [rows, 2] of (P(weak right), P(strong right))."""
    raw_gain = raw[:, 1] - raw[:, 0]
    gain_slope, gain_intercept = _line(raw_gain, strong - weak, row_weights)
    weak_slope, weak_intercept = _line(raw[:, 0], weak, row_weights)
    gains = np.clip(gain_slope * raw_gain + gain_intercept, -1, 1)
    return Calibration(
        gain_slope,
        gain_intercept,
        weak_slope,
        weak_intercept,
        gains.astype(np.float32),
        weak.astype(np.float32),
        strong.astype(np.float32),
    )


def _line(
    x: NDArray[np.float64], y: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[float, float]:
    mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
    spread = np.average((x - mean_x) ** 2, weights=weights)
    together = np.average((x - mean_x) * (y - mean_y), weights=weights)
    slope = float(np.clip(together / max(spread, 1e-9), SLOPE_MIN, SLOPE_MAX))
    return slope, float(mean_y - slope * mean_x)
