"""Circuit breakers (Nygard, Release It!): a model that fails repeatedly gets no requests for a while, then probes."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from sluice.settings.routing import BreakerSettings


class BreakerState(Enum):
    """Whether requests may go to the model."""

    CLOSED = auto()
    """All of them."""
    OPEN = auto()
    """None."""
    HALF_OPEN = auto()
    """One at a time, as a probe."""


MOVES: Final[Mapping[BreakerState, frozenset[BreakerState]]] = {
    BreakerState.CLOSED: frozenset({BreakerState.OPEN}),
    BreakerState.OPEN: frozenset({BreakerState.HALF_OPEN}),
    BreakerState.HALF_OPEN: frozenset({BreakerState.OPEN, BreakerState.CLOSED}),
}
"""The legal moves."""

PROBE_S: Final = 30.0
"""A probe without a result after this long counts as lost, and the next one may go."""


@dataclass
class _Breaker:
    state: BreakerState = BreakerState.CLOSED
    failures: int = 0
    since: float = 0.0
    """Of the state, or of the probe that runs."""
    probing: bool = False

    def move(self, state: BreakerState, now: float) -> None:
        assert state in MOVES[self.state], f"{self.state.name} to {state.name}"
        self.state, self.since, self.failures, self.probing = state, now, 0, False


class Breakers:
    """One breaker per model. Every request that was `sent` ends with `succeeded`, `failed` or `abandoned`.

    Settings are those of the policies of the request that asks.
    """

    def __init__(self) -> None:
        self._breakers: defaultdict[str, _Breaker] = defaultdict(_Breaker)

    def state(self, model: str) -> BreakerState:
        """Of the model's breaker."""
        return self._breakers[model].state

    def allows(self, model: str, settings: BreakerSettings, now: float) -> bool:
        """Whether a request may go to the model now. Changes nothing: `sent` does."""
        breaker = self._breakers[model]
        if breaker.state is BreakerState.CLOSED:
            return True
        if breaker.state is BreakerState.OPEN:
            return now - breaker.since >= settings.open_s
        return not breaker.probing or now - breaker.since >= PROBE_S

    def sent(self, model: str, now: float) -> None:
        """A request was sent to the model; it is the probe unless the breaker is closed."""
        breaker = self._breakers[model]
        if breaker.state is BreakerState.OPEN:
            breaker.move(BreakerState.HALF_OPEN, now)
        if breaker.state is BreakerState.HALF_OPEN:
            breaker.since, breaker.probing = now, True

    def succeeded(self, model: str, now: float) -> None:
        """The model answered."""
        breaker = self._breakers[model]
        breaker.failures = 0
        if breaker.state is BreakerState.HALF_OPEN:
            breaker.move(BreakerState.CLOSED, now)

    def failed(self, model: str, settings: BreakerSettings, now: float) -> None:
        """The model failed, for a reason of its own."""
        breaker = self._breakers[model]
        breaker.failures += 1
        if breaker.state is BreakerState.HALF_OPEN or (
            breaker.state is BreakerState.CLOSED and breaker.failures >= settings.failures
        ):
            breaker.move(BreakerState.OPEN, now)

    def abandoned(self, model: str) -> None:
        """A request ended without a result that counts for or against the model: another probe may go."""
        self._breakers[model].probing = False

    def retry_after_s(self, model: str, settings: BreakerSettings, now: float) -> float:
        """Seconds until the next probe may go."""
        breaker = self._breakers[model]
        limit_s = settings.open_s if breaker.state is BreakerState.OPEN else PROBE_S
        return max(0.0, breaker.since + limit_s - now)
