"""The view of a text that patterns are matched on: no invisible characters, look-alikes of ASCII as ASCII.

Full-width and mathematical letters, digits of every script and the many dashes become ASCII. Each character is mapped
by itself, so that a stream and a whole text read alike: it is left out, becomes one ASCII character, or stays.
"""

import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final, Protocol

from typing_extensions import override

from gateway.safety.findings import Finding

_INVISIBLE: Final = (
    ("\u00ad", "\u00ad"),  # soft hyphen
    ("\u034f", "\u034f"),  # combining grapheme joiner
    ("\u061c", "\u061c"),  # Arabic letter mark
    ("\u115f", "\u1160"),  # Hangul fillers
    ("\u17b4", "\u17b5"),  # Khmer inherent vowels
    ("\u180b", "\u180f"),  # Mongolian variation selectors and vowel separator
    ("\u200b", "\u200f"),  # zero-width space, non-joiner, joiner, direction marks
    ("\u202a", "\u202e"),  # bidi embeddings and overrides
    ("\u2060", "\u206f"),  # word joiner, invisible operators, isolates
    ("\u3164", "\u3164"),  # Hangul filler
    ("\ufe00", "\ufe0f"),  # variation selectors
    ("\ufeff", "\ufeff"),  # byte order mark
    ("\uffa0", "\uffa0"),  # half-width Hangul filler
    ("\U000e0000", "\U000e0fff"),  # tags, variation selectors supplement
)
_DASHES: Final = frozenset("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\uff0d")
_STARTS: Final = tuple(first for first, _ in _INVISIBLE)


class Scanner(Protocol):
    """Finds matches of rules. The result at an offset depends only on the text near it."""

    def scan(self, text: str) -> Sequence[Finding]:
        """All findings in ``text``."""


@lru_cache(maxsize=65536)
def seen_as(char: str) -> str:
    """What ``char`` is in the view: one character, or nothing for an invisible one."""
    if char.isascii():
        return char
    index = bisect_right(_STARTS, char) - 1
    if index >= 0 and char <= _INVISIBLE[index][1]:
        return ""
    if char.isdecimal():
        return str(unicodedata.decimal(char))
    if char in _DASHES:
        return "-"
    plain = unicodedata.normalize("NFKC", char)
    return plain if len(plain) == 1 and plain.isascii() else char


def view(text: str) -> tuple[str, Sequence[int]]:
    """``text`` in the view, and for each character of the view its offset in ``text``."""
    if text.isascii():
        return text, range(len(text))
    kept = [(index, plain) for index, char in enumerate(text) if (plain := seen_as(char))]
    return "".join(plain for _, plain in kept), [index for index, _ in kept]


def after_seen(text: str, at: int, chars: int) -> int:
    """The offset ``chars`` characters of the view behind ``at``, or the end of ``text``."""
    if text[at : at + chars].isascii():
        return min(at + chars, len(text))
    while chars > 0 and at < len(text):
        chars -= bool(seen_as(text[at]))
        at += 1
    return at


def before_seen(text: str, chars: int) -> int:
    """The offset ``chars`` characters of the view before the end of ``text``, or 0."""
    at = len(text)
    if chars >= at:
        return 0
    while chars > 0 and at > 0:
        at -= 1
        chars -= bool(seen_as(text[at]))
    return at


class ViewScanner(Scanner):
    """A scanner that looks at the view and reports spans of the text itself."""

    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner

    @override
    def scan(self, text: str) -> list[Finding]:
        plain, offsets = view(text)
        found = self._scanner.scan(plain)
        if plain is text:
            return list(found)
        return [
            replace(f, start=offsets[f.start], end=offsets[f.end - 1] + 1)
            for f in found
            if f.end > f.start
        ]
