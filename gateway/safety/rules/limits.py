"""The limit on repetition in a text, checked in linear time."""

from collections.abc import Iterator
from typing import Final

CHARS_MAX: Final = 200_000
"""Longest text of a prompt that is inspected unless a policy says otherwise, in characters."""
RUN_CHARS_MAX: Final = 2_000
"""Longest repetition of a phrase of up to 256 characters; below 600 the search would miss some."""
_PROBE_CHARS: Final = 24
_STRIDE_CHARS: Final = 256
_PERIOD_MAX: Final = 256
_BLOCK_CHARS: Final = 512


def repetitions(text: str, chars_max: int = RUN_CHARS_MAX) -> Iterator[tuple[int, int]]:
    """Yield stretches longer than `chars_max` in which something of at most 256 characters repeats itself.

    A probe is taken every 256 characters; where it occurs again right behind, that distance is the
    period, and the stretch goes as far as the text equals itself shifted by it. Every character is
    compared a bounded number of times.
    """
    at = 0
    while at + _PROBE_CHARS < len(text):
        probe = text[at : at + _PROBE_CHARS]
        again = text.find(probe, at + 1, at + _PERIOD_MAX + _PROBE_CHARS)
        # Nothing repeats here with a period of 256 or less.
        if again < 0:
            at += _STRIDE_CHARS
            continue
        period = again - at
        end = _equal_until(text, at, period) + period
        start = _equal_from(text, at, period)
        if end - start > chars_max:
            yield start, end
        at = max(end - period, at) + _STRIDE_CHARS


def _equal_until(text: str, at: int, period: int) -> int:
    """Return the end of the stretch that equals itself shifted by `period`."""
    size = _BLOCK_CHARS
    while size:
        if (
            at + period + size <= len(text)
            and text[at : at + size] == text[at + period : at + period + size]
        ):
            at += size
        else:
            size //= 2
    return at


def _equal_from(text: str, at: int, period: int) -> int:
    """Return the start of the stretch that equals itself shifted by `period`."""
    floor = max(0, at - _STRIDE_CHARS)
    while at > floor and text[at - 1] == text[at - 1 + period]:
        at -= 1
    return at
