"""The random numbers behind draws: each depends on (seed, index) alone."""

from typing import Final

_MASK: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on (seed, index) alone, 53 bits of it."""
    state = _mixed((seed + _GAMMA) & _MASK)
    return (_mixed((state + (index + 1) * _GAMMA) & _MASK) >> 11) * 2.0**-53


def _mixed(state: int) -> int:
    """The output function of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
