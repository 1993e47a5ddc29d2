"""How long an answer will be: at most max_tokens, and about as long as others of the tenant's workload were.

Two numbers are learned, each in constant time and memory: the mean, which is what a tenant is charged until the truth
is known, and a high quantile, which is what room in a worker's cache is reserved for. The quantile moves up by a step
when an answer is longer and down when it is not, in such a ratio that it rests where the wanted share is longer; steps
are relative, because lengths are, and become smaller up to a floor, so that it follows when answers change.
"""

import math
from typing import Final

from batcher.core.tasks import QueuedTask

TRUSTED_FROM: Final = 8
"""Answers that must have been seen."""
KEYS_MAX: Final = 4096
"""Tenants and workloads that are remembered; the oldest is forgotten first."""
STEP_MIN: Final = 0.05


class _Seen:
    """Lengths of one kind of answers."""

    __slots__ = ("answers", "high", "mean")

    def __init__(self, tokens: int) -> None:
        self.answers = 1
        self.mean = self.high = float(max(1, tokens))

    def observe(self, tokens: int, quantile: float) -> None:
        self.answers += 1
        self.mean += (tokens - self.mean) * max(STEP_MIN, 1 / self.answers)
        step = max(STEP_MIN, 1 / math.sqrt(self.answers))
        self.high *= math.exp(step * (quantile if tokens > self.high else quantile - 1))
        self.high = max(1.0, self.high)


class OutputLengths:
    """What was seen, by tenant and workload, and by workload alone for tenants that are new to it.

    Attributes:
        quantile: of lengths, that room is reserved for.
    """

    def __init__(self, quantile: float) -> None:
        self.quantile = quantile
        self._seen: dict[tuple[str | None, str], _Seen] = {}

    def expect(self, task: QueuedTask, produced: int) -> tuple[int, int]:
        """Length of the whole answer: the mean to expect, and what to reserve room for.

        ``produced`` tokens exist: an answer that has outlived what was expected will grow by as much again.
        """
        least = min(task.max_tokens, 2 * produced) if produced else 1
        seen = self._seen.get((task.tenant, task.workload))
        if seen is None or seen.answers < TRUSTED_FROM:
            seen = self._seen.get((None, task.workload))
            if seen is None or seen.answers < TRUSTED_FROM:
                return task.max_tokens, task.max_tokens
        most = task.max_tokens
        return max(least, min(most, round(seen.mean))), max(least, min(most, math.ceil(seen.high)))

    def observe(self, task: QueuedTask, tokens: int) -> None:
        """An answer of ``tokens`` has ended by itself."""
        for key in ((task.tenant, task.workload), (None, task.workload)):
            seen = self._seen.get(key)
            if seen is not None:
                seen.observe(tokens, self.quantile)
                continue
            if len(self._seen) >= KEYS_MAX:
                del self._seen[next(iter(self._seen))]
            self._seen[key] = _Seen(tokens)
