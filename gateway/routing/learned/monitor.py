"""Says when a learned router has drifted, and when it is over. Plain code over windows of fixed size.

Two signals of each head: *inputs* compares the gains that it predicts with those of its held-out rows, *accuracy* the
chances that it predicted with what came of them. Each is a measure held against a limit that chance alone keeps below:
it drifts above the limit, and is over only below `CLEAR` of it, so that a measure near the limit is told once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned.drift import Accuracy, Reference, accuracy
from sluice.settings.routing import DriftSettings

CLEAR: Final = 0.6
"""Of the limit; below it a drift is over."""
CHANCE: Final = 0.9999
"""Below what share of windows of unchanged traffic the limit of the index lies, where `stability_max` is too low."""


class Signal(Enum):
    """What may drift."""

    INPUTS = "inputs"
    ACCURACY = "accuracy"


class State(Enum):
    """Of a signal."""

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
    """The predicted chances against what came of them."""

    state: State
    rows: int
    """Outcomes in the window."""
    found: Accuracy | None
    """None: no outcomes."""


@dataclass(frozen=True)
class Health:
    """Of one head, now."""

    inputs: Inputs
    outcomes: Outcomes

    @property
    def drifted(self) -> list[Signal]:
        """The signals that have."""
        states = {Signal.INPUTS: self.inputs.state, Signal.ACCURACY: self.outcomes.state}
        return [signal for signal, state in states.items() if state is State.DRIFTED]


class _Level(Enum):
    """Of a measure, by its share of the limit."""

    LOW = 0
    BETWEEN = 1
    HIGH = 2


_MOVES: Final[Mapping[tuple[State, _Level], State]] = {
    (State.GATHERING, _Level.LOW): State.STABLE,
    (State.GATHERING, _Level.BETWEEN): State.STABLE,
    (State.GATHERING, _Level.HIGH): State.DRIFTED,
    (State.STABLE, _Level.LOW): State.STABLE,
    (State.STABLE, _Level.BETWEEN): State.STABLE,
    (State.STABLE, _Level.HIGH): State.DRIFTED,
    (State.DRIFTED, _Level.LOW): State.STABLE,
    (State.DRIFTED, _Level.BETWEEN): State.DRIFTED,
    (State.DRIFTED, _Level.HIGH): State.DRIFTED,
}


class _Latch:
    """The state of one signal."""

    def __init__(self, signal: Signal) -> None:
        self._signal = signal
        self.state = State.GATHERING

    def judge(self, share: float) -> Change | None:
        """The measure is at ``share`` of its limit."""
        level = _Level.HIGH if share > 1 else _Level.LOW if share < CLEAR else _Level.BETWEEN
        before, self.state = self.state, _MOVES[self.state, level]
        if State.DRIFTED not in (before, self.state) or before is self.state:
            return None
        return Change(self._signal, began=self.state is State.DRIFTED)


class Monitor:
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
        """The head predicted ``gain`` for a request."""
        settings = self._settings
        self._gains[self._predictions % settings.window] = gain
        self._predictions += 1
        if self._predictions < settings.min_rows or self._predictions % settings.judge_every:
            return None
        self._limit = max(settings.stability_max, self._reference.chance_index(self._rows, CHANCE))
        self._index = self._reference.stability_index(self._gains[: self._rows])
        return self._inputs.judge(self._index / self._limit)

    def observed(self, chance: float, outcome: float, request_id: str = "") -> Change | None:
        """What the head predicted as ``chance`` came out as ``outcome``, both 0 to 1.

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
    def health(self) -> Health:
        """As it was last judged."""
        inputs = Inputs(self._inputs.state, self._rows, self._index, self._limit)
        return Health(inputs, Outcomes(self._accuracy.state, len(self._outcomes), self._found))

    @property
    def _rows(self) -> int:
        return min(self._predictions, self._settings.window)
