"""Which indexes of a pass have an outcome: all below a mark, and some above it."""

from collections.abc import Iterable, Sequence


class DoneIndexes:
    """A set of indexes that grows from 0 without large gaps.

    Attributes:
        low_water: every index below it is in the set.
    """

    def __init__(self, low_water: int = 0, ranges: Sequence[int] = ()) -> None:
        """``ranges``: begin and end of each range above the mark, as `ranges` gives them."""
        self.low_water = low_water
        self._above = {
            index
            for begin, end in zip(ranges[::2], ranges[1::2], strict=True)
            for index in range(begin, end)
        }

    def __contains__(self, index: int) -> bool:
        return index < self.low_water or index in self._above

    def add(self, indexes: Iterable[int]) -> None:
        """Adds ``indexes``; none of them is in the set."""
        for index in indexes:
            assert index not in self, f"item {index} has an outcome already"
            self._above.add(index)
        while self.low_water in self._above:
            self._above.discard(self.low_water)
            self.low_water += 1

    @property
    def ranges(self) -> list[int]:
        """Begin and end of each range above the mark, in order, the ends excluded."""
        ranges: list[int] = []
        for index in sorted(self._above):
            if ranges and ranges[-1] == index:
                ranges[-1] = index + 1
            else:
                ranges += (index, index + 1)
        return ranges

    @property
    def is_whole(self) -> bool:
        """Whether nothing is above the mark."""
        return not self._above
