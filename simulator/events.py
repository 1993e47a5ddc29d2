"""Virtual time: what is due next happens next."""

from collections.abc import Callable
from heapq import heappop, heappush

Act = Callable[[], None]


class Events:
    """Acts by time; those of one time happen in the order they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Act]] = []
        self._numbers = 0

    def at(self, when: float, act: Act) -> None:
        """Does ``act`` at ``when``, at once if that has passed."""
        self._numbers += 1
        heappush(self._heap, (max(self.now, when), self._numbers, act))

    def next_at(self) -> float | None:
        """When the next act is due; None when nothing is left to do."""
        return self._heap[0][0] if self._heap else None

    def step(self) -> None:
        """Goes on to the next act and does it."""
        self.now, _, act = heappop(self._heap)
        act()
