"""Finds an engine that hangs: its thread takes far longer than its recent steps did.

The engine's thread marks the begin and the end of its work; another thread looks at intervals. Time counts only while
the looking thread runs too, so that a suspended process or a paused machine is no hanging engine.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

LIMIT_S: Final = 1.0
"""Minimum limit of a step, in seconds."""
FACTOR: Final = 10.0
"""A step hangs when it takes this many times as long as the slowest recent step."""
RECENT_STEPS: Final = 10
"""Number of recent steps to compare with."""
FIRST_LIMIT_S: Final = 60.0
"""Limit of the first step, which may compile, and upper bound of limits scaled by tokens, in seconds."""
TICK_S: Final = 0.25
"""Longest interval between two looks that counts in full, in seconds."""


@dataclass(frozen=True, eq=False, slots=True)
class Work:
    """A step, or the commands between two steps. `tokens` is at least what it computes."""

    tokens: int
    begun_at: float
    limit_s: float


class Watchdog:
    """Compares the engine's work with its recent steps.

    The engine's thread calls `begin` and `end`, one other thread `overdue_s`. Times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)
        self._work: Work | None = None
        self._seen: Work | None = None
        self._seen_at = 0.0
        self._spent_s = 0.0

    def begin(self, tokens: int, now: float) -> None:
        """Mark the begin of work."""
        self._work = Work(tokens, now, self._limit_s(tokens))

    def end(self, now: float, *, is_step: bool) -> None:
        """Mark the end of work; learn the duration of a step."""
        work, self._work = self._work, None
        assert work is not None
        if is_step:
            self._recent.append((max(1, work.tokens), now - work.begun_at))

    @property
    def works(self) -> bool:
        """Whether the engine's thread is working."""
        return self._work is not None

    def overdue_s(self, now: float) -> float:
        """Return by how many seconds the work exceeds its limit; 0: it does not, or there is none."""
        work = self._work
        if work is self._seen:
            self._spent_s += min(now - self._seen_at, TICK_S)
        else:
            self._seen, self._spent_s = work, 0.0
        self._seen_at = now
        return 0.0 if work is None else max(0.0, self._spent_s - work.limit_s)

    def _limit_s(self, tokens: int) -> float:
        if not self._recent:
            return FIRST_LIMIT_S
        slowest_s = FACTOR * max(took_s for _, took_s in self._recent)
        scaled_s = FACTOR * max(took_s * tokens / count for count, took_s in self._recent)
        return max(LIMIT_S, slowest_s, min(scaled_s, FIRST_LIMIT_S))
