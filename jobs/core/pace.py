"""Limits of a job's rate and cost, and its measured throughput."""

from collections import deque
from dataclasses import dataclass
from typing import Final

BURST_S: Final = 1.0
"""Burst that a limit per minute allows, in seconds' worth of it."""
WINDOW_S: Final = 60.0
"""Time over which throughput is measured, in seconds."""


class RateLimit:
    """Limit per minute; 0: none. Counts may be known only afterwards: then later ones wait."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_s = per_minute / 60
        self._most = max(1.0, self._per_s * BURST_S)
        self._level = self._most
        self._at = now

    def wait_s(self, now: float) -> float:
        """Return how long until something may be sent, in seconds; 0: now."""
        if not self._per_s:
            return 0.0
        self._level = min(self._most, self._level + (now - self._at) * self._per_s)
        self._at = now
        return max(0.0, (1.0 - self._level) / self._per_s) if self._level < 1.0 else 0.0

    def consume(self, count: float) -> None:
        """Record that this many were sent; fewer than 0: given back."""
        self._level -= count


@dataclass(slots=True)
class CostBudget:
    """Budget for the cost of items; 0: unlimited. The cost of an item is known when it is answered.

    For each item in flight as much is set aside as the most expensive one has cost; until one is
    known, items go alone. So the budget is only exceeded by what items in flight cost beyond that, or by
    one that was sent alone.
    """

    limit: float = 0.0
    spent: float = 0.0
    _dearest: float | None = None

    def allows(self, in_flight: int) -> bool:
        """Return whether another item may be sent beside this many."""
        remaining = self.limit - self.spent
        if not self.limit or (remaining > 0 and not in_flight):
            return True
        return self._dearest is not None and (in_flight + 1) * self._dearest <= remaining

    def consume(self, cost: float, items: int = 1) -> None:
        """Record the cost of finished items; with `items` 0 it says nothing about the cost of one."""
        self.spent += cost
        if items:
            self._dearest = max(self._dearest or 0.0, cost / items)


class Throughput:
    """Items and tokens per second over the last minute, from totals sampled about once a second."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque()

    def sample(self, now: float, items: int, tokens: int) -> tuple[float, float]:
        """Record the totals at a time; return items and tokens per second, 0 before two samples."""
        samples = self._samples
        samples.append((now, items, tokens))
        while len(samples) > 2 and now - samples[0][0] > WINDOW_S:
            samples.popleft()
        began, first_items, first_tokens = samples[0]
        seconds = max(1e-3, now - began)
        return (items - first_items) / seconds, (tokens - first_tokens) / seconds
