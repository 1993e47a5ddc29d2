"""Distributions of lengths in tokens, drawn from a seeded generator.

Written as ``200`` (always), ``uniform/50/150`` (bounds), ``lognormal/200/1/4096`` (median, sigma, cap).
"""

import math
from dataclasses import dataclass
from random import Random
from typing import Final, Protocol

from simulator.failures import SimulationError


class Lengths(Protocol):
    """Draws lengths of at least 1 token."""

    def draw(self, chance: Random) -> int:
        """One length."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    tokens: int

    def draw(self, chance: Random) -> int:
        """See `Lengths`."""
        return self.tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every length from ``low`` to ``high`` alike."""

    low: int
    high: int

    def draw(self, chance: Random) -> int:
        """See `Lengths`."""
        return chance.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """The logarithm is normal; ``cap`` cuts the tail off."""

    median: float
    sigma: float
    cap: int

    def draw(self, chance: Random) -> int:
        """See `Lengths`."""
        return max(
            1, min(self.cap, round(chance.lognormvariate(math.log(self.median), self.sigma)))
        )


@dataclass(frozen=True, slots=True)
class LengthMix:
    """Prompts and answers of one kind of traffic."""

    prompt: Lengths
    answer: Lengths


def _of_mean(mean: float, sigma: float, cap: int) -> Lognormal:
    """The lognormal with this mean before the cap."""
    return Lognormal(mean / math.exp(sigma**2 / 2), sigma, cap)


MIXES: Final = {
    "sharegpt": LengthMix(_of_mean(161.31, 1.0, 2048), _of_mean(337.99, 0.8, 2048)),
    "alpaca": LengthMix(_of_mean(19.31, 0.5, 512), _of_mean(58.45, 0.9, 512)),
    "desk": LengthMix(Uniform(25, 90), Uniform(5, 60)),
}
"""Mixes by name. The means of the first two are those of the data sets as Kwon et al. measured them ("Efficient Memory
Management for Large Language Model Serving with PagedAttention", SOSP 2023, figure 11: prompts and answers of ShareGPT
161.31 and 337.99 tokens, of Alpaca 19.31 and 58.45); the spread is ours, chosen for tails like those of their
histograms. ``desk`` is about what the shipped tiers see and say (docs/tiers.md)."""


def parse_lengths(text: str) -> Lengths:
    """The distribution that ``text`` says.

    Raises:
        SimulationError: it says none.
    """
    name, *numbers = text.split("/")
    try:
        match name, [float(n) for n in numbers]:
            case _, [] if name.isdigit() and int(name) >= 1:
                return Fixed(int(name))
            case "uniform", [low, high] if 1 <= low <= high:
                return Uniform(int(low), int(high))
            case "lognormal", [median, sigma, cap] if median >= 1 and sigma >= 0 and cap >= 1:
                return Lognormal(median, sigma, int(cap))
    except ValueError:
        pass
    raise SimulationError(
        f"{text!r} is no length in tokens: write 200, uniform/50/150 (bounds) or "
        "lognormal/200/1/4096 (median, sigma, cap)"
    )
