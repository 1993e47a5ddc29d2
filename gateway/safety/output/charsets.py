"""Sets of characters as patterns write them, read generously.

Two engines may disagree about a character outside ASCII (RE2's ``\\w`` is ASCII, Python's is not). Here a set says
what it *may* hold under any reading, so that nothing that an engine could match is missed.
"""

from dataclasses import dataclass
from typing import Final

_ASCII_WORD: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")
_ASCII_SPACE: Final = frozenset(" \t\n\r\f\v")
_ODD_CASES: Final = (("s", "\u017f"), ("k", "\u212a"))
"""Characters outside ASCII that are another case of an ASCII letter."""
_UNKNOWN: Final = "p"
"""The name of a Unicode property, which every engine has in a version of its own."""


@dataclass(frozen=True, slots=True)
class CharSet:
    """Characters by ranges and by the names of Perl classes.

    Attributes:
        ranges: first and last character of each range.
        named: letters of Perl classes, of "dDsSwW", and "p" for any Unicode property.
        negated: everything but these.
        any_case: letters stand for both cases.
    """

    ranges: tuple[tuple[str, str], ...] = ()
    named: frozenset[str] = frozenset()
    negated: bool = False
    any_case: bool = False

    def may_hold(self, char: str) -> bool:
        """Whether some engine could find ``char`` in the set."""
        return not self._listed(char, sure=True) if self.negated else self._listed(char, sure=False)

    def _listed(self, char: str, sure: bool) -> bool:
        forms = self._forms(char, sure)
        if any(first <= form <= last for form in forms for first, last in self.ranges):
            return True
        if (
            self.any_case
            and not sure
            and any(
                first == last and not forms.isdisjoint(cases(first)) for first, last in self.ranges
            )
        ):
            return True
        return any(_in_class(char, name, sure) for name in self.named)

    def _forms(self, char: str, sure: bool) -> frozenset[str]:
        """``char`` as it may be written; where an engine must agree, ASCII letters alone have two cases."""
        if not self.any_case or (sure and not char.isascii()):
            return frozenset(char)
        return cases(char) if not sure else frozenset((char.lower(), char.upper()))


def one(char: str, any_case: bool = False) -> CharSet:
    """The set of one character."""
    return CharSet(((char, char),), any_case=any_case)


def cases(char: str) -> frozenset[str]:
    """``char`` and the single characters that differ from it in case alone (the long s and the Kelvin sign too)."""
    forms = {char, char.lower(), char.upper()}
    forms |= {form.lower() for form in forms} | {form.upper() for form in forms}
    forms |= {odd for letter, odd in _ODD_CASES if letter in forms}
    return frozenset(form for form in forms if len(form) == 1)


def is_ascii_word(char: str) -> bool:
    """Whether every engine takes ``char`` for part of a word."""
    return char in _ASCII_WORD


def _in_class(char: str, name: str, sure: bool) -> bool:
    """Whether ``char`` is in the class, surely or possibly. They differ outside ASCII alone."""
    if name == _UNKNOWN:
        return not sure
    if not char.isascii():
        return not sure and (name.isupper() or _in_unicode_class(char, name))
    held = {"d": "0" <= char <= "9", "s": char in _ASCII_SPACE, "w": char in _ASCII_WORD}
    return held[name.lower()] is name.islower()


def _in_unicode_class(char: str, name: str) -> bool:
    if name == "d":
        return char.isdecimal()
    return char.isspace() if name == "s" else char.isalnum()
