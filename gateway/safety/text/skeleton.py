"""The skeleton of a text: a view for detection only, in which look-alikes of ASCII are ASCII.

`skeleton` is anchored on ASCII, so that rules are written in plain words: ASCII stays as it is, and every other
character that looks like ASCII becomes what it looks like: the prototype of UTS #39 (Cyrillic "о" is "o"), the
compatibility decomposition (mathematical, full-width, circled, ligatures), the digit (Arabic-Indic five is "5"),
letters without their accents and other marks, small capitals, negative circled and squared letters, regional
indicators. All else stays. Letters of scripts that do not mimic Latin (Arabic, Hebrew, Indic, East Asian) stay too,
or ordinary text in them would turn into noise.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from gateway.safety.text import characters as c
from gateway.safety.text import ucd
from gateway.safety.text.confusables import PROTOTYPES, SCRIPTS

EXPANSION_MAX = 6
"""Characters that one character can become; what would need more stays as it is."""

_Codes = np.ndarray[tuple[int], np.dtype[np.uint32]]
_Indices = np.ndarray[tuple[int], np.dtype[np.int64]]

_LIMIT = 0x20000
"""Characters beyond are ideographs: they look like nothing else."""
_MIMICS: Final = ("LATIN", "MODIFIER LETTER", "SCRIPT", "DOUBLE-STRUCK", "TURNED", *SCRIPTS)
_GENERIC_MARKS: Final = frozenset(c.members(c.GENERIC_MARKS))
_NAMED: Final = (
    "LATIN LETTER SMALL CAPITAL ",
    "NEGATIVE CIRCLED LATIN CAPITAL LETTER ",
    "NEGATIVE SQUARED LATIN CAPITAL LETTER ",
    "PARENTHESIZED LATIN SMALL LETTER ",
    "PARENTHESIZED LATIN CAPITAL LETTER ",
    "REGIONAL INDICATOR SYMBOL LETTER ",
)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The skeleton of a text."""

    text: str
    origins: _Indices | None = None
    """For each character the offset of the one it stands for, and at the end the length. None: the same offsets."""

    def original_span(self, start: int, end: int) -> tuple[int, int]:
        """The span of the text before that ``text[start:end]`` stands for, with the marks that were left out inside."""
        if self.origins is None:
            return start, max(start, end)
        first = int(self.origins[start])
        return first, (int(self.origins[end - 1]) + 1 if end > start else first)


def skeleton(text: str) -> Skeleton:
    """What ``text`` looks like, in ASCII where it looks like ASCII. Meant for normalized text; any text will do."""
    if text.isascii():
        return Skeleton(text)
    all_lengths, starts, expansions = tables()
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    index = np.minimum(codes, _LIMIT)
    lengths = all_lengths[index]
    if bool((lengths == 1).all()):
        seen = np.where(codes < _LIMIT, expansions[starts[index]], codes)
        return Skeleton(_text(seen))
    counts = lengths.astype(np.int64)
    origins = np.repeat(np.arange(len(codes)), counts)
    within = np.arange(len(origins)) - np.repeat(np.cumsum(counts) - counts, counts)
    seen = expansions[starts[index[origins]] + within]
    seen = np.where(codes[origins] < _LIMIT, seen, codes[origins])
    return Skeleton(_text(seen), np.append(origins, len(codes)))


def _text(codes: _Codes) -> str:
    """The string of ``codes``."""
    return codes.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


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


@cache
def tables() -> tuple["np.ndarray[tuple[int], np.dtype[np.uint8]]", _Indices, _Codes]:
    """For each code point the length and the start of what it looks like, and all of those in a row.

    They take 0.1 s, so a gateway makes them when it serves already; any thread may.
    """
    lengths = np.ones(_LIMIT + 1, dtype=np.uint8)
    starts = np.arange(_LIMIT + 1, dtype=np.int64)
    expansions: list[int] = []
    for code in _with_a_look():
        seen = _look(chr(code))
        if seen != chr(code) and len(seen) <= EXPANSION_MAX:
            lengths[code] = len(seen)
            starts[code] = _LIMIT + 1 + len(expansions)
            expansions.extend(map(ord, seen))
    row = np.concatenate([np.arange(_LIMIT + 1), np.array(expansions)]).astype(np.uint32)
    return lengths, starts, row


def _with_a_look() -> list[int]:
    """The code points that may look like something else: all that a table has something to say about."""
    return c.matching(
        lambda character: (
            ord(character) in PROTOTYPES
            or ord(character) in _GENERIC_MARKS
            or (not "\uac00" <= character <= "\ud7a3" and ucd.decomposition(character) != "")
            or ucd.category(character) in ("Nd", "So", "Ll")
        ),
        last=_LIMIT,
    )
