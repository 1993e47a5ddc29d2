"""Lengths of answers, learned from traffic.

An answer has at most `max_tokens` and is about as long as others of its tenant's workload were. Two numbers are
learned, each in constant time and memory: the mean, which a tenant is charged until the actual length is known, and a
high quantile, for which room in a worker's cache is reserved. The quantile moves up by a step when an answer is longer
and down when it is not, in such a ratio that it settles where the wanted share is longer. Steps are relative to the
length and shrink to a floor, so that the estimate follows when answers change.
"""

from typing import Final

from batcher.core.scheduler.task import QueuedTask

TRUSTED_FROM: Final = 8
"""Answers that must have been seen."""
KEYS_MAX: Final = 4096
"""Tenants and workloads that are remembered; the oldest is forgotten first."""
GUESS_TOKENS: Final = 128
"""Expected of an answer of which nothing is known, at most. To charge max_tokens for what ends much earlier would move
all virtual times, and a tenant that begins to wait then would start too late."""
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
        """Adds the length of an answer."""
        self.answers = answers = self.answers + 1
        self._mean += (tokens - self._mean) * (1 / answers if answers < 1 / STEP_MIN else STEP_MIN)
        step = answers**-0.5 if answers < 1 / STEP_MIN**2 else STEP_MIN
        self._high *= 1 + step * (quantile if tokens > self._high else quantile - 1)
        self.expected = int(self._mean) or 1
        self.reserved = int(self._high) + 1


class OutputLengths:
    """Observed lengths, by tenant and workload, and by workload alone for tenants that are new to it.

    Attributes:
        quantile: of lengths, that room is reserved for.
    """

    def __init__(self, quantile: float) -> None:
        self.quantile = quantile
        self._seen: dict[tuple[str | None, str], _Seen] = {}

    def __len__(self) -> int:
        """Kinds of answers with a stored estimate."""
        return len(self._seen)

    def estimate(self, task: QueuedTask) -> None:
        """Sets the expected cost of ``task``, and the cache room it may need.

        An answer that is already longer than expected is assumed to grow by as much again. None is shorter than
        `QueuedTask.min_tokens`.
        """
        prompt, most, least = task.prompt_tokens, task.max_tokens, task.min_tokens
        seen = self._known(task.tenant, task.workload) or self._known(None, task.workload)
        task.guessed = seen is None
        if seen is None:
            task.cost_tokens = prompt + max(least, min(most, GUESS_TOKENS))
            task.cache_tokens = prompt + most
            return
        expected, reserved = seen.expected, seen.reserved
        produced = task.prefill_tokens - prompt
        if produced:
            expected, reserved = max(expected, 2 * produced), max(reserved, 2 * produced)
        task.cost_tokens = prompt + max(least, min(expected, most))
        task.cache_tokens = prompt + max(least, min(reserved, most))

    def observe(self, task: QueuedTask, tokens: int) -> None:
        """An answer of ``tokens`` has ended by itself.

        One that reached its ``max_tokens`` below the mean says nothing: it may be a short one or a long one.
        """
        is_cut = tokens >= task.max_tokens
        for key in ((task.tenant, task.workload), (None, task.workload)):
            seen = self._seen.get(key)
            if seen is not None:
                if not is_cut or tokens >= seen.expected:
                    seen.observe(tokens, self.quantile)
                continue
            if len(self._seen) >= KEYS_MAX:
                del self._seen[next(iter(self._seen))]
            self._seen[key] = _Seen(tokens)

    def _known(self, tenant: str | None, workload: str) -> _Seen | None:
        seen = self._seen.get((tenant, workload))
        return None if seen is None or seen.answers < TRUSTED_FROM else seen
