"""How many tokens of bulk prompts a step computes while sequences of more urgent classes come: they wait for such a step."""

import math
from typing import Final

from sluice.wire.subjects import CLASSES

BULK_RANK: Final = len(CLASSES) - 1
BULK_STEP_S: Final = 0.012
"""How long a step with bulk prompts may take, seconds."""
PROMPT_SHARE: Final = 0.5
"""What these prompts may add all the same, a share of a step without prompts: they would never end."""
URGENT_S: Final = 10.0
"""How long the limit holds after the last sequence of a more urgent class, seconds."""
MEAN_SHARE: Final = 0.1
"""What one step weighs in the running means."""


class BulkPace:
    """Measures what a prompt token adds to a step, and gives the limit of bulk prompts. Time is an argument.

    A step lasts until the next one begins: with steps that overlap on a device, this is what one costs.
    """

    def __init__(self, token_s: float = 0.0, step_s: float = 0.0) -> None:
        """Seconds of a prompt token, and of a step without any, where they are known; 0: they are measured."""
        self._known = token_s > 0
        self._token_s, self._step_s = token_s, step_s
        self._urgent_at = -math.inf
        self._begun_at: float | None = None
        self._tokens = 0

    def limit(self, rank: int, now: float) -> int:
        """Most prompt tokens of a step with bulk prompts; 0: no limit. ``rank`` is that of the most urgent sequence."""
        if rank < BULK_RANK:
            self._urgent_at = now
        if not self._token_s or now > self._urgent_at + URGENT_S:
            return 0
        prompts_s = max(BULK_STEP_S - self._step_s, PROMPT_SHARE * self._step_s)
        return max(1, int(prompts_s / self._token_s))

    def begin(self, tokens: int, now: float) -> None:
        """A step with so many prompt tokens begins, and the one before it has ended."""
        if self._begun_at is not None and not self._known:
            self._measure(now - self._begun_at)
        self._begun_at, self._tokens = now, tokens

    def pause(self) -> None:
        """No step follows at once: the last one is not measured."""
        self._begun_at = None

    def _measure(self, seconds: float) -> None:
        if not self._tokens:
            self._step_s = _mean(self._step_s, seconds)
        elif self._step_s:
            more_s = max(0.0, seconds - self._step_s)
            self._token_s = _mean(self._token_s, more_s / self._tokens)


def _mean(known: float, seen: float) -> float:
    return known + MEAN_SHARE * (seen - known) if known else seen
