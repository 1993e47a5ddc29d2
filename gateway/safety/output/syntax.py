"""Reads regular expressions of RE2's syntax into a tree. What an automaton cannot follow is refused.

Known: literals, escapes, classes (Perl, POSIX, Unicode properties), groups with flags i m s, alternatives, repeats
greedy and lazy, ``\\b \\B ^ $ \\A \\z``. Refused: look-around, back-references, and what is not a pattern at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NoReturn

from gateway.safety.output.charsets import CharSet, one


class PatternError(ValueError):
    """The pattern cannot be used; the message says where and why."""


class Place(Enum):
    """What must be true between two characters."""

    BOUNDARY = "\\b"
    NO_BOUNDARY = "\\B"
    EDGE = "edge"
    """A start or an end of line or text; read as possible everywhere."""


@dataclass(frozen=True)
class Char:
    """One character of a set."""

    chars: CharSet


@dataclass(frozen=True)
class At:
    """No character, but a place."""

    place: Place


@dataclass(frozen=True)
class Sequence_:
    """One after the other."""

    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Choice:
    """One of several."""

    options: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    """``low`` to ``high`` times; without bound where ``high`` is None."""

    part: "Node"
    low: int
    high: int | None
    lazy: bool


Node = Char | At | Sequence_ | Choice | Repeat

_ANY: Final = CharSet(negated=True)
_NO_NEWLINE: Final = CharSet((("\n", "\n"),), negated=True)
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_PLACES: Final = {
    "b": Place.BOUNDARY,
    "B": Place.NO_BOUNDARY,
    "A": Place.EDGE,
    "z": Place.EDGE,
    "Z": Place.EDGE,
}
_POSIX: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "alpha": (("a", "z"), ("A", "Z")),
    "digit": (("0", "9"),),
    "alnum": (("a", "z"), ("A", "Z"), ("0", "9")),
    "upper": (("A", "Z"),),
    "lower": (("a", "z"),),
    "space": (("\t", "\r"), (" ", " ")),
    "blank": (("\t", "\t"), (" ", " ")),
    "punct": (("!", "/"), (":", "@"), ("[", "`"), ("{", "~")),
    "xdigit": (("0", "9"), ("a", "f"), ("A", "F")),
    "word": (("a", "z"), ("A", "Z"), ("0", "9"), ("_", "_")),
    "print": ((" ", "~"),),
    "graph": (("!", "~"),),
    "cntrl": (("\0", "\x1f"), ("\x7f", "\x7f")),
    "ascii": (("\0", "\x7f"),),
}
_REPEATS_MAX: Final = 100_000


def parse(pattern: str) -> Node:
    """The tree of ``pattern``.

    Raises:
        PatternError: it is no pattern, or one that cannot be followed character by character.
    """
    reader = _Reader(pattern)
    node = reader.choice(_Flags())
    if reader.rest:
        reader.refuse("unmatched )")
    return node


@dataclass
class _Flags:
    any_case: bool = False
    dot_all: bool = False

    def copy(self) -> "_Flags":
        return _Flags(self.any_case, self.dot_all)


@dataclass
class _Reader:
    pattern: str
    at: int = 0
    depth: int = field(default=0)

    @property
    def rest(self) -> bool:
        return self.at < len(self.pattern)

    def refuse(self, why: str) -> NoReturn:
        raise PatternError(f"at character {max(self.at, 1)}: {why}")

    def take(self, text: str) -> bool:
        if not self.pattern.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def next(self) -> str:
        if not self.rest:
            self.refuse("the pattern ends too early")
        self.at += 1
        return self.pattern[self.at - 1]

    def until(self, end: str) -> str:
        stop = self.pattern.find(end, self.at)
        if stop < 0:
            self.refuse(f"{end} is missing")
        text, self.at = self.pattern[self.at : stop], stop + len(end)
        return text

    def choice(self, flags: _Flags) -> Node:
        self.depth += 1
        if self.depth > 50:
            self.refuse("more than 50 groups inside each other")
        options = [self.sequence(flags)]
        while self.take("|"):
            options.append(self.sequence(flags))
        self.depth -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def sequence(self, flags: _Flags) -> Node:
        parts: list[Node] = []
        while self.rest and self.pattern[self.at] not in "|)":
            node = self.atom(flags)
            if node is not None:
                parts.append(self.repeated(node))
        return parts[0] if len(parts) == 1 else Sequence_(tuple(parts))

    def repeated(self, node: Node) -> Node:
        while (bounds := self.bounds()) is not None:
            low, high = bounds
            if self.take("+"):
                self.refuse("possessive repeats are not known")
            node = Repeat(node, low, high, lazy=self.take("?"))
        return node

    def bounds(self) -> tuple[int, int | None] | None:
        for sign, known in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(sign):
                return known
        return self.counted() if self.pattern.startswith("{", self.at) else None

    def counted(self) -> tuple[int, int | None] | None:
        """The bounds of ``{2,5}``; a brace that opens nothing of the kind is a plain character."""
        stop = self.pattern.find("}", self.at)
        low, comma, high = self.pattern[self.at + 1 : max(stop, self.at + 1)].partition(",")
        if not low.isdecimal() or (high and not high.isdecimal()):
            return None
        self.at = stop + 1
        least = int(low)
        most = least if not comma else int(high) if high else None
        if max(least, most or 0) > _REPEATS_MAX or (most is not None and most < least):
            self.refuse("a repeat with bounds that cannot be")
        return least, most

    def atom(self, flags: _Flags) -> Node | None:
        char = self.next()
        if char == "(":
            return self.group(flags)
        if char == "[":
            return Char(self.bracket(flags))
        if char == "\\":
            return self.escape(flags)
        if char == ".":
            return Char(_ANY if flags.dot_all else _NO_NEWLINE)
        if char in "^$":
            return At(Place.EDGE)
        if char in "*+?":
            self.refuse(f"{char} repeats nothing")
        return Char(one(char, flags.any_case))

    def group(self, flags: _Flags) -> Node | None:
        inner = flags.copy()
        if self.take("?"):
            if self.take("P<") or (
                self.take("<") and self.pattern[self.at : self.at + 1] not in "=!"
            ):
                self.until(">")
            elif not self.flagged(flags, inner):
                return None
        node = self.choice(inner)
        if not self.take(")"):
            self.refuse(") is missing")
        return node

    def flagged(self, flags: _Flags, inner: _Flags) -> bool:
        """Reads the flags of a group; False when they were set for what follows and there is no group."""
        on = True
        while (char := self.next()) not in ":)":
            if char == "-" and on:
                on = False
            elif char in "ims":
                self.set_flag(inner, char, on)
            else:
                self.refuse(
                    "look-around, back-references and this kind of group cannot be followed"
                )
        if char == ")":
            flags.any_case, flags.dot_all = inner.any_case, inner.dot_all
        return char == ":"

    def set_flag(self, flags: _Flags, char: str, on: bool) -> None:
        if char == "i":
            flags.any_case = on
        elif char == "s":
            flags.dot_all = on

    def escape(self, flags: _Flags) -> Node:
        char = self.pattern[self.at : self.at + 1]
        if char in _PLACES and char:
            self.at += 1
            return At(_PLACES[char])
        if char == "Q":
            self.at += 1
            text = self.until("\\E")
            return Sequence_(tuple(Char(one(c, flags.any_case)) for c in text))
        named = self.class_name()
        if named is not None:
            return Char(named)
        return Char(one(self.escaped_char(), flags.any_case))

    def class_name(self) -> CharSet | None:
        """The class that ``\\d``, ``\\pL`` and the like stand for."""
        char = self.pattern[self.at : self.at + 1]
        if char and char in "dDsSwW":
            self.at += 1
            return CharSet(named=frozenset(char))
        if char and char in "pP":
            self.at += 1
            if self.next() == "{":
                self.until("}")
            return CharSet(named=frozenset("p"))
        return None

    def escaped_char(self) -> str:
        char = self.next()
        if char == "x":
            return self.code_point(self.until("}") if self.take("{") else self.next() + self.next())
        if char == "u":
            return self.code_point("".join(self.next() for _ in range(4)))
        if char in _ESCAPED:
            return _ESCAPED[char]
        if char == "0":
            return "\0"
        if char.isalnum() and char.isascii():
            self.refuse(f"\\{char} is not known")
        return char

    def code_point(self, digits: str) -> str:
        try:
            return chr(int(digits, 16))
        except (ValueError, OverflowError):
            self.refuse(f"{digits!r} is no code point")

    def bracket(self, flags: _Flags) -> CharSet:
        negated = self.take("^")
        ranges: list[tuple[str, str]] = []
        named: set[str] = set()
        first = True
        while first or not self.take("]"):
            self.bracket_item(ranges, named)
            first = False
        return CharSet(tuple(ranges), frozenset(named), negated, flags.any_case)

    def bracket_item(self, ranges: list[tuple[str, str]], named: set[str]) -> None:
        if self.take("[:"):
            self.posix(self.until(":]"), ranges, named)
            return
        low = self.bracket_char(named)
        if low is None:
            return
        if self.pattern.startswith("-", self.at) and not self.pattern.startswith("-]", self.at):
            self.at += 1
            high = self.bracket_char(set())
            if high is None or high < low:
                self.refuse("a range that cannot be")
            ranges.append((low, high))
        else:
            ranges.append((low, low))

    def bracket_char(self, named: set[str]) -> str | None:
        if not self.take("\\"):
            return self.next()
        known = self.class_name()
        if known is None:
            return "\b" if self.take("b") else self.escaped_char()
        named |= known.named
        return None

    def posix(self, name: str, ranges: list[tuple[str, str]], named: set[str]) -> None:
        if name.startswith("^"):
            named.add("p")
        elif name in _POSIX:
            ranges.extend(_POSIX[name])
        else:
            self.refuse(f"no class [:{name}:]")


def ends_lazily(parts: Sequence[Node]) -> int | None:
    """Index of the lazy repeat after which a sequence ends as soon as it can, or None."""
    lazy = [
        i
        for i, part in enumerate(parts)
        if isinstance(part, Repeat) and part.lazy and part.high != 1
    ]
    return lazy[-1] if lazy else None
