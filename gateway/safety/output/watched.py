"""The search targets of a streamed answer: rules by their patterns, and plain words.

Word lists of tens of thousands of entries are sorted; a node of the word tree is the range of words that begin with
the characters read so far, and is built on first use.
"""

import sys
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gateway.safety.output.view import seen_as
from gateway.safety.patterns import is_ascii_word
from gateway.safety.rules.spec import LOOKAHEAD, LOOKBEHIND, RuleSpec

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
        heads: for each pattern its beginning that no finding holds, or nothing; at most ``context_before`` characters.
    """

    id: str
    patterns: tuple[str, ...]
    max_match_chars: int | None = None
    context_before: int = 0
    context_after: int = 0
    heads: tuple[str, ...] = ()


def watched_rules(specs: Iterable[RuleSpec]) -> tuple[WatchedRule, ...]:
    """``specs`` as the stream follows them."""
    return tuple(
        WatchedRule(
            spec.id,
            tuple(form.stream or form.pattern for form in spec.forms),
            max_match_chars=spec.max_length,
            context_before=spec.context_chars + LOOKBEHIND,
            context_after=LOOKAHEAD,
            heads=tuple(form.head for form in spec.forms),
        )
        for spec in specs
    )


def folded(char: str) -> str:
    """``char`` in lower case where that is one character; the final sigma is a sigma."""
    lower = char.lower()
    return "σ" if lower == "ς" else lower if len(lower) == 1 else char


class WordNode:
    """The words that begin with the same characters.

    Attributes:
        complete: the characters are a word.
    """

    __slots__ = ("_children", "_depth", "_high", "_low", "_words", "complete")

    def __init__(self, words: list[str], low: int, high: int, depth: int) -> None:
        self._words, self._low, self._high, self._depth = words, low, high, depth
        self._children: dict[str, WordNode | None] = {}
        self.complete = low < high and len(words[low]) == depth

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
    """Words in any case; one that is part of a longer word does not count.

    Attributes:
        longest: characters of the longest word.
    """

    def __init__(self, words: Iterable[str]) -> None:
        sorted_words = sorted({_plain(word) for word in words} - {""})
        self.longest = max(map(len, sorted_words), default=0)
        self.root = WordNode(sorted_words, 0, len(sorted_words), 0) if sorted_words else None

    def begin(self, char: str, before_is_word: bool) -> WordNode | None:
        """The words that can begin with ``char``."""
        if self.root is None or (before_is_word and is_ascii_word(char)):
            return None
        return self.root.child(char)


def _plain(word: str) -> str:
    return "".join(folded(plain) for char in word if (plain := seen_as(char)))
