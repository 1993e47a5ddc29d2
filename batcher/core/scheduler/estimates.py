"""Estimates of answer lengths, learned from traffic.

An answer has at most `max_tokens` and is usually about as long as others of its tenant's workload.
Two numbers are learned, each in constant time and memory: the mean, which a tenant is charged until
the actual length is known, and a high quantile, for which KV cache is reserved. The quantile is
tracked by stochastic approximation: it steps up when an answer is longer and down when it is not,
in the ratio at which it settles at the wanted quantile. Steps are relative to the length and shrink
to a floor, so that the estimate follows when answers change.
"""

from typing import Final

from batcher.core.scheduler.entry import QueueEntry

TRUSTED_FROM: Final = 8
"""Answers that must have been seen before an estimate is used."""
KEYS_MAX: Final = 4096
"""Tenant and workload pairs that are remembered; the oldest is forgotten first."""
GUESS_TOKENS: Final = 128
"""Answer tokens charged at most while nothing is known. Charging `max_tokens` for answers that end
much earlier would advance all virtual times and disadvantage tenants that start to wait later."""
STEP_MIN: Final = 0.05
"""Smallest relative step, so that estimates keep adapting."""


class _Seen:
    """Lengths of one kind of answers.

    Attributes:
        mean: in tokens.
        high: the quantile, in tokens.
    """

    __slots__ = ("answers", "high", "mean")

    def __init__(self, tokens: int) -> None:
        self.answers = 1
        self.mean = self.high = float(max(1, tokens))

    def observe(self, tokens: int, quantile: float) -> None:
        """Learn the length of an answer."""
        self.answers = answers = self.answers + 1
        self.mean += (tokens - self.mean) * (1 / answers if answers < 1 / STEP_MIN else STEP_MIN)
        step = answers**-0.5 if answers < 1 / STEP_MIN**2 else STEP_MIN
        self.high *= 1 + step * (quantile if tokens > self.high else quantile - 1)


class OutputLengths:
    """Observed lengths by tenant and workload, and by workload alone for tenants new to it.

    Attributes:
        quantile: quantile of lengths for which cache is reserved, 0 to 1.
    """

    def __init__(self, quantile: float) -> None:
        self.quantile = quantile
        self._seen: dict[tuple[str | None, str], _Seen] = {}

    def __len__(self) -> int:
        """Return the number of stored estimates."""
        return len(self._seen)

    def estimate(self, entry: QueueEntry) -> None:
        """Set the expected cost and KV cache need of a request.

        An answer that came with tokens is assumed to become at least twice as long, within `max_tokens`.
        None is shorter than `QueueEntry.min_tokens`.
        """
        prompt, max_tokens, min_tokens = entry.prompt_tokens, entry.max_tokens, entry.min_tokens
        statistics = self._stats(entry.tenant, entry.workload) or self._stats(None, entry.workload)
        entry.guessed = statistics is None
        if statistics is None:
            entry.cost_tokens = prompt + max(min_tokens, min(max_tokens, GUESS_TOKENS))
            entry.cache_tokens = prompt + max_tokens
            return
        expected, reserved = int(statistics.mean) or 1, int(statistics.high) + 1
        produced = entry.prefill_tokens - prompt
        if produced:
            expected, reserved = max(expected, 2 * produced), max(reserved, 2 * produced)
        entry.cost_tokens = prompt + max(min_tokens, min(expected, max_tokens))
        entry.cache_tokens = prompt + max(min_tokens, min(reserved, max_tokens))

    def observe(self, entry: QueueEntry, tokens: int) -> None:
        """Learn from an answer that ended by itself after `tokens`.

        One that was cut off by `max_tokens` below the mean is ignored: its natural length is
        unknown.
        """
        is_cut = tokens >= entry.max_tokens
        for key in ((entry.tenant, entry.workload), (None, entry.workload)):
            statistics = self._seen.get(key)
            if statistics is not None:
                if not is_cut or tokens >= int(statistics.mean):
                    statistics.observe(tokens, self.quantile)
                continue
            if len(self._seen) >= KEYS_MAX:
                del self._seen[next(iter(self._seen))]
            self._seen[key] = _Seen(tokens)

    def _stats(self, tenant: str | None, workload: str) -> _Seen | None:
        statistics = self._seen.get((tenant, workload))
        return None if statistics is None or statistics.answers < TRUSTED_FROM else statistics
