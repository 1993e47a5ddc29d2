"""Which patterns are accepted, and how long their matches can get.

Accepted: literals, ``.``, classes, ``\\d \\w \\s`` and their opposites, ``\\p{..}``, ``\\b``, anchors, groups,
alternation, the flags i, m and s, and the repeats ``?``, ``{n}`` and ``{n,m}``. Refused, with the position:
back-references, look-around, atomic groups, conditions, possessive repeats and every repeat without an upper bound.
What is left is matched in linear time by both engines, and the length of a match is known before any text is seen:
the stream filter holds back that much.
"""

import string
from dataclasses import dataclass
from typing import Final

from gateway.safety.rules.spec import RuleError

REPEAT_MAX: Final = 1000
"""The highest bound of a repeat (the limit of RE2)."""

_CLASS_ESCAPES: Final = frozenset("dDwWsS")
_ZERO_WIDTH_ESCAPES: Final = frozenset("bBAz")
_CONTROL_ESCAPES: Final = frozenset("tnrfv")
_REFUSED_GROUPS: Final = {
    "?=": "look-ahead",
    "?!": "look-ahead",
    "?<=": "look-behind",
    "?<!": "look-behind",
    "?>": "an atomic group",
    "?(": "a condition",
    "?P=": "a back-reference",
    "?|": "a branch reset",
    "?#": "a comment",
    "?R": "recursion",
    "?&": "recursion",
}


@dataclass(frozen=True, slots=True)
class Width:
    """How many characters a match has, at least and at most."""

    least: int
    most: int


def width_of(rule: str, pattern: str) -> Width:
    """The width of ``pattern``'s matches. Raises `RuleError` for what is not accepted."""
    parser = _Parser(rule, pattern)
    width = parser.alternatives()
    if parser.at < len(pattern):
        raise parser.error("a closing parenthesis without its opening one")
    if width.least == 0:
        raise RuleError(rule, "the pattern matches the empty text", 0)
    return width


class _Parser:
    """Walks over one pattern once, from left to right."""

    def __init__(self, rule: str, pattern: str) -> None:
        self._rule = rule
        self._pattern = pattern
        self.at = 0

    def error(self, reason: str, at: int | None = None) -> RuleError:
        return RuleError(self._rule, reason, self.at if at is None else at)

    def _next_is(self, text: str) -> bool:
        return self._pattern.startswith(text, self.at)

    def _take(self) -> str:
        if self.at >= len(self._pattern):
            raise self.error("the pattern ends too early")
        self.at += 1
        return self._pattern[self.at - 1]

    def alternatives(self) -> Width:
        branches = [self._sequence()]
        while self._next_is("|"):
            self.at += 1
            branches.append(self._sequence())
        return Width(min(b.least for b in branches), max(b.most for b in branches))

    def _sequence(self) -> Width:
        least = most = 0
        while self.at < len(self._pattern) and self._pattern[self.at] not in "|)":
            piece = self._repeated()
            least, most = least + piece.least, most + piece.most
        return Width(least, most)

    def _repeated(self) -> Width:
        atom = self._atom()
        if self.at >= len(self._pattern) or self._pattern[self.at] not in "*+?{":
            return atom
        least, most = self._bounds()
        self._after_repeat()
        return Width(atom.least * least, atom.most * most)

    def _bounds(self) -> tuple[int, int]:
        at, sign = self.at, self._take()
        if sign == "?":
            return 0, 1
        if sign in "*+":
            raise self.error(f"'{sign}' has no upper bound; write {{{int(sign == '+')},n}}", at)
        inside, closed, _ = self._pattern[self.at :].partition("}")
        low, comma, high = inside.partition(",")
        if not closed or not low.isdecimal() or (high and not high.isdecimal()):
            raise self.error("a repeat is {n} or {n,m}; a brace as itself is \\{", at)
        if comma and not high:
            raise self.error(f"'{{{inside}}}' has no upper bound", at)
        least, most = int(low), int(high or low)
        if not least <= most <= REPEAT_MAX:
            raise self.error(f"a repeat runs from n to m, at most {REPEAT_MAX}", at)
        self.at += len(inside) + 1
        return least, most

    def _after_repeat(self) -> None:
        if self._next_is("?"):  # A lazy repeat: as linear as a greedy one.
            self.at += 1
        if self._next_is("+"):
            raise self.error("possessive repeats are not linear-time syntax")
        if self.at < len(self._pattern) and self._pattern[self.at] in "*?{":
            raise self.error("a repeat of a repeat")

    def _atom(self) -> Width:
        at, sign = self.at, self._take()
        if sign == "(":
            return self._group(at)
        if sign == "[":
            return self._class(at)
        if sign == "\\":
            return self._escape(at)
        if sign in "^$":
            return Width(0, 0)
        if sign in "*+?{":
            raise self.error("nothing to repeat", at)
        return Width(1, 1)

    def _group(self, at: int) -> Width:
        for start, name in _REFUSED_GROUPS.items():
            if self._next_is(start):
                raise self.error(f"{name} is not linear-time syntax", at)
        if self._next_is("?") and self._flags_alone(at):
            return Width(0, 0)
        width = self.alternatives()
        if not self._next_is(")"):
            raise self.error("a parenthesis is not closed", at)
        self.at += 1
        return width

    def _flags_alone(self, at: int) -> bool:
        """Reads ``?flags:`` or ``?flags)``; True for the latter, which is no group."""
        self.at += 1
        while (sign := self._take()) in "ims":
            pass
        if sign not in ":)":
            raise self.error("a group starts with ( or (?: or flags of i, m and s", at)
        return sign == ")"

    def _escape(self, at: int) -> Width:
        sign = self._take()
        if sign in _ZERO_WIDTH_ESCAPES:
            return Width(0, 0)
        if (sign.isdecimal() and sign != "0") or sign in "gk":
            raise self.error("a back-reference is not linear-time syntax", at)
        self._escaped_char(sign, at)
        return Width(1, 1)

    def _escaped_char(self, sign: str, at: int) -> None:
        if sign in "pP":
            self._braced(at) if self._next_is("{") else self._take()
        elif sign == "x":
            self._hexadecimal(at)
        elif not (sign in _CLASS_ESCAPES or sign in _CONTROL_ESCAPES or sign in string.punctuation):
            raise self.error(f"the escape \\{sign} is not accepted", at)

    def _braced(self, at: int) -> str:
        end = self._pattern.find("}", self.at)
        if end < 0:
            raise self.error("a brace is not closed", at)
        inside, self.at = self._pattern[self.at + 1 : end], end + 1
        return inside

    def _hexadecimal(self, at: int) -> None:
        digits = self._braced(at) if self._next_is("{") else self._take() + self._take()
        if not digits or set(digits) - set(string.hexdigits):
            raise self.error("\\x takes two hexadecimal digits or {digits}", at)

    def _class(self, at: int) -> Width:
        if self._next_is("^"):
            self.at += 1
        if self._next_is("]"):
            raise self.error("an empty class; a bracket as itself is \\]", at)
        while (sign := self._class_char(at)) != "]":
            if sign == "[":
                raise self.error("a bracket inside a class is \\[", self.at - 1)
            if sign == "\\":
                self._escaped_char(self._take(), self.at - 2)
        return Width(1, 1)

    def _class_char(self, at: int) -> str:
        if self.at >= len(self._pattern):
            raise self.error("a class is not closed", at)
        return self._take()
