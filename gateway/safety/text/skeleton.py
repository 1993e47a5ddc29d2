"""The skeleton of a text: a view for detection only, in which look-alikes of ASCII are ASCII.

`skeleton` is anchored on ASCII, so that rules are written in plain words: ASCII stays as it is, and every other
character that looks like ASCII becomes what it looks like: the prototype of UTS #39 (Cyrillic "о" is "o"), the
compatibility decomposition (mathematical, full-width, circled, ligatures), the digit (Arabic-Indic five is "5"),
letters without their accents and other marks, small capitals, negative circled and squared letters, regional
indicators. All else stays. Letters of scripts that do not mimic Latin (Arabic, Hebrew, Indic, East Asian) stay too,
or ordinary text in them would turn into noise.
"""

import sys
from functools import cache, cached_property
from typing import Final

import numpy as np

from gateway.safety.text import characters as c
from gateway.safety.text import ucd

_Codes = np.ndarray[tuple[int], np.dtype[np.uint32]]

EXPANSION_MAX = 6
"""Characters that one character can become; what would need more stays as it is."""

_LIMIT = 0x20000
"""Characters beyond are ideographs: they look like nothing else."""
_MIMICS: Final = ("LATIN", "MODIFIER LETTER", "SCRIPT", "DOUBLE-STRUCK", "TURNED", *c.SCRIPTS)
_GENERIC_MARKS: Final = frozenset(c.members(c.GENERIC_MARKS))
_NAMED: Final = (
    "LATIN LETTER SMALL CAPITAL ",
    "NEGATIVE CIRCLED LATIN CAPITAL LETTER ",
    "NEGATIVE SQUARED LATIN CAPITAL LETTER ",
    "PARENTHESIZED LATIN SMALL LETTER ",
    "PARENTHESIZED LATIN CAPITAL LETTER ",
    "REGIONAL INDICATOR SYMBOL LETTER ",
)


class Skeleton:
    """The skeleton of a text.

    Attributes:
        text: the look of it; of a text in ASCII the text itself.
    """

    def __init__(self, original: str) -> None:
        self._original = original
        self.text = original if original.isascii() else _seen(original)

    def original_span(self, start: int, end: int) -> tuple[int, int]:
        """The span of the text before that ``text[start:end]`` stands for, with the marks that were left out inside."""
        first = self._origins[start]
        return first, (self._origins[end - 1] + 1 if end > start else first)

    @cached_property
    def _origins(self) -> list[int]:
        """For each character the offset of the one it stands for, and at the end the length."""
        looks = tables()[1]
        lengths = [len(looks.get(ord(character), " ")) for character in self._original]
        origins = [at for at, length in enumerate(lengths) for _ in range(length)]
        return [*origins, len(self._original)]


def _seen(text: str) -> str:
    """What ``text`` looks like, in ASCII where it looks like ASCII. Meant for normalized text; any text will do."""
    singles, looks = tables()
    codes: _Codes = singles[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")]
    if int(codes.max()) > sys.maxunicode:
        return text.translate(looks)
    return codes.tobytes().decode("utf-32-le", "surrogatepass")


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
    seen = ucd.PROTOTYPES.get(ord(character), character) if not character.isascii() else character
    if seen == "l" and ucd.category(character) in ("Lu", "Nl"):
        return "I"
    return seen.replace("rn", "m")


@cache
def tables() -> tuple[_Codes, dict[int, str]]:
    """What each code point looks like: as one code point, past all of them for another number; and as text.

    They take 0.1 s, so a gateway makes them when it serves already; any thread may.
    """
    looks = {code: _look(chr(code)) for code in _with_a_look()}
    looks = {code: seen for code, seen in looks.items() if len(seen) <= EXPANSION_MAX}
    singles = np.arange(sys.maxunicode + 1, dtype="<u4")
    for code, seen in looks.items():
        singles[code] = ord(seen) if len(seen) == 1 else sys.maxunicode + 1
    return singles, looks


def _with_a_look() -> list[int]:
    """The code points that may look like something else: all that a table has something to say about."""
    return c.matching(
        lambda character: (
            ord(character) in ucd.PROTOTYPES
            or ord(character) in _GENERIC_MARKS
            or (not "\uac00" <= character <= "\ud7a3" and ucd.decomposition(character) != "")
            or ucd.category(character) in ("Nd", "So", "Ll")
        ),
        last=_LIMIT,
    )
