"""Makes ``gateway/safety/data/unicode.json``: what the gateway knows of characters beyond its own classes.

    python -m tests.gateway.safety.text.tables     # writes the file; a test compares it

From the character database that is installed (`unicodedata2`) and the confusables of UTS #39 (``confusables.json``
beside this file, which names its source).
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import unicodedata2 as ucd

from gateway.safety.text import characters as c

FILE = Path("gateway/safety/data/unicode.json")
_CONFUSABLES = json.loads(Path(__file__).with_name("confusables.json").read_text(encoding="utf-8"))
PROTOTYPES: dict[int, str] = {
    ord(character): prototype
    for prototype, characters in _CONFUSABLES["prototypes"].items()
    for character in characters
}
"""Each confusable character by code point, and its prototype: what it looks like, one to 18 characters."""

EXPANSION_MAX = 6
"""Characters that one character can become; what would need more stays as it is."""
LIMIT = 0x20000
"""Characters beyond are ideographs: they look like nothing else."""
SCRIPTS = (
    "CYRILLIC", "GREEK", "ARMENIAN", "CHEROKEE", "COPTIC", "LISU", "GOTHIC", "DESERET", "OLD ITALIC"
)  # fmt: skip
"""Scripts with letters that look like Latin ones, as character names spell them."""
_MIMICS = ("LATIN", "MODIFIER LETTER", "SCRIPT", "DOUBLE-STRUCK", "TURNED", *SCRIPTS)
_NAMED = (
    "LATIN LETTER SMALL CAPITAL ",
    "NEGATIVE CIRCLED LATIN CAPITAL LETTER ",
    "NEGATIVE SQUARED LATIN CAPITAL LETTER ",
    "PARENTHESIZED LATIN SMALL LETTER ",
    "PARENTHESIZED LATIN CAPITAL LETTER ",
    "REGIONAL INDICATOR SYMBOL LETTER ",
)
_STYLES = {"<font>", "<circle>", "<square>", "<super>", "<sub>"}
GENERIC_MARKS = "\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f"
"""Combining marks of no script of their own."""
_GENERIC_MARKS = frozenset(c.members(GENERIC_MARKS))


def made() -> dict[str, Any]:
    """The content of the file."""
    composing, composed = _of_composition()
    marks = set(_matching(lambda character: ucd.category(character)[0] == "M", 0x300))
    return {
        "version": ucd.unidata_version,
        "source": _CONFUSABLES["source"],
        "marks": _class(marks - {*c.members(c.SELECTORS + c.MONGOLIAN_CONTROLS + c.FORMATS)}),
        "composing": _class(composing),
        "composed": _class(composed),
        "styled": _by_value({code: _stands_for(chr(code)) for code in range(0xAA, 0x1F200)}),
        "looks": _by_value(
            {
                code: look
                for code in _with_a_look()
                if len(look := _look(chr(code))) <= EXPANSION_MAX
            }
        ),
    }


def _matching(holds: Callable[[str], bool], first: int, last: int = 0x1F000) -> list[int]:
    return [code for code in range(first, last) if holds(chr(code))]


def _class(codes: Iterable[int]) -> str:
    """The inside of a character class."""
    spans: list[list[int]] = []
    for code in sorted(codes):
        if spans and spans[-1][1] == code - 1:
            spans[-1][1] = code
        else:
            spans.append([code, code])
    return "".join(
        chr(first) if first == last else f"{chr(first)}-{chr(last)}" for first, last in spans
    )


def _by_value(values: dict[int, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for code, value in sorted(values.items()):
        if value != chr(code):
            found[value] = found.get(value, "") + chr(code)
    return dict(sorted(found.items()))


def _stands_for(character: str) -> str:
    """The one ASCII letter or digit that a styled character stands for. Raised and circled digits are notation."""
    style = ucd.decomposition(character).partition(" ")[0]
    plain = ucd.normalize("NFKC", character)
    is_one = style in _STYLES and len(plain) == 1 and plain.isascii()
    return (
        plain
        if is_one and (plain.isalpha() or (style == "<font>" and plain.isdigit()))
        else character
    )


def _of_composition() -> tuple[set[int], set[int]]:
    """The characters that can compose with the one before them, and others that NFC changes."""
    composing = set(_matching(lambda character: ucd.combining(character) != 0, 0x300))
    composed = set()
    for code in _matching(
        lambda character: ucd.decomposition(character)[:1] not in ("", "<"), 0xC0
    ):
        parts = ucd.decomposition(chr(code)).split()
        if len(parts) == 2 and ucd.normalize("NFC", chr(code)) == chr(code):
            composing.add(int(parts[1], 16))
        elif len(parts) == 1 or ucd.normalize("NFC", chr(code)) != chr(code):
            composed.add(code)
    composing.update(range(0x1161, 0x1176), range(0x11A8, 0x11C3))
    return composing, composed - {*c.members(c.COMPATIBILITY_HAN)}


def _look(character: str) -> str:
    """What one character that is not ASCII looks like: ASCII, nothing (a mark), or itself."""
    if ord(character) in _GENERIC_MARKS:
        return ""
    name = ucd.name(character, "")
    named = next((name[len(prefix) :] for prefix in _NAMED if name.startswith(prefix)), "")
    if len(named) == 1:
        return named.lower() if "SMALL" in name else named
    if ucd.category(character) == "Nd":
        return str(ucd.decimal(character))
    plain = ucd.normalize("NFKC", character)
    if plain.isascii():
        return plain
    return _mimicked(character, name)


def _mimicked(character: str, name: str) -> str:
    """What ``character`` looks like by its prototype, if its script mimics Latin."""
    if ucd.category(character)[0] == "L" and not name.startswith(_MIMICS):
        return character
    base = "".join(
        part for part in ucd.normalize("NFD", character) if ord(part) not in _GENERIC_MARKS
    )
    seen = "".join(_prototype_of(part) for part in base)
    seen = "".join(part for part in seen if ord(part) not in _GENERIC_MARKS)
    return seen if seen.isascii() and seen else character


def _prototype_of(character: str) -> str:
    """The prototype of one character, in the case and shape that a reader expects of it."""
    seen = PROTOTYPES.get(ord(character), character) if not character.isascii() else character
    if seen == "l" and ucd.category(character) in ("Lu", "Nl"):
        return "I"
    return seen.replace("rn", "m")


def _with_a_look() -> list[int]:
    """The code points that may look like something else: all that a table has something to say about."""
    return _matching(
        lambda character: (
            ord(character) in PROTOTYPES
            or ord(character) in _GENERIC_MARKS
            or (not "\uac00" <= character <= "\ud7a3" and ucd.decomposition(character) != "")
            or ucd.category(character) in ("Nd", "So", "Ll")
        ),
        0x80,
        LIMIT,
    )


if __name__ == "__main__":
    FILE.write_text(json.dumps(made(), indent=0) + "\n", encoding="utf-8")
