"""Splitting of long texts into overlapping parts of bounded token count, cut where a reader would cut."""

from collections.abc import Iterator, Sequence
from typing import Final

_CUTS: Final = (("\n\n", ""), ("\n", ""), (".", " "), (". ", ""), ("", " "), (" ", ""))
"""Text before and after a cut, best first: paragraphs, lines, sentences, words."""
_LOOK_BACK: Final = 4
"""A cut is searched among the last tokens that a part adds: one in this many of them."""


def split(text: str, ends: Sequence[int], size: int, overlap: int) -> Iterator[tuple[int, int]]:
    """Yield where each part of a text begins and ends, in characters.

    Every character is in a part; neighbouring parts share the tokens of their overlap. A text without
    tokens has no part.

    Args:
        text: the text.
        ends: where each token of the text ends, in characters, ascending.
        size: maximum tokens of a part, at least 1.
        overlap: tokens at the end of a part that begin the next one; less than `size`.
    """
    assert 0 <= overlap < size, (size, overlap)
    first = 0
    while first < len(ends):
        last = min(first + size, len(ends))
        if last < len(ends):
            last = _cut(text, ends, first + overlap + 1, last)
        # Token i begins where token i-1 ends, so that text between tokens is not lost.
        begin = ends[first - 1] if first else 0
        yield begin, (ends[last - 1] if last < len(ends) else len(text))
        if last == len(ends):
            return
        first = max(last - overlap, first + 1)


def _cut(text: str, ends: Sequence[int], least: int, last: int) -> int:
    """Return the number of the token before which a part ends.

    That is behind the best cut close to `last`, else `last`. A part that ends at `least` adds one
    token to the one before.
    """
    lowest = last - (last - least) // _LOOK_BACK
    for before, behind in _CUTS:
        for at in range(last, lowest - 1, -1):
            if text.endswith(before, 0, ends[at - 1]) and text.startswith(behind, ends[at - 1]):
                return at
    return last
