"""Detects drift of learned routers, and when it is over. Pure code over windows of fixed size.

Two signals of each head: *inputs* compares the gains that it predicts with those of its held-out rows, *accuracy* the
chances that it predicted with the outcomes. Each measure is compared with a limit that chance alone stays below.
A signal drifts above the limit and recovers only below `CLEAR` of it, so a measure near the limit is reported once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import log, sqrt
from statistics import NormalDist
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sluice.settings.routing import DriftSettings

CLEAR: Final = 0.6
"""Of the limit; below it a drift is over."""
CHANCE: Final = 0.9999
"""Share of windows of unchanged traffic that stay below the limit, where `stability_max` is too low for that."""
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


class Signal(Enum):
    """A measure that may drift."""

    INPUTS = "inputs"
    ACCURACY = "accuracy"


class State(Enum):
    """The state of a signal."""

    GATHERING = "gathering"
    """Too few rows to tell."""
    STABLE = "stable"
    DRIFTED = "drifted"


@dataclass(frozen=True)
class Change:
    """A drift of ``signal`` begins, or is over."""

    signal: Signal
    began: bool


@dataclass(frozen=True)
class Inputs:
    """The predicted gains against the held-out ones."""

    state: State
    rows: int
    """Predictions in the window."""
    index: float | None
    """Population stability index when it was last judged; None: too few rows."""
    limit: float


@dataclass(frozen=True)
class Outcomes:
    """The predicted chances against the outcomes."""

    state: State
    rows: int
    """Outcomes in the window."""
    found: Accuracy | None
    """None: no outcomes."""


@dataclass(frozen=True)
class HeadHealth:
    """Of one head, now."""

    inputs: Inputs
    outcomes: Outcomes

    @property
    def drifted(self) -> list[Signal]:
        """The signals that have."""
        states = {Signal.INPUTS: self.inputs.state, Signal.ACCURACY: self.outcomes.state}
        return [signal for signal, state in states.items() if state is State.DRIFTED]


class _Latch:
    """The state of one signal."""

    def __init__(self, signal: Signal) -> None:
        self._signal = signal
        self.state = State.GATHERING

    def judge(self, share: float) -> Change | None:
        """The measure is at ``share`` of its limit."""
        before = self.state
        if share > 1:
            self.state = State.DRIFTED
        elif before is not State.DRIFTED or share < CLEAR:
            self.state = State.STABLE
        if State.DRIFTED not in (before, self.state) or before is self.state:
            return None
        return Change(self._signal, began=self.state is State.DRIFTED)


class HeadMonitor:
    """One head of one artefact.

    Args:
        held_out: the gains that it predicted for its held-out rows.
    """

    def __init__(self, held_out: NDArray[Any], settings: DriftSettings) -> None:
        self._reference = Reference(held_out)
        self._settings = settings
        self._gains = np.zeros(settings.window, np.float32)
        self._predictions = 0
        self._index: float | None = None
        self._limit = settings.stability_max
        self._inputs = _Latch(Signal.INPUTS)
        self._outcomes: dict[str, tuple[float, float]] = {}
        self._unnamed = 0
        self._found: Accuracy | None = None
        self._accuracy = _Latch(Signal.ACCURACY)

    def predicted(self, gain: float) -> Change | None:
        """Adds a ``gain`` that the head predicted for a request."""
        settings = self._settings
        self._gains[self._predictions % settings.window] = gain
        self._predictions += 1
        if self._predictions < settings.min_rows or self._predictions % settings.judge_every:
            return None
        self._limit = max(settings.stability_max, self._reference.chance_index(self._rows, CHANCE))
        self._index = self._reference.stability_index(self._gains[: self._rows])
        return self._inputs.judge(self._index / self._limit)

    def observed(self, chance: float, outcome: float, request_id: str = "") -> Change | None:
        """Adds an ``outcome`` with the ``chance`` that the head had predicted, both 0 to 1.

        A later outcome of the same ``request_id`` replaces an earlier one; without one each counts.
        """
        if not request_id:
            self._unnamed += 1
            request_id = f"#{self._unnamed}"
        self._outcomes[request_id] = (chance, outcome)
        if len(self._outcomes) > self._settings.window:
            del self._outcomes[next(iter(self._outcomes))]
        predicted, outcomes = zip(*self._outcomes.values(), strict=True)
        confidence, learned = self._settings.confidence, self._reference.rows
        self._found = found = accuracy(predicted, outcomes, confidence, learned)
        if found.rows < self._settings.min_outcomes:
            return None
        return self._accuracy.judge(abs(found.bias) / found.half_width)

    @property
    def health(self) -> HeadHealth:
        """The last computed health."""
        inputs = Inputs(self._inputs.state, self._rows, self._index, self._limit)
        return HeadHealth(inputs, Outcomes(self._accuracy.state, len(self._outcomes), self._found))

    @property
    def _rows(self) -> int:
        return min(self._predictions, self._settings.window)
