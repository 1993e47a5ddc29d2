"""Limits the tokens of bulk prompts in a step while more urgent sequences come, which wait for such a step."""

import math
from typing import Final

from sluice.wire.subjects import CLASSES

BULK_RANK: Final = len(CLASSES) - 1
"""Rank of the least urgent class."""
BULK_STEP_S: Final = 0.012
"""Target duration of a step with bulk prompts, in seconds."""
PROMPT_SHARE: Final = 0.5
"""What bulk prompts may add in any case, as a share of a step without prompts; otherwise they would never end."""
URGENT_S: Final = 10.0
"""How long the limit holds after the last more urgent sequence, in seconds."""
MEAN_SHARE: Final = 0.1
"""Weight of one step in the running means."""


class BulkPace:
    """Measures what a prompt token adds to a step, and derives the limit of bulk prompts.

    A step lasts until the next one begins: with steps that overlap on a device, this is what one costs.
    """

    def __init__(self, token_s: float = 0.0, step_s: float = 0.0) -> None:
        """Create a pace; the costs of a prompt token and of a step without prompts are measured if `token_s` is 0."""
        self._has_fixed_costs = token_s > 0
        self._token_s, self._step_s = token_s, step_s
        self._urgent_at = -math.inf
        self._begun_at: float | None = None
        self._tokens = 0

    def limit(self, rank: int, now: float) -> int:
        """Return the maximum number of prompt tokens of a step with bulk prompts; 0: no limit.

        Args:
            rank: Rank of the most urgent sequence in the engine.
            now: Monotonic seconds.
        """
        if rank < BULK_RANK:
            self._urgent_at = now
        # Without a measurement, or without urgent sequences lately, bulk prompts are not limited.
        if not self._token_s or now > self._urgent_at + URGENT_S:
            return 0
        prompts_s = max(BULK_STEP_S - self._step_s, PROMPT_SHARE * self._step_s)
        return max(1, int(prompts_s / self._token_s))

    def begin(self, tokens: int, now: float) -> None:
        """Begin a step with this many prompt tokens, which ends the step before it."""
        if self._begun_at is not None and not self._has_fixed_costs:
            self._measure(now - self._begun_at)
        self._begun_at, self._tokens = now, tokens

    def pause(self) -> None:
        """Discard the last step from the measurement, because no step follows at once."""
        self._begun_at = None

    def _measure(self, seconds: float) -> None:
        if not self._tokens:
            self._step_s = _mean(self._step_s, seconds)
        # What a step with prompts takes beyond one without is the cost of its prompt tokens.
        elif self._step_s:
            more_s = max(0.0, seconds - self._step_s)
            self._token_s = _mean(self._token_s, more_s / self._tokens)


def _mean(mean: float, value: float) -> float:
    return mean + MEAN_SHARE * (value - mean) if mean else value
