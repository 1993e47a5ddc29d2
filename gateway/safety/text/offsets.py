"""From offsets in a changed text back to offsets in the text before the change.

An edit says that ``before[start:end]`` became ``length`` characters. Everything between edits is copied. A map is
built when somebody asks for the first offset: most texts change in places that no rule ever points at.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import NamedTuple


class Edit(NamedTuple):
    """``before[start:end]`` became ``length`` characters. In order, and never overlapping."""

    start: int
    end: int
    length: int


class OffsetMap:
    """Offsets behind a list of edits, back to offsets before them."""

    def __init__(self, edits: Callable[[], Iterable[Edit]]) -> None:
        self._edits = edits

    def span_before(self, start: int, end: int) -> tuple[int, int]:
        """The span before the edits that holds all that ``start`` to ``end`` was made of.

        What was removed inside the span belongs to it, what was removed beside it does not. An empty span stays empty.
        """
        first, _ = self._character(start)
        if end <= start:
            return first, first
        _, last = self._character(end - 1)
        return first, last

    def _character(self, offset: int) -> tuple[int, int]:
        """The span before the edits that the character at ``offset`` was made of."""
        starts, ends, starts_before, ends_before = self._segments
        index = bisect_right(starts, offset) - 1
        if index < 0:
            return offset, offset + 1
        if offset < ends[index]:
            return starts_before[index], ends_before[index]
        before = offset - ends[index] + ends_before[index]
        return before, before + 1

    @cached_property
    def _segments(self) -> tuple["array[int]", "array[int]", "array[int]", "array[int]"]:
        """The edits as columns: start and end after them, start and end before them."""
        starts, ends, starts_before, ends_before = (array("q") for _ in range(4))
        shift = 0
        for start, end, length in self._edits():
            starts.append(start + shift)
            shift += length - (end - start)
            ends.append(end + shift)
            starts_before.append(start)
            ends_before.append(end)
        return starts, ends, starts_before, ends_before
