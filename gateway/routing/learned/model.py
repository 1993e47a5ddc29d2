"""A learned router: plain arrays, scored with numpy in a fraction of a millisecond. `learning.train` makes them.

Load one with `artefact.load`. It never changes; a newer one replaces it as a whole.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned import answer, features
from gateway.routing.learned.calibration import Calibration

Vector = NDArray[np.float32]

HASHED: Final = 1 << 15
"""Buckets that words are hashed into."""
_STEPS: Final = 6
"""Of a walk through all trees before it is checked whether it has ended: the check costs as much as a step."""
CLIP: Final = 3.0
"""Standard deviations beyond which a column is clipped."""


class Example(NamedTuple):
    """A prompt, with or without an answer, as the parts of a head read it."""

    columns: Vector
    tokens: list[str]
    buckets: NDArray[np.int64]
    """Where its distinct words are hashed to, ascending."""


def prompt_example(prompt: str) -> Example:
    """Of a prompt before any model has answered."""
    text = features.parse(prompt)
    columns = np.array([*features.describe(text).values()], np.float32)
    buckets = np.array([*{crc32(word.encode()) % HASHED for word in text.distinct}], np.int64)
    buckets.sort()  # sums of floats depend on the order, and that of a set differs between processes
    return Example(columns, text.tokens, buckets)


def answer_example(prompt: str, weak_response: str) -> Example:
    """Of a prompt with the small model's answer."""
    example = prompt_example(prompt)
    of_answer = np.array([*answer.describe(prompt, weak_response).values()], np.float32)
    return example._replace(columns=np.concatenate((example.columns, of_answer)))


def damp(columns: Vector) -> Vector:
    """Shortens long tails of counts: sign(x) log(1 + |x|)."""
    damped: Vector = np.copysign(np.log1p(np.abs(columns)), columns)
    return damped


@dataclass(frozen=True)
class Linear:
    """Logistic regressions on the columns."""

    mean: Vector
    scale: Vector
    coefficients: Vector
    """[columns, 2]."""
    intercepts: Vector
    """[2]."""

    def predict(self, example: Example) -> Vector:
        """[2]: P(weak right), P(strong right)."""
        return _chance(self.scaled(example.columns) @ self.coefficients + self.intercepts)

    def scaled(self, columns: Vector) -> Vector:
        """Damped, standardized and clipped."""
        scaled: Vector = (damp(columns) - self.mean) / self.scale
        return np.minimum(np.maximum(scaled, -CLIP), CLIP)


@dataclass(frozen=True)
class Words:
    """Logistic regressions on hashed words, weighted by inverse document frequency."""

    rarity: Vector
    """[HASHED]: 0 for words that training did not see twice."""
    coefficients: Vector
    """[HASHED, 2]."""
    intercepts: Vector
    """[2]."""

    def predict(self, example: Example) -> Vector:
        """[2]: P(weak right), P(strong right)."""
        weights = self.rarity[example.buckets]
        norm = max(1e-6, float(np.sqrt(weights @ weights)))
        return _chance(weights @ self.coefficients[example.buckets] / norm + self.intercepts)


@dataclass(frozen=True)
class Trees:
    """Regression trees on the columns and the counts of frequent words, all walked at once.

    Node numbers are as wide as numpy's own, which saves a conversion in every step.
    """

    words: NDArray[np.uint8]
    """The frequent words, a line each, see `pack`."""
    roots: NDArray[np.intp]
    column: NDArray[np.intp]
    """Of each node: the column it compares."""
    threshold: Vector
    """Of each node: a value above it goes to the second child."""
    child: NDArray[np.intp]
    """[2 nodes]: the two children of each node side by side; a leaf is its own child."""
    value: Vector
    """[nodes, 2]: P(weak right), P(strong right) of a leaf."""

    def predict(self, example: Example) -> Vector:
        """[2]: the mean over the trees."""
        row = np.concatenate((example.columns, self.counts(example.tokens)))
        nodes = self.roots
        walking = True
        while walking:
            for _ in range(_STEPS):
                above = row.take(self.column.take(nodes)) > self.threshold.take(nodes)
                nodes = self.child.take(nodes + nodes + above)
            walking = bool((self.child.take(nodes + nodes) != nodes).any())
        mean: Vector = self.value.take(nodes, axis=0).mean(axis=0)
        return mean

    def counts(self, tokens: Iterable[str]) -> Vector:
        """How often each of the frequent words occurs."""
        counts = [0] * len(self._slots)
        find = self._slots.get
        for token in tokens:
            slot = find(token)
            if slot is not None:
                counts[slot] += 1
        return np.array(counts, np.float32)

    @cached_property
    def _slots(self) -> dict[str, int]:
        joined = self.words.tobytes().decode()
        return {word: at for at, word in enumerate(joined.split("\n"))} if joined else {}


Part = Linear | Words | Trees


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated gain of the large model for one prompt."""

    gain: float
    """P(large right) - P(small right), calibrated on held-out outcomes."""
    p_weak: float
    """P(small right)."""
    p_strong: float
    """P(large right)."""


@dataclass(frozen=True)
class Head:
    """The mean of its parts, calibrated."""

    parts: tuple[Part, ...]
    calibration: Calibration

    def score(self, example: Example) -> Estimate:
        """The calibrated estimate."""
        weak, strong = mean_of(self.parts, example).tolist()
        gain = self.calibration.gain(strong - weak)
        p_weak = self.calibration.weak_right(weak)
        return Estimate(gain, p_weak, min(1.0, max(0.0, p_weak + gain)))


class NoCascadeHead(ValueError):
    """The router has learned from prompts alone and cannot judge answers."""


@dataclass(frozen=True)
class LearnedRouter:
    """Heads for prompts, and for prompts with the small model's answer."""

    prompts: Head
    cascade: Head | None
    version: str = ""
    """Hash of the artefact it came from; empty for one just trained."""

    def score(self, prompt: str) -> Estimate:
        """The estimated gain of the large model for ``prompt``, before any model has answered."""
        return self.prompts.score(prompt_example(prompt))

    def score_with_answer(self, prompt: str, weak_response: str) -> Estimate:
        """The estimated gain of the large model once the small model has answered.

        Raises:
            NoCascadeHead: it was trained without answers.
        """
        if self.cascade is None:
            raise NoCascadeHead(
                "the router was trained without weak_response: it has no cascade head"
            )
        return self.cascade.score(answer_example(prompt, weak_response))


def mean_of(parts: tuple[Part, ...], example: Example) -> Vector:
    """[2]: the mean of what ``parts`` predict, P(weak right) and P(strong right)."""
    return sum((part.predict(example) for part in parts), np.zeros(2, np.float32)) / len(parts)


def pack(words: Iterable[str]) -> NDArray[np.uint8]:
    """Words as bytes; none holds a line break."""
    return np.frombuffer("\n".join(words).encode(), np.uint8)


def _chance(odds: Vector) -> Vector:
    chance: Vector = 1 / (1 + np.exp(-odds))
    return chance
