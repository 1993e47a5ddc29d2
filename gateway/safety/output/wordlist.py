"""Tens of thousands of plain words as a tree that grows only where a text goes.

The words are sorted; a node is the range of words that begin with what was read.
"""

from bisect import bisect_left
from collections.abc import Iterable

from gateway.safety.output.charsets import is_ascii_word
from gateway.safety.output.view import seen_as


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
