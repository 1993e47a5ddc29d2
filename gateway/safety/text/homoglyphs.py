"""Detects words that mix look-alike letters of two scripts, such as Latin with Cyrillic or Greek letters.

The letters are not changed. Not flagged: words of one script, and legitimate mixtures, which are inflected
abbreviations ("SMSка") and a Greek letter of a formula beside Latin ones ("cosα").
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from gateway.safety.findings import Severity
from gateway.safety.text.confusables import CYRILLIC_TWINS, LOOKALIKES
from gateway.safety.text.trail import Trail
from gateway.safety.text.traits import LATIN, LOOKALIKE, Kinds, Traits

RULE: Final = "unicode.homoglyph"
WORD_MAX = 64
"""Characters to either side that a word is looked for in."""

_FORMULA: Final = frozenset("αβγεηικνρστυχω")


def flag_homoglyphs(trail: Trail, seen: Traits) -> None:
    """Flags words that are spelled with letters of two scripts to look like one. ``seen``: the traits of the text."""
    if not (seen.union & LATIN and seen.union & LOOKALIKE):
        return
    trail.flag_all(RULE, _homoglyphs(trail.text, seen.kinds), Severity.MEDIUM)


def _homoglyphs(text: str, kinds: Kinds) -> Iterator[tuple[int, int]]:
    letters = kinds & (LATIN | LOOKALIKE)
    beside = np.flatnonzero((letters[:-1] | letters[1:]) == LATIN | LOOKALIKE)
    word_end = 0
    for at in beside.tolist():
        if at < word_end:
            continue
        start, word_end = _word(text, at)
        if _passes_for_another(text[start:word_end], kinds[start:word_end]):
            yield start, word_end


def _word(text: str, at: int) -> tuple[int, int]:
    """Where the word around ``at`` starts and ends."""
    start, end = at, at + 1
    while start > max(0, at - WORD_MAX) and text[start - 1].isalpha():
        start -= 1
    while end < min(len(text), at + WORD_MAX) and text[end].isalpha():
        end += 1
    return start, end


def _passes_for_another(word: str, kinds: Kinds) -> bool:
    """Whether all letters of one script in ``word`` are look-alikes of the other."""
    latin = [letter for letter, kind in zip(word, kinds.tolist(), strict=True) if kind & LATIN]
    foreign = [
        letter for letter, kind in zip(word, kinds.tolist(), strict=True) if not kind & LATIN
    ]
    if _is_inflected(word, len(latin)) or _is_formula(word, foreign):
        return False
    return all(letter in LOOKALIKES for letter in foreign) or (
        len(foreign) > 1 and all(letter in CYRILLIC_TWINS for letter in latin)
    )


def _is_inflected(word: str, latin: int) -> bool:
    """Whether ``word`` is a Latin abbreviation with an ending of the other script."""
    stem, ending = word[:latin], word[latin:]
    return latin > 1 and stem.isupper() and stem.isascii() and ending.islower()


def _is_formula(word: str, foreign: list[str]) -> bool:
    """Whether one Greek letter stands before or after Latin ones."""
    return len(foreign) == 1 and foreign[0] in _FORMULA and foreign[0] in (word[0], word[-1])
