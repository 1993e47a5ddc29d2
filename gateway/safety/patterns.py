"""Regular expressions of rules: compiled by RE2, and read into the positions that a streamed answer follows.

The syntax is RE2's, so every match takes linear time: no back-references, look-around or possessive
repeats, and repeats up to 1000. RE2 refuses invalid patterns; `Positions` parses what it has
accepted.

A pattern becomes Glushkov's automaton: one position for each of its characters, and the positions
that may follow each. Every path through the positions spells a text that the pattern may match.
Counted repeats are written out; where that would take too many positions the repeat has no upper
bound instead, so that more texts are followed than the pattern matches, never fewer. Lazy repeats
are read as greedy ones.
"""

import math
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple

import re2

DEPTH_MAX: Final = 50
"""Nesting depth of groups."""
REPEAT_POSITIONS_MAX: Final = 600
"""Positions that one counted repeat may take."""
PATTERN_POSITIONS_MAX: Final = 6000
"""Positions of one pattern."""
PATTERNS_CACHED: Final = 4096
"""Patterns that stay parsed: all policies, for prompts and for answers, have the same default rules.
"""
_MEMORY_MAX: Final = 64 << 20
"""Memory for automaton states of a pattern, in bytes; beyond it RE2 continues without them, still
linear.
"""


class PatternError(ValueError):
    """A pattern that cannot be used.

    Attributes:
        position: offset of the problem in the pattern, in characters; None if the whole pattern is
            meant.
    """

    def __init__(self, reason: str, position: int | None = None) -> None:
        self.position = position
        super().__init__(reason if position is None else f"position {position}: {reason}")


@lru_cache(PATTERNS_CACHED)
def compiled(pattern: str | bytes) -> "re2._Regexp[Any]":
    """Compile `pattern` to search text, or UTF-8 if it is bytes.

    Raises:
        PatternError: RE2 refuses it.
    """
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MEMORY_MAX
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0] if error.args else ""
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else reason
        raise PatternError(f"the engine refuses the pattern: {text}") from None


# Where a link between two characters, or an empty part, is possible: bits of these three.
AT_BOUNDARY: Final = 1
INSIDE: Final = 2
"""Where no word begins or ends."""
SURE: Final = 4
"""Possible whatever follows. An end of a line or of the text is possible everywhere, and sure nowhere.
"""
ANYWHERE: Final = AT_BOUNDARY | INSIDE | SURE
_ASSERTIONS: Final = {r"\b": AT_BOUNDARY, r"\B": INSIDE}

Links = tuple[int, int, int]
"""Bit sets of positions that can be reached at a word boundary, inside a word, and surely."""
NOWHERE: Final[Links] = (0, 0, 0)


class PatternPart(NamedTuple):
    """Facts about a part of a pattern.

    Attributes:
        empty: where it can match the empty text; 0: nowhere.
        first: positions that can begin it.
        last: positions that can end it.
        least: length of its shortest match.
        most: length of its longest match; infinite without a bound.
    """

    empty: int
    first: Links = NOWHERE
    last: Links = NOWHERE
    least: int = 0
    most: float = 0


def longest_match(pattern: str) -> int:
    """Return the length of the longest match of `pattern`, in characters.

    Raises:
        PatternError: it is not accepted, has no upper bound or matches the empty text.
    """
    positions = positions_of(pattern)
    if positions.unbounded is not None:
        raise PatternError(
            "a repeat without an upper bound; write {least,most}", positions.unbounded
        )
    return int(positions.whole.most)


@lru_cache(PATTERNS_CACHED)
def positions_of(pattern: str) -> "Positions":
    """Parse `pattern` into its positions; the result is cached and shared.

    Raises:
        PatternError: it is not accepted, is too large, or matches the empty text.
    """
    compiled(pattern.encode())
    positions = Positions(pattern)
    if positions.whole.least == 0:
        raise PatternError("the pattern matches the empty text", 0)
    return positions


