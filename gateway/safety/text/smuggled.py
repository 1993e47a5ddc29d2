"""Text that hides in invisible characters, made readable for the rules: tags, and bytes in variation selectors.

Works on the original text, since normalization takes the carriers out.
"""

import re
from typing import NamedTuple

from gateway.safety.text import characters as c

SELECTORS_MIN = 4
"""Variation selectors in a row that carry bytes and are no accident."""

_TAGS = re.compile("[\U000e0020-\U000e007e]+")
_SELECTORS = re.compile(f"[\ufe00-\ufe0f\U000e0100-{c.SELECTORS_FAR[-1]}]{{{SELECTORS_MIN},}}+")
_TAG_TABLE = {0xE0000 + code: code for code in range(0x20, 0x7F)}


class Smuggled(NamedTuple):
    """A hidden text and where it was."""

    start: int
    end: int
    text: str


def smuggled(text: str) -> list[Smuggled]:
    """What invisible characters of ``text`` spell, by start. The letters of flags are among it ("gbeng")."""
    if text.isascii():
        return []
    found = [
        Smuggled(*match.span(), match[0].translate(_TAG_TABLE)) for match in _TAGS.finditer(text)
    ]
    found += [
        Smuggled(*match.span(), _of_selectors(match[0])) for match in _SELECTORS.finditer(text)
    ]
    return sorted(found)


def _of_selectors(selectors: str) -> str:
    """The bytes that variation selectors stand for by their number, read as UTF-8."""
    return bytes(_byte(ord(selector)) for selector in selectors).decode("utf-8", "replace")


def _byte(code: int) -> int:
    """The number of a variation selector: 0 to 255."""
    return code - 0xFE00 if code < 0xFE10 else code - 0xE0100 + 16
