"""How long the tokens of a row that may wait are gathered in the worker before they are sent."""

from typing import Final

SOON_S: Final = 0.01
"""Ends of rows that gather, and news of free slots, wait for others at most this long, seconds."""

GATHER_TOKENS_MAX: Final = 256
"""A row that has gathered so many tokens sends them: more are not lost with a worker, nor larger a message."""

GATHER_GRID_S: Final = 0.25
"""Gathered tokens go at multiples of this, or of the time that they are gathered, seconds."""


def gathered_until(now: float, gather_s: float) -> float:
    """When tokens that are gathered from ``now`` on go: rounded down, so that rows go together; 0 s: now."""
    grid_s = min(gather_s, GATHER_GRID_S)
    return (now + gather_s) // grid_s * grid_s if grid_s else now


def end_wait_s(gather_s: float) -> float:
    """How long the end of a row may wait for others, seconds."""
    return min(gather_s, SOON_S)