_TOKEN: Final = re.compile(
    r"(?P<flags>\(\?[a-zA-Z-]+\))"
    r"|(?P<open>\((?:\?P?<\w+>|\?[a-zA-Z-]*:)?)"
    r"|(?P<close>\))"
    r"|(?P<bar>\|)"
    r"|(?P<repeat>(?P<times>[*+?]|\{\d+(?:,\d*)?\})\??)"
    r"|(?P<assertion>\\[bBAz]|[\^$])"
    r"|(?P<strange>\\[CQ])"
    r"|(?P<char>\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]])*\]"
    r"|\\(?:[pP](?:\{[^}]*\}|.)|x(?:\{[^}]*\}|..)|[0-7]{1,3}|.)|.)",
    re.DOTALL,
)
_SIGNS: Final[dict[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class Positions:
    """All positions of one pattern.

    The parser walks over the tokens of the pattern, over those of a counted repeat once for each
    time.

    Attributes:
        chars: character set of each position, as a pattern of one character.
        follow: positions that may follow each position, at a boundary and inside a word.
        whole: the pattern as one part.
        unbounded: offset of the first repeat without an upper bound; None if there is none.
    """

    def __init__(self, pattern: str) -> None:
        self._tokens = list(_TOKEN.finditer(pattern))
        self._at = 0
        self._depth = 0
        self._flags = ""
        self.chars: list[str] = []
        self.follow: tuple[list[int], list[int]] = ([], [])
        self.unbounded: int | None = None
        self.whole = self._alternation()

    def _alternation(self) -> PatternPart:
        """Parse up to the next closing parenthesis, or the end."""
        whole = self._sequence()
        while self._next_is("bar"):
            self._at += 1
            option = self._sequence()
            whole = PatternPart(
                whole.empty | option.empty,
                union(whole.first, option.first),
                union(whole.last, option.last),
                min(whole.least, option.least),
                max(whole.most, option.most),
            )
        return whole

    def _next_is(self, *kinds: str) -> bool:
        return self._at < len(self._tokens) and self._tokens[self._at].lastgroup in kinds

    def _sequence(self) -> PatternPart:
        whole = PatternPart(ANYWHERE)
        while self._at < len(self._tokens) and not self._next_is("bar", "close"):
            whole = self._joined(whole, self._repeated())
        return whole

    def _repeated(self) -> PatternPart:
        begin, size = self._at, len(self.chars)
        part = self._atom()
        if not self._next_is("repeat"):
            return part
        token, behind = self._tokens[self._at], self._at + 1
        low, high = _bounds(token["times"])
        if high is None and self.unbounded is None:
            self.unbounded = token.start()
        least, most = part.least * low, math.inf if high is None else part.most * high
        times_max = max(1, REPEAT_POSITIONS_MAX // max(1, len(self.chars) - size))
        if max(low, high or 0) > times_max:
            low, high = min(low, times_max), None
        copies = [part]
        while len(copies) < (low if high is None else high):
            self._at = begin
            copies.append(self._atom())
        self._at = behind
        whole = self._times(copies[:high], low, high is None)
        return whole._replace(least=least, most=most)

    def _times(self, copies: list[PatternPart], low: int, endless: bool) -> PatternPart:
        """Repeat a part at least `low` times: `(x(x(x)?)?)?` needs fewer links than `x?x?x?`."""
        whole = PatternPart(ANYWHERE)
        if endless:
            self._connect(copies[-1].last, copies[-1].first)
        for number in range(len(copies), 0, -1):
            whole = self._joined(copies[number - 1], whole)
            if number > low:
                whole = whole._replace(empty=ANYWHERE)
        return whole

    def _atom(self) -> PatternPart:
        token = self._tokens[self._at]
        self._at += 1
        match token.lastgroup:
            case "flags":
                self._set_flags(token[0])
                return PatternPart(ANYWHERE)
            case "open":
                return self._group(token)
            case "assertion":
                return PatternPart(_ASSERTIONS.get(token[0], AT_BOUNDARY | INSIDE))
            case "strange":
                raise PatternError(f"the escape {token[0]} is not supported", token.start())
        return self._char(token[0])

    def _group(self, token: re.Match[str]) -> PatternPart:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            reason = f"more than {DEPTH_MAX} nested groups"
            raise PatternError(reason, token.start())
        flags = self._flags
        if token[0].endswith(":"):
            self._set_flags(token[0])
        part = self._alternation()
        self._flags = flags
        self._depth -= 1
        self._at += 1
        return part

    def _set_flags(self, text: str) -> None:
        on, _, off = text.strip("(?:)").partition("-")
        self._flags = "".join(sorted({*self._flags, *on}.intersection("is").difference(off)))

    def _char(self, text: str) -> PatternPart:
        if len(self.chars) >= PATTERN_POSITIONS_MAX:
            raise PatternError(f"more than {PATTERN_POSITIONS_MAX} characters when written out")
        only = 1 << len(self.chars)
        self.chars.append(f"(?{self._flags}:{text})")
        for follow in self.follow:
            follow.append(0)
        return PatternPart(0, (only, only, only), (only, only, only), 1, 1)

    def _joined(self, left: PatternPart, right: PatternPart) -> PatternPart:
        self._connect(left.last, right.first)
        return PatternPart(
            left.empty & right.empty,
            union(left.first, _where(left.empty, right.first)),
            union(right.last, _where(right.empty, left.last)),
            left.least + right.least,
            left.most + right.most,
        )

    def _connect(self, last: Links, first: Links) -> None:
        for place, follow in enumerate(self.follow):
            for position in bits_of(last[place]):
                follow[position] |= first[place]


def _bounds(repeat: str) -> tuple[int, int | None]:
    if repeat in _SIGNS:
        return _SIGNS[repeat]
    low, comma, high = repeat.strip("{}").partition(",")
    if not comma:
        return int(low), int(low)
    return int(low), int(high) if high else None


def union(left: Links, right: Links) -> Links:
    """Return the union of both."""
    return left[0] | right[0], left[1] | right[1], left[2] | right[2]


def _where(when: int, links: Links) -> Links:
    """Return the `links` that are also possible under the condition `when`."""
    return (
        links[0] if when & AT_BOUNDARY else 0,
        links[1] if when & INSIDE else 0,
        links[2] if when & SURE else 0,
    )


def shifted(links: Links, by: int) -> Links:
    """Return `links` to positions that come `by` later."""
    return links[0] << by, links[1] << by, links[2] << by


def set_of(patterns: Iterable[str], *, whole: bool = True) -> re2.Set:
    """Compile a matcher that returns the indexes of the `patterns` that match a `whole` text, else any part of it.

    Raises:
        re2.error: a pattern is not valid, or all together are too large.
    """
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MEMORY_MAX
    matcher = re2.Set.FullMatchSet(options) if whole else re2.Set.SearchSet(options)
    for pattern in patterns:
        matcher.Add(pattern)
    matcher.Compile()
    return matcher


def bits_of(mask: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set, from the lowest on."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
