"""The text under inspection, as characters and as bytes, and the way from one offset to the other.

Both engines match bytes; findings are in characters. Digits of other scripts and the many dashes are folded to
ASCII one for one, so that offsets stay and a number is a number in any script.
"""

import re
import unicodedata
from functools import cached_property
from typing import Final

_TO_FOLD: Final = re.compile(r"[^\D0-9]|[\u2010-\u2015\u2212\ufe58\uff0d]")
_BLOCK: Final = 1024
_ASCII: Final = bytes(range(0x80))
_CONTINUATION: Final = bytes(range(0x80, 0xC0))


class Subject:
    """One text to search in."""

    def __init__(self, text: str) -> None:
        # A lone surrogate becomes one "?": one character for one character.
        self.text, self.data = text, text.encode("utf-8", "replace")
        if _needs_folding(self.data):
            self.text = _TO_FOLD.sub(_folded, text)
            self.data = self.text.encode("utf-8", "replace")
        self._same = len(self.data) == len(self.text)

    @classmethod
    def of_ascii_folding(cls, original: "Subject", data: bytes) -> "Subject":
        """A subject of other ASCII letters with the same offsets."""
        other = cls.__new__(cls)
        other.data, other.text, other._same = data, data.decode(), original._same
        return other

    def chars(self, offset: int) -> int:
        """The characters before the byte at ``offset``."""
        if self._same:
            return offset
        block = offset // _BLOCK
        return self._chars_before[block] + _count(self.data[block * _BLOCK : offset])

    def bytes_at(self, char: int, near_byte: int, near_char: int) -> int:
        """The byte offset of a character at or behind a known pair of offsets."""
        if self._same:
            return char
        return near_byte + len(self.text[near_char:char].encode("utf-8", "replace"))

    def back(self, offset: int, chars: int) -> int:
        """A byte offset at least ``chars`` characters before ``offset``, at the start of a character."""
        at = max(0, offset - chars * (1 if self._same else 4))
        while at > 0 and 0x80 <= self.data[at] < 0xC0:
            at -= 1
        return at

    @cached_property
    def _chars_before(self) -> list[int]:
        sums = [0]
        for at in range(0, len(self.data), _BLOCK):
            sums.append(sums[-1] + _count(self.data[at : at + _BLOCK]))
        return sums


def _needs_folding(data: bytes) -> bool:
    """Looks at what is not ASCII only: in most texts that is little."""
    return not data.isascii() and _TO_FOLD.search(data.translate(None, _ASCII).decode()) is not None


def _count(data: bytes) -> int:
    """The characters that start in ``data``."""
    return len(data.translate(None, _CONTINUATION))


def _folded(match: re.Match[str]) -> str:
    char = match.group()
    return str(unicodedata.decimal(char)) if char.isdecimal() else "-"
