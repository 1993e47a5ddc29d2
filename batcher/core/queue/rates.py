"""How fast waiting tasks are handed out, measured while some wait: without a queue one sees demand, not capacity."""

import math
from typing import Final

MEMORY_S: Final = 10.0
"""What was longer ago counts for less than a third."""


class HandoutRate:
    """Tokens of tasks, prompt and expected answer, a second."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._busy_s = 0.0
        self._busy_since: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """The rate; 0: not known."""
        return self._tokens / self._busy_s if self._busy_s else 0.0

    def decided(self, tokens: int, left: int, now: float) -> None:
        """``tokens`` were handed out, and ``left`` tasks wait on."""
        if self._busy_since is not None:
            spent_s = max(0.0, now - self._busy_since)
            fade = math.exp(-spent_s / MEMORY_S)
            self._tokens = self._tokens * fade + tokens
            self._busy_s = self._busy_s * fade + spent_s
        self._busy_since = now if left else None
