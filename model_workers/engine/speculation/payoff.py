"""Does it pay to draft? Decided by what was measured, never by what was hoped for.

A step with drafts costs more time and gives more tokens than one without. Its gain is

    tokens of a row in a step with drafts * time of a step without / time of a step with

How many drafts come true depends on the two models and on what is asked; how long a step takes also on how many rows
are in it. So the tokens are one mean, and the times are kept for 1, 2, 3 to 4, 5 to 8, ... rows. Both follow the recent
past.
"""

from dataclasses import dataclass, field
from typing import Final

SKIPPED: Final = 2
"""First measurements of a kind that do not count: libraries set up what they keep for new shapes."""
SAMPLES: Final = 8
"""Measurements of a kind before they are believed."""
REFRESH_STEPS: Final = 64
"""Where drafting pays, one step in so many goes without, so that the comparison stays true."""
PAUSE_STEPS: Final = 256
"""Where it does not pay, steps until it is tried again; twice as many after every vain attempt."""
PAUSE_STEPS_MAX: Final = 16384
GAIN_MIN: Final = 1.05
"""What must be gained: the measurements are noisy, and going to and fro costs too."""
_WEIGHT: Final = 1 / 16


@dataclass
class Mean:
    """The mean of the recent past."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Takes a measurement."""
        self.count += 1
        known = self.count - SKIPPED
        if known > 0:
            self.value += (value - self.value) * max(1 / known, _WEIGHT)

    @property
    def is_known(self) -> bool:
        """Whether there were enough measurements."""
        return self.count >= SKIPPED + SAMPLES


@dataclass
class _Times:
    """Seconds of a step at about so many rows, without drafts and with."""

    plain: Mean = field(default_factory=Mean)
    drafted: Mean = field(default_factory=Mean)
    steps: int = 0
    pause: int = PAUSE_STEPS // 2
    tried_at: int = 0


class Payoff:
    """Decides before every step; hears afterwards what it took."""

    def __init__(self) -> None:
        self._tokens_per_row = Mean()
        self._times: dict[int, _Times] = {}

    def wants(self, rows: int) -> bool:
        """Whether the next step of ``rows`` shall draft."""
        times = self._of(rows)
        times.steps += 1
        if not times.plain.is_known:
            return False
        if not times.drafted.is_known:
            return True
        if self.gain(rows) > GAIN_MIN:
            return times.steps % REFRESH_STEPS != 0
        if times.steps - times.tried_at >= times.pause:
            times.drafted = Mean()
            return True
        return False

    def plain(self, rows: int, seconds: float) -> None:
        """A step without drafts took so long."""
        self._of(rows).plain.add(seconds)

    def drafted(self, rows: int, tokens: int, seconds: float, *, catching_up: bool = False) -> bool:
        """A step with drafts took so long, and gave so many tokens. True when that ends an attempt.

        Args:
            catching_up: the small model had prompts to compute. An attempt does not count that, because there all rows
                have to; where drafting goes on it is part of the price of every new row.
        """
        times = self._of(rows)
        was_known = times.drafted.is_known
        if catching_up and not was_known:
            return False
        self._tokens_per_row.add(tokens / rows)
        times.drafted.add(seconds)
        if was_known or not times.drafted.is_known:
            return False
        pays = self.gain(rows) > GAIN_MIN
        times.pause = PAUSE_STEPS if pays else min(2 * times.pause, PAUSE_STEPS_MAX)
        times.tried_at = times.steps
        return True

    @property
    def tokens_per_row(self) -> float:
        """Of a step with drafts; 0 before the first is measured."""
        return self._tokens_per_row.value

    def gain(self, rows: int) -> float:
        """Tokens per second with drafts by those without; 0 where it is not known."""
        times = self._of(rows)
        if not times.plain.is_known or not times.drafted.is_known:
            return 0.0
        return self.tokens_per_row * times.plain.value / max(times.drafted.value, 1e-9)

    def _of(self, rows: int) -> _Times:
        return self._times.setdefault((rows - 1).bit_length(), _Times())
