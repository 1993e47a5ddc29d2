"""Long texts in parts of at most so many tokens that overlap, cut where a reader would cut."""

from collections.abc import Iterator, Sequence
from typing import Final

_CUTS: Final = (("\n\n", ""), ("\n", ""), (".", " "), (". ", ""), ("", " "), (" ", ""))
"""What stands before and behind a cut, best first: paragraphs, lines, sentences, words."""
_LOOK_BACK: Final = 4
"""A cut is looked for in the last quarter of what a part adds."""


def split(text: str, ends: Sequence[int], size: int, overlap: int) -> Iterator[tuple[int, int]]:
    """Where the parts of ``text`` begin and end, in characters.

    Args:
        ends: where each token of the text ends, in characters; as tokenizers give them, rising.
        size: tokens of a part at most, at least 1.
        overlap: tokens of the end of a part that begin the next one; less than ``size``.

    Every character is in a part, and what two neighbours share are their overlap's tokens.
    """
    assert 0 <= overlap < size, (size, overlap)
    first = 0
    while first < len(ends):
        last = min(first + size, len(ends))
        if last < len(ends):
            last = _cut(text, ends, first + overlap + 1, last)
        begin = ends[first - 1] if first else 0
        yield begin, (ends[last - 1] if last < len(ends) else len(text))
        if last == len(ends):
            return
        first = max(last - overlap, first + 1)


def _cut(text: str, ends: Sequence[int], least: int, last: int) -> int:
    """The number of the token that a part ends before: behind the best cut that is not far from ``last``, else that.

    At ``least``, what the part before did not have is one token.
    """
    lowest = last - (last - least) // _LOOK_BACK
    for before, behind in _CUTS:
        for at in range(last, lowest - 1, -1):
            if text.endswith(before, 0, ends[at - 1]) and text.startswith(behind, ends[at - 1]):
                return at
    return last
