"""The tables of Unicode: the character database, pinned to one version, and the confusables of UTS #39.

The database of `unicodedata` depends on the Python. The confusables are ``gateway/safety/data/confusables.json``, which
names its source and version.
"""

import json
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


_CONFUSABLES: Final = json.loads(
    files("gateway.safety").joinpath("data/confusables.json").read_text(encoding="utf-8")
)
PROTOTYPES: Final[dict[int, str]] = {
    ord(character): prototype
    for prototype, characters in _CONFUSABLES["prototypes"].items()
    for character in characters
}
"""Each confusable character by code point, and its prototype: what it looks like, one to 18 characters."""
