"""The tables of Unicode: the character database, pinned to one version, and the confusables of UTS #39.

The database of `unicodedata` depends on the Python. The confusables are ``gateway/safety/data/confusables.txt``, which
names its source and version.
"""

from collections.abc import Callable
from importlib.resources import files
from typing import Final

import unicodedata2

UNICODE_VERSION: Final = "18.0.0"
"""The version of the installed tables, held by a test."""

category: Final[Callable[[str], str]] = unicodedata2.category
combining: Final[Callable[[str], int]] = unicodedata2.combining
decimal: Final[Callable[[str], int]] = unicodedata2.decimal
decomposition: Final[Callable[[str], str]] = unicodedata2.decomposition
name: Final[Callable[[str, str], str]] = unicodedata2.name
normalize: Final[Callable[[str, str], str]] = unicodedata2.normalize


def parsed() -> dict[int, str]:
    """Each character with a prototype, by code point, and its prototype (one to 18 characters)."""
    packed = files("gateway.safety").joinpath("data/confusables.txt").read_text(encoding="utf-8")
    words = "".join(line for line in packed.splitlines(True) if not line.startswith("#"))
    table: dict[int, str] = {}
    for word in words.replace(",\n", ",").split():
        prototype, _, sources = word.partition("=")
        target = "".join(chr(int(code, 16)) for code in prototype.split("."))
        for source in sources.split(","):
            first, _, last = source.partition("-")
            for code in range(int(first, 16), int(last or first, 16) + 1):
                table[code] = target
    return table


PROTOTYPES: Final = parsed()
"""Each confusable character by code point, and what it looks like."""
