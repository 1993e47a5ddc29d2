"""Beginnings and endings of a prompt's words as one weighted vector of length one: what it is about, and how it is put.

"cardiology", "cardiac" and "biology" share a beginning or an ending, so that a thousand outcomes say something about
words that none of them holds. Small words are left out: of them every prompt has many. What a gram is worth is learned.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned import lexicon
from gateway.routing.learned.text import Text

BEGINNING: Final = 5
"""Characters."""
ENDING: Final = 3
ROWS_MIN: Final = 2
"""Rows that must hold a gram for it to count."""
GRAMS_MAX: Final = 60_000
"""The most frequent ones are kept, so an artefact stays small."""
_SMALL_WORDS: Final = frozenset(lexicon.CLASSES["function"].split())

Indices = NDArray[np.int64]
Weights = NDArray[np.float32]


def grams(text: Text) -> set[str]:
    """The beginnings (cardi-) and endings (-ogy) of the words of ``text``."""
    words = text.distinct - _SMALL_WORDS
    return {f"{word[:BEGINNING]}-" for word in words} | {f"-{word[-ENDING:]}" for word in words}


@dataclass(frozen=True)
class Vocabulary:
    """Grams that are known, with the weight of each: rare ones count more."""

    index: Mapping[str, int]
    rarity: Weights
    """Inverse document frequency squared, one a gram."""

    def look_up(self, text: Text) -> tuple[Indices, Weights]:
        """The known grams of ``text`` and their weights, whose squares add up to one; both may be empty."""
        find = self.index.get
        known = [at for at in map(find, grams(text)) if at is not None]
        indices = np.array(known, np.int64)
        indices.sort()  # a set has no order that lasts, and sums of floats depend on it
        weights = self.rarity[indices]
        return indices, weights / max(1e-6, float(np.sqrt(weights @ weights)))


def learn(texts: Sequence[Text]) -> Vocabulary:
    """The vocabulary of ``texts``. Nothing about outcomes goes into it."""
    counted = Counter(gram for text in texts for gram in grams(text))
    # Ties are broken by the gram itself: a set has no order that lasts.
    kept = sorted(counted.items(), key=lambda item: (-item[1], item[0]))[:GRAMS_MAX]
    return _vocabulary([item for item in kept if item[1] >= ROWS_MIN], len(texts))


def pack(names: Iterable[str]) -> NDArray[np.uint8]:
    """Grams as bytes; none holds a line break."""
    return np.frombuffer("\n".join(names).encode(), np.uint8)


def unpack(packed: NDArray[np.uint8]) -> dict[str, int]:
    """The index that was packed."""
    joined = packed.tobytes().decode()
    return {gram: at for at, gram in enumerate(joined.split("\n"))} if joined else {}


def _vocabulary(kept: Sequence[tuple[str, int]], rows: int) -> Vocabulary:
    rarity = [(np.log((1 + rows) / (1 + count)) + 1) ** 2 for _, count in kept]
    return Vocabulary({gram: at for at, (gram, _) in enumerate(kept)}, np.array(rarity, np.float32))
