"""Circuit breakers (Nygard, Release It!): a model that fails repeatedly gets no requests for a while, then probes."""

from collections import defaultdict
from dataclasses import dataclass
from math import inf
from typing import Final

from sluice.settings.routing import BreakerRules

PROBE_S: Final = 30.0
"""How long a probe may take, in seconds; then it counts as lost and the next one may go."""


@dataclass
class _Breaker:
    """The breaker of one model: closed, open until a time, or half-open while one request at a time probes it."""

    failures: int = 0
    """Failures in a row while it is closed."""
    closed: bool = True
    half_open: bool = False
    next_at: float = -inf
    """Earliest time of the next request; a closed breaker lets all pass."""


class Breakers:
    """One breaker per model. Every request that was `sent` ends with `succeeded`, `failed` or `abandoned`."""

    def __init__(self) -> None:
        self._breakers: defaultdict[str, _Breaker] = defaultdict(_Breaker)

    def retry_after_s(self, model: str, now: float) -> float:
        """Return the seconds until a request may go to the model; 0 means now."""
        return max(0.0, self._breakers[model].next_at - now)

    def is_open(self, model: str, now: float) -> bool:
        """Return whether the model gets no request now, because it failed repeatedly."""
        return self.retry_after_s(model, now) > 0

    def sent(self, model: str, now: float) -> None:
        """Note a request to the model; it is a probe unless the breaker is closed."""
        breaker = self._breakers[model]
        if not breaker.closed:
            breaker.half_open, breaker.next_at = True, now + PROBE_S

    def succeeded(self, model: str) -> None:
        """Note an answer. A request from before the breaker opened does not close it."""
        breaker = self._breakers[model]
        breaker.failures = 0
        if breaker.half_open:
            self._breakers[model] = _Breaker()

    def failed(self, model: str, rules: BreakerRules, now: float) -> None:
        """Note a failure that the model itself caused."""
        breaker = self._breakers[model]
        breaker.failures += 1
        if breaker.half_open or (breaker.closed and breaker.failures >= rules.failures):
            until = now + rules.open_s
            self._breakers[model] = _Breaker(closed=False, next_at=until)

    def abandoned(self, model: str) -> None:
        """Note a request without a result for or against the model, so that another probe may go."""
        breaker = self._breakers[model]
        if breaker.half_open:
            breaker.next_at = -inf
