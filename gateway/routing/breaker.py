"""Circuit breakers (Nygard, Release It!): a model that fails repeatedly gets no requests for a while, then probes."""

from collections import defaultdict
from dataclasses import dataclass
from math import inf
from typing import Final

from sluice.settings.routing import BreakerSettings

PROBE_S: Final = 30.0
"""A probe without a result after this long counts as lost, and the next one may go."""


@dataclass
class _Breaker:
    """The breaker of one model: closed, open until a time, or half-open while one request at a time probes it."""

    failures: int = 0
    """In a row, while it is closed."""
    closed: bool = True
    half_open: bool = False
    next_at: float = -inf
    """When a request may go; always, while it is closed."""


class Breakers:
    """One breaker per model. Every request that was `sent` ends with `succeeded`, `failed` or `abandoned`."""

    def __init__(self) -> None:
        self._breakers: defaultdict[str, _Breaker] = defaultdict(_Breaker)

    def retry_after_s(self, model: str, now: float) -> float:
        """Seconds until a request may go to the model; 0: now. Changes nothing: `sent` does."""
        return max(0.0, self._breakers[model].next_at - now)

    def is_open(self, model: str, now: float) -> bool:
        """Return whether the model gets no request now, because it failed repeatedly."""
        return self.retry_after_s(model, now) > 0

    def sent(self, model: str, now: float) -> None:
        """A request was sent to the model; it is the probe unless the breaker is closed."""
        breaker = self._breakers[model]
        if not breaker.closed:
            breaker.half_open, breaker.next_at = True, now + PROBE_S

    def succeeded(self, model: str) -> None:
        """The model answered. A request from before the breaker opened does not close it."""
        breaker = self._breakers[model]
        breaker.failures = 0
        if breaker.half_open:
            self._breakers[model] = _Breaker()

    def failed(self, model: str, settings: BreakerSettings, now: float) -> None:
        """The model failed, for a reason of its own."""
        breaker = self._breakers[model]
        breaker.failures += 1
        if breaker.half_open or (breaker.closed and breaker.failures >= settings.failures):
            until = now + settings.open_s
            self._breakers[model] = _Breaker(closed=False, next_at=until)

    def abandoned(self, model: str) -> None:
        """A request ended without a result that counts for or against the model: another probe may go."""
        breaker = self._breakers[model]
        if breaker.half_open:
            breaker.next_at = -inf
