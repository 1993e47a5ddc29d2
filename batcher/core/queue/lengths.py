"""How long an answer will be: at most max_tokens, and about as long as others of the tenant's workload were.

Two numbers are learned, each in constant time and memory: the mean, which is what a tenant is charged until the truth
is known, and a high quantile, which is what room in a worker's cache is reserved for. The quantile moves up by a step
when an answer is longer and down when it is not, in such a ratio that it rests where the wanted share is longer; steps
are relative, because lengths are, and become smaller up to a floor, so that it follows when answers change.
"""

from typing import Final

from batcher.core.queue.entries import Entry
from batcher.core.tasks import QueuedTask

TRUSTED_FROM: Final = 8
"""Answers that must have been seen."""
KEYS_MAX: Final = 4096
"""Tenants and workloads that are remembered; the oldest is forgotten first."""
GUESS_TOKENS: Final = 128
"""An answer of which nothing is known, at most. To charge for max_tokens what ends much earlier would move everybody's
virtual time, and who begins to wait then would start too late."""
STEP_MIN: Final = 0.05


class _Seen:
    """Lengths of one kind of answers.

    Attributes:
        expected: the mean, tokens.
        reserved: the high quantile, tokens.
    """

    __slots__ = ("_high", "_mean", "answers", "expected", "reserved")

    def __init__(self, tokens: int) -> None:
        self.answers = 1
        self.expected = self.reserved = max(1, tokens)
        self._mean = self._high = float(self.expected)

    def observe(self, tokens: int, quantile: float) -> None:
        """An answer was so long."""
        self.answers = answers = self.answers + 1
        self._mean += (tokens - self._mean) * (1 / answers if answers < 1 / STEP_MIN else STEP_MIN)
        step = answers**-0.5 if answers < 1 / STEP_MIN**2 else STEP_MIN
        self._high *= 1 + step * (quantile if tokens > self._high else quantile - 1)
        self.expected = int(self._mean) or 1
        self.reserved = int(self._high) + 1


class OutputLengths:
    """What was seen, by tenant and workload, and by workload alone for tenants that are new to it.

    Attributes:
        quantile: of lengths, that room is reserved for.
    """

    def __init__(self, quantile: float) -> None:
        self.quantile = quantile
        self._seen: dict[tuple[str | None, str], _Seen] = {}

    def __len__(self) -> int:
        """Kinds of answers that are remembered."""
        return len(self._seen)

    def estimate(self, entry: Entry) -> None:
        """Sets what ``entry`` is expected to cost, and the room it may need.

        An answer that has outlived what was expected will grow by as much again.
        """
        task = entry.task
        prompt, most = task.prompt_tokens, task.max_tokens
        seen = self._seen.get((task.tenant, task.workload))
        if seen is None or seen.answers < TRUSTED_FROM:
            seen = self._of_others(task)
        entry.guessed = seen is None
        if seen is None:
            entry.tokens = prompt + min(most, GUESS_TOKENS)
            entry.cache = prompt + most
            return
        expected, reserved = seen.expected, seen.reserved
        produced = entry.prefill - prompt
        if produced:
            expected, reserved = max(expected, 2 * produced), max(reserved, 2 * produced)
        entry.tokens = prompt + (expected if expected < most else most)
        entry.cache = prompt + (reserved if reserved < most else most)

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

    def _of_others(self, task: QueuedTask) -> _Seen | None:
        seen = self._seen.get((None, task.workload))
        return None if seen is None or seen.answers < TRUSTED_FROM else seen
