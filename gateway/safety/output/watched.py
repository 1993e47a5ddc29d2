"""What the stream of an answer is searched for: rules by their patterns, and plain words.

Tens of thousands of words are a sorted list; a node of the word tree is the range of words that begin with the
characters read so far, made when a text gets there.
"""

import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from gateway.safety.output.charsets import is_ascii_word
from gateway.safety.output.view import seen_as

UNBOUNDED: Final = sys.maxsize


@dataclass(frozen=True)
class WatchedRule:
    """A rule as the filter must know it.

    Attributes:
        id: its name.
        patterns: regular expressions in RE2's syntax; together they match all that the rule can find, and more is no
            harm.
        max_match_chars: no match is longer; None where there is no bound.
        context_before: characters before a match that decide about it.
        context_after: characters behind it that decide about it.
        grows: a finding may end behind the match of the pattern, at most ``max_match_chars`` behind its start.
        heads: for each pattern its beginning that no finding holds, or nothing; at most ``context_before`` characters.
    """

    id: str
    patterns: tuple[str, ...]
    max_match_chars: int | None = None
    context_before: int = 0
    context_after: int = 0
    grows: bool = False
    heads: tuple[str, ...] = ()

    @property
    def growth(self) -> int:
        """Characters behind a match that a finding may hold."""
        return (self.max_match_chars or UNBOUNDED) if self.grows else 0


def folded(char: str) -> str:
    """``char`` in lower case where that is one character; the final sigma is a sigma."""
    lower = char.lower()
    return "σ" if lower == "ς" else lower if len(lower) == 1 else char


class WordNode:
    """The words that begin with the same characters.

    Attributes:
        complete: the characters are a word.
        grows: longer words begin with them.
    """

    __slots__ = ("_children", "_depth", "_high", "_low", "_words", "complete", "grows")

    def __init__(self, words: list[str], low: int, high: int, depth: int) -> None:
        self._words, self._low, self._high, self._depth = words, low, high, depth
        self._children: dict[str, WordNode | None] = {}
        self.complete = low < high and len(words[low]) == depth
        self.grows = high - low > self.complete

    def child(self, char: str) -> "WordNode | None":
        """The words that go on with ``char``; None when there are none."""
        char = folded(char)
        if char not in self._children:
            self._children[char] = self._find(char)
        return self._children[char]

    def _find(self, char: str) -> "WordNode | None":
        read = self._words[self._low][: self._depth] + char
        low = bisect_left(self._words, read, self._low, self._high)
        if low == self._high or not self._words[low].startswith(read):
            return None
        high = bisect_left(self._words, read + "\U0010ffff", low, self._high)
        return WordNode(self._words, low, high, self._depth + 1)


class WordList:
    """Words in any case.

    Attributes:
        longest: characters of the longest word.
    """

    def __init__(self, words: Iterable[str], whole: bool = True) -> None:
        """``whole``: a word that is part of a longer one does not count."""
        self._whole = whole
        sorted_words = sorted({_plain(word) for word in words} - {""})
        self.longest = max(map(len, sorted_words), default=0)
        self.root = WordNode(sorted_words, 0, len(sorted_words), 0) if sorted_words else None

    def begin(self, char: str, before_is_word: bool) -> WordNode | None:
        """The words that can begin with ``char``."""
        if self.root is None or (self._whole and before_is_word and is_ascii_word(char)):
            return None
        return self.root.child(char)


def _plain(word: str) -> str:
    return "".join(folded(plain) for char in word if (plain := seen_as(char)))


GROWN: Final[Mapping[str, tuple[str, ...]]] = {
    "secret.jwt": (r"\beyJ[A-Za-z0-9_-]{8}[A-Za-z0-9_.-]*",),
    "secret.private_key": (
        r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:-?[A-Za-z0-9+/=\s\\:,.])*-?(?:-----END [A-Z0-9 ]{1,48}-----)?",
    ),
}
"""Rules whose validators read on behind the pattern: here the pattern goes as far as they do."""


class FormLike(Protocol):
    """One pattern of a rule."""

    @property
    def pattern(self) -> str:
        """In RE2's syntax."""

    @property
    def head(self) -> str:
        """The beginning of the pattern that no finding holds, or nothing."""


class SpecLike(Protocol):
    """A rule of the inspection."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def forms(self) -> Sequence[FormLike]:
        """Its patterns; a finding lies inside a match of one of them, unless the rule is in `GROWN`."""

    @property
    def max_length(self) -> int:
        """No finding is longer, in characters."""

    @property
    def context_chars(self) -> int:
        """How far before a match it looks for words."""


def watched_rules(
    specs: Iterable[SpecLike],
    look_behind: int,
    look_ahead: int,
    grown: Mapping[str, tuple[str, ...]] = GROWN,
) -> tuple[WatchedRule, ...]:
    """``specs`` as the stream follows them.

    Args:
        specs: the rules.
        look_behind: characters before a match that a validator may look at, context words aside.
        look_ahead: characters behind it.
        grown: patterns that go further than those of the rule, by its name; without heads.
    """
    return tuple(
        WatchedRule(
            spec.id,
            grown.get(spec.id) or tuple(form.pattern for form in spec.forms),
            max_match_chars=spec.max_length,
            context_before=spec.context_chars + look_behind,
            context_after=look_ahead,
            heads=() if spec.id in grown else tuple(form.head for form in spec.forms),
        )
        for spec in specs
    )
