"""The tables of Unicode, in one version whatever the Python.

Composition comes from the pinned `unicodedata2`. What follows from its database and from the
confusables of UTS #39 is in `gateway/safety/data/unicode.json`, which names its sources;
`tests.gateway.safety.text.tables` makes it.
"""

import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, Final

import unicodedata2

normalize: Final[Callable[[str, str], str]] = unicodedata2.normalize
TABLES: Final[Mapping[str, Any]] = json.loads(
    files("gateway.safety").joinpath("data/unicode.json").read_text(encoding="utf-8")
)


def by_character(name: str) -> dict[int, str]:
    """Return a table of `TABLES` by code point; it lists the characters of each value."""
    return {ord(char): value for value, chars in TABLES[name].items() for char in chars}
