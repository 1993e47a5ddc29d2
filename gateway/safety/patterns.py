"""Regular expressions of rules: parsed into a tree, measured, and compiled by RE2.

Accepted is what RE2, Vectorscan and the automaton of answers read alike: literals, ``.``, classes, ``\\d \\w \\s``
and their opposites, ``\\p{..}``, ``\\x41``, ``\\b \\B ^ $ \\A \\z``, groups, alternation, the flags i, m and s, and
repeats, greedy and lazy, of up to `REPEAT_MAX`. Refused, with the position: back-references, look-around, atomic
groups, conditions and possessive repeats. So every match takes linear time.

The tree has two uses: `width_of` computes the longest possible match, which the output filter may have to hold back,
and `gateway.safety.output.automaton` builds from it the automaton that follows an answer character by character.
"""

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Final

import re2

REPEAT_MAX: Final = 1000
"""The highest bound of a repeat (the limit of RE2)."""
DEPTH_MAX: Final = 50
"""Groups inside each other."""

_ASCII_WORD: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")
_ASCII_SPACE: Final = frozenset(" \t\n\r\f\v")
_ODD_CASES: Final = (("s", "\u017f"), ("k", "\u212a"))
"""Characters outside ASCII that are another case of an ASCII letter."""
_UNKNOWN: Final = "p"
"""The name of a Unicode property, which every engine has in a version of its own."""
PATTERNS_KEPT: Final = 4096
"""What is known of so many patterns stays: all policies, for prompts and for answers, have the same default rules."""
_MEMORY_MAX: Final = 64 << 20
"""Bytes of automaton states of a pattern; beyond it RE2 continues without them, still linear."""


class PatternError(ValueError):
    """A pattern that cannot be used.

    ``position`` counts characters of the pattern from 0; None when the whole pattern is meant.
    """

    def __init__(self, reason: str, position: int | None = None) -> None:
        self.reason = reason
        self.position = position
        super().__init__(reason if position is None else f"position {position}: {reason}")


def compiled(
    pattern: str | bytes, *, any_case: bool = False, captures: bool = False
) -> "re2._Regexp[Any]":
    """``pattern`` ready to search text, or UTF-8 when it is bytes.

    Raises:
        PatternError: RE2 refuses it.
    """
    options = re2.Options()
    options.log_errors = False
    options.case_sensitive = not any_case
    options.never_capture = not captures
    options.max_mem = _MEMORY_MAX
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        said = error.args[0] if error.args else ""
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        raise PatternError(f"the engine refuses the pattern: {text}") from None


