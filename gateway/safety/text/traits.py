"""The kinds of characters in a text, found in one numpy pass, so that steps without work are skipped."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from gateway.safety.text import characters as c
from gateway.safety.text.confusables import LATIN_RANGES, LOOKALIKES
from gateway.safety.text.invisible import CANDIDATES
from gateway.safety.text.styled import PLAIN_OF

ODD: Final = 1
"""Invisible, blank, a line end other than newline, or no character."""
BIDI: Final = 2
"""Marks and isolates of bidirectional text."""
FULL_WIDTH: Final = 4
STYLED: Final = 8
"""Other styled letters."""
MARK: Final = 16
"""Combining marks, as far as they can flood."""
LATIN: Final = 32
LOOKALIKE: Final = 64
"""Letters of other scripts that look Latin."""

_LIMIT = 0x20000
"""From here on there are ideographs and invisible characters: one entry of the table for all of them."""

Kinds = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Traits:
    """The kinds of a text's characters."""

    kinds: Kinds
    """Of each character, as bits."""
    union: int
    """Of all characters together."""


def traits(text: str) -> Traits:
    """The kinds of the characters of ``text``."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    kinds = _TABLE[np.minimum(codes, _LIMIT)]
    return Traits(kinds, int(np.bitwise_or.reduce(kinds)))


def _table() -> Kinds:
    """The bits of each code point."""
    table = np.zeros(_LIMIT + 1, dtype=np.uint8)
    odd = c.members(
        CANDIDATES + c.LINE_ENDS + c.SURROGATES + c.NONCHARACTERS + c.BLANKS + c.BRAILLE_BLANK
    )
    for bit, codes in (
        (ODD, [*odd, _LIMIT]),
        (BIDI, c.members(c.BIDI_MARKS + c.ISOLATES)),
        (FULL_WIDTH, range(0xFF01, 0xFF5F)),
        (STYLED, PLAIN_OF.keys() - range(0xFF01, 0xFF5F)),
        (MARK, c.MARK_CODES),
        (LATIN, c.members(LATIN_RANGES)),
        (LOOKALIKE, map(ord, LOOKALIKES)),
    ):
        table[[code for code in codes if code <= _LIMIT]] |= bit
    return table


_TABLE: Final = _table()
