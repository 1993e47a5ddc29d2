"""How fast a job may go, and how fast it goes."""

from collections import deque
from typing import Final

BURST_S: Final = 1.0
"""A limit a minute lets so many seconds' worth of it through at once."""
WINDOW_S: Final = 60.0


class Rate:
    """A limit of so many a minute; 0: none. What is counted may only be known afterwards: then the next ones wait."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_s = per_minute / 60
        self._most = max(1.0, self._per_s * BURST_S)
        self._level = self._most
        self._at = now

    def wait_s(self, now: float) -> float:
        """How long until something may go; 0: now."""
        if not self._per_s:
            return 0.0
        self._level = min(self._most, self._level + (now - self._at) * self._per_s)
        self._at = now
        return max(0.0, (1.0 - self._level) / self._per_s) if self._level < 1.0 else 0.0

    def took(self, count: float) -> None:
        """So many went."""
        self._level -= count


class Budget:
    """What items may cost together; 0: anything. What one costs is known when it is answered.

    So for each that is in flight as much is set aside as the dearest one has cost; before the first is known one goes
    alone. More than the budget is spent by what one item costs beyond that.
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self._spent = 0.0
        self._dearest: float | None = None

    def allows(self, in_flight: int) -> bool:
        """Whether another item may go beside so many."""
        left = self.most - self._spent
        if not self.most or (left > 0 and not in_flight):
            return True
        return self._dearest is not None and (in_flight + 1) * self._dearest <= left

    def took(self, cost: float, items: int = 1) -> None:
        """So many items have cost this."""
        self._spent += cost
        if items:
            self._dearest = max(self._dearest or 0.0, cost / items)


class Speed:
    """Items and tokens a second over the last minute, from totals that are told about once a second."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque()

    def told(self, now: float, items: int, tokens: int) -> None:
        """The totals at ``now``."""
        self._samples.append((now, items, tokens))
        while len(self._samples) > 2 and now - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()

    @property
    def items_per_s(self) -> float:
        """0 before two samples."""
        return self._slope(1)

    @property
    def tokens_per_s(self) -> float:
        """0 before two samples."""
        return self._slope(2)

    def remaining_s(self, items_left: float) -> float | None:
        """The time for so many more items; None: not known."""
        return items_left / self.items_per_s if self.items_per_s > 0 else None

    def _slope(self, column: int) -> float:
        if len(self._samples) < 2:
            return 0.0
        first, last = self._samples[0], self._samples[-1]
        return (last[column] - first[column]) / max(1e-3, last[0] - first[0])