@dataclass(frozen=True, slots=True)
class CharSet:
    """The characters that may stand at one place of a match.

    Two engines may disagree about a character outside ASCII (RE2's ``\\w`` is ASCII, Python's is not). A set says what
    it *may* hold under any reading, so that nothing that an engine could match is missed.

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
        if self.any_case and not sure and self._holds_a_case_of(forms):
            return True
        return any(_in_class(char, name, sure) for name in self.named)

    def _forms(self, char: str, sure: bool) -> frozenset[str]:
        """``char`` as it may be written; where engines must agree, only ASCII letters have two cases."""
        if not self.any_case or (sure and not char.isascii()):
            return frozenset(char)
        return cases(char) if not sure else frozenset((char.lower(), char.upper()))

    def _holds_a_case_of(self, forms: frozenset[str]) -> bool:
        singles = (first for first, last in self.ranges if first == last)
        return any(not forms.isdisjoint(cases(single)) for single in singles)


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


class Assertion(Enum):
    """A condition between two characters."""

    BOUNDARY = "\\b"
    NO_BOUNDARY = "\\B"
    EDGE = "edge"
    """A start or an end of line or text; read as possible everywhere."""


@dataclass(frozen=True)
class Char:
    """One character of a set."""

    chars: CharSet


@dataclass(frozen=True)
class Zero:
    """A zero-width assertion."""

    assertion: Assertion


@dataclass(frozen=True)
class Concat:
    """A sequence of parts."""

    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Alternation:
    """One of several parts."""

    options: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    """``low`` to ``high`` times; without bound where ``high`` is None. ``at``: its position in the pattern."""

    part: "Node"
    low: int
    high: int | None
    lazy: bool
    at: int


Node = Char | Zero | Concat | Alternation | Repeat


@dataclass(frozen=True, slots=True)
class Width:
    """How many characters a match has, at least and at most."""

    least: int
    most: int


@lru_cache(PATTERNS_KEPT)
def width_of(pattern: str) -> Width:
    """The width of ``pattern``'s matches.

    Raises:
        PatternError: it is not accepted, has no upper bound or matches the empty text.
    """
    width = _width(parse(pattern))
    if width.least == 0:
        raise PatternError("the pattern matches the empty text", 0)
    return width


@lru_cache(PATTERNS_KEPT)
def parse(pattern: str) -> Node:
    """The tree of ``pattern``.

    Raises:
        PatternError: it is not accepted.
    """
    parser = _Parser(pattern)
    node = parser.alternation(set())
    if parser.at < len(pattern):
        raise parser.error("a closing parenthesis without its opening one")
    return node


def _width(node: Node) -> Width:
    match node:
        case Char():
            return Width(1, 1)
        case Zero():
            return Width(0, 0)
        case Concat():
            widths = [_width(part) for part in node.parts]
            return Width(sum(w.least for w in widths), sum(w.most for w in widths))
        case Alternation():
            widths = [_width(option) for option in node.options]
            return Width(min(w.least for w in widths), max(w.most for w in widths))
        case Repeat():
            if node.high is None:
                raise PatternError(
                    f"a repeat without an upper bound; write {{{node.low},n}}", node.at
                )
            width = _width(node.part)
            return Width(width.least * node.low, width.most * node.high)


_ANY: Final = CharSet(negated=True)
_NO_NEWLINE: Final = CharSet((("\n", "\n"),), negated=True)
_CONTROLS: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_ASSERTIONS: Final = {
    "b": Assertion.BOUNDARY,
    "B": Assertion.NO_BOUNDARY,
    "A": Assertion.EDGE,
    "z": Assertion.EDGE,
}
_SIGNS: Final[dict[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_COUNTS: Final = re.compile(r"\{([0-9]{1,4})(,?)([0-9]{0,4})\}")
_FLAGS: Final = re.compile(r"([ims]*)([:)])")
_GROUP_NAME: Final = re.compile(r"P?<[A-Za-z_]\w*>")
_CLASS_NAME: Final = re.compile(r"([dDsSwW])|[pP](?:\{[^{}]*\}|[A-Z])")
_HEXADECIMAL: Final = re.compile(r"\{([0-9A-Fa-f]{1,6})\}|([0-9A-Fa-f]{2})")


class _Parser:
    """Walks over one pattern once, from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._depth = 0
        self.at = 0

    def error(self, reason: str, at: int | None = None) -> PatternError:
        return PatternError(reason, self.at if at is None else at)

    def alternation(self, flags: set[str]) -> Node:
        options = [self._concat(flags)]
        while self._skip("|"):
            options.append(self._concat(flags))
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def _next_is(self, text: str) -> bool:
        return self._pattern.startswith(text, self.at)

    def _skip(self, text: str) -> bool:
        found = self._next_is(text)
        self.at += len(text) if found else 0
        return found

    def _skip_match(self, regex: re.Pattern[str]) -> re.Match[str] | None:
        found = regex.match(self._pattern, self.at)
        self.at = found.end() if found else self.at
        return found

    def _take(self) -> str:
        if self.at >= len(self._pattern):
            raise self.error("the pattern ends too early")
        self.at += 1
        return self._pattern[self.at - 1]

    def _concat(self, flags: set[str]) -> Node:
        parts: list[Node] = []
        while self.at < len(self._pattern) and self._pattern[self.at] not in "|)":
            node = self._atom(flags)
            if node is not None:
                parts.append(self._repeated(node))
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def _repeated(self, node: Node) -> Node:
        at = self.at
        bounds = self._bounds()
        if bounds is None:
            return node
        lazy = self._skip("?")
        if self._next_is("+"):
            raise self.error("possessive repeats are not linear-time syntax")
        if self.at < len(self._pattern) and self._pattern[self.at] in "*?{":
            raise self.error("a repeat of a repeat")
        return Repeat(node, *bounds, lazy, at)

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, known in _SIGNS.items():
            if self._skip(sign):
                return known
        if not self._next_is("{"):
            return None
        at, found = self.at, self._skip_match(_COUNTS)
        low, comma, high = found.groups() if found else ("1", "", "0")
        least = int(low)
        most = int(high) if high else None if comma else least
        if max(least, most or 0) > REPEAT_MAX or (most is not None and most < least):
            raise self.error(
                f"a repeat is {{n}} or {{n,m}} with n <= m <= {REPEAT_MAX}; a brace as itself is \\{{",
                at,
            )
        return least, most

    def _atom(self, flags: set[str]) -> Node | None:
        at, char = self.at, self._take()
        match char:
            case "(":
                return self._group(flags, at)
            case "[":
                return Char(self._class(flags, at))
            case "\\":
                return self._escape(flags, at)
            case "^" | "$":
                return Zero(Assertion.EDGE)
            case "." if "s" in flags:
                return Char(_ANY)
            case ".":
                return Char(_NO_NEWLINE)
            case "*" | "+" | "?" | "{":
                raise self.error("nothing to repeat", at)
        return _one(char, flags)

    def _group(self, flags: set[str], at: int) -> Node | None:
        inner = set(flags)
        if self._skip("?") and not self._opens(flags, inner, at):
            return None
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self.error(f"more than {DEPTH_MAX} groups inside each other", at)
        node = self.alternation(inner)
        if not self._skip(")"):
            raise self.error("a parenthesis is not closed", at)
        self._depth -= 1
        return node

    def _opens(self, flags: set[str], inner: set[str], at: int) -> bool:
        """Reads what is behind ``(?``; False when it sets flags for what follows and is no group."""
        if self._skip_match(_GROUP_NAME):
            return True
        found = self._skip_match(_FLAGS)
        if found is None:
            raise self.error(
                "look-around, back-references and this kind of group are not linear-time syntax", at
            )
        (inner if found[2] == ":" else flags).update(found[1])
        return found[2] == ":"

    def _escape(self, flags: set[str], at: int) -> Node:
        assertion = _ASSERTIONS.get(self._pattern[self.at : self.at + 1])
        if assertion is not None:
            self.at += 1
            return Zero(assertion)
        named = self._class_name()
        return Char(CharSet(named=named)) if named else _one(self._escaped(at), flags)

    def _class_name(self) -> frozenset[str]:
        """The class that ``\\d``, ``\\pL`` and the like name; empty where none is named."""
        found = self._skip_match(_CLASS_NAME)
        return frozenset((found[1] or _UNKNOWN) if found else "")

    def _escaped(self, at: int) -> str:
        """The character that an escape stands for."""
        char = self._take()
        if char == "x":
            found = self._skip_match(_HEXADECIMAL)
            code = int(found[1] or found[2], 16) if found else -1
            if not 0 <= code <= 0x10FFFF:
                raise self.error("\\x takes two hexadecimal digits or {digits} of a code point", at)
            return chr(code)
        if char.isdecimal() or char in "gk":
            raise self.error("a back-reference is not linear-time syntax", at)
        if char.isalnum() and char.isascii() and char not in _CONTROLS:
            raise self.error(f"the escape \\{char} is not accepted", at)
        return _CONTROLS.get(char, char)

    def _class(self, flags: set[str], at: int) -> CharSet:
        negated = self._skip("^")
        ranges: list[tuple[str, str]] = []
        named: set[str] = set()
        if self._next_is("]"):
            raise self.error("an empty class; a bracket as itself is \\]", at)
        while not self._skip("]"):
            if self.at >= len(self._pattern):
                raise self.error("a class is not closed", at)
            self._class_item(ranges, named)
        return CharSet(tuple(ranges), frozenset(named), negated, "i" in flags)

    def _class_item(self, ranges: list[tuple[str, str]], named: set[str]) -> None:
        at = self.at
        low = high = self._class_char(named)
        if low is not None and self._next_is("-") and not self._next_is("-]"):
            self.at += 1
            high = self._class_char(named)
        if low is not None and (high is None or high < low):
            raise self.error("a range that runs backwards", at)
        if low is not None and high is not None:
            ranges.append((low, high))

    def _class_char(self, named: set[str]) -> str | None:
        """One character of a class; None for a named class, which is added to ``named``."""
        at, char = self.at, self._take()
        if char == "[":
            raise self.error("a bracket inside a class is \\[", at)
        if char != "\\":
            return char
        known = self._class_name()
        named |= known
        return None if known else self._escaped(at)


def _one(char: str, flags: set[str]) -> Char:
    return Char(CharSet(((char, char),), any_case="i" in flags))
