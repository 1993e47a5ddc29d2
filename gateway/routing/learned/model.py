"""A learned router: plain arrays, scored with numpy in a fraction of a millisecond. `learning.train` makes them.

Load one with `artefact.load`. It never changes; a newer one replaces it as a whole.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned import answer
from gateway.routing.learned.calibration import Calibration
from gateway.routing.learned.features import buckets

Vector = NDArray[np.float32]

CLIP: Final = 3.0
"""Standard deviations beyond which a column is clipped."""


def damp(columns: Vector) -> Vector:
    """Shortens long tails of counts: sign(x) log(1 + |x|)."""
    damped: Vector = np.copysign(np.log1p(np.abs(columns)), columns)
    return damped


@dataclass(frozen=True)
class Words:
    """Logistic regressions on hashed words, weighted by inverse document frequency."""

    rarity: Vector
    """[HASHED]: 0 for words that training did not see twice."""
    coefficients: Vector
    """[HASHED, 2]."""
    intercepts: Vector
    """[2]."""

    def predict(self, example: NDArray[Any]) -> Vector:
        """[2]: P(weak right), P(strong right) by the `features.buckets` of a prompt."""
        weights = self.rarity[example]
        norm = max(1e-6, float(np.sqrt(weights @ weights)))
        return _chance(weights @ self.coefficients[example] / norm + self.intercepts)


@dataclass(frozen=True)
class Columns:
    """Logistic regressions on columns of numbers."""

    mean: Vector
    scale: Vector
    coefficients: Vector
    """[columns, 2]."""
    intercepts: Vector
    """[2]."""

    def predict(self, example: NDArray[Any]) -> Vector:
        """[2]: P(weak right), P(strong right) by the `answer.columns` of an answer."""
        scaled = np.clip((damp(example) - self.mean) / self.scale, -CLIP, CLIP)
        return _chance(scaled @ self.coefficients + self.intercepts)


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
    """A pair of regressions and its calibration."""

    part: Words | Columns
    calibration: Calibration

    def score(self, example: NDArray[Any]) -> Estimate:
        """The calibrated estimate."""
        weak, strong = self.part.predict(example).tolist()
        gain = self.calibration.gain(strong - weak)
        p_weak = self.calibration.weak_right(weak)
        return Estimate(gain, p_weak, min(1.0, max(0.0, p_weak + gain)))


class NoCascadeHead(ValueError):
    """The router has learned from prompts alone and cannot judge answers."""


@dataclass(frozen=True)
class LearnedRouter:
    """A head for prompts, and one for the small model's answers."""

    prompts: Head
    cascade: Head | None
    version: str = ""
    """Hash of the artefact it came from; empty for one just trained."""

    def score(self, prompt: str) -> Estimate:
        """The estimated gain of the large model for ``prompt``, before any model has answered."""
        return self.prompts.score(buckets(prompt))

    def score_with_answer(self, prompt: str, weak_response: str) -> Estimate:
        """The estimated gain of the large model once the small model has answered.

        Raises:
            NoCascadeHead: it was trained without answers.
        """
        if self.cascade is None:
            raise NoCascadeHead(
                "the router was trained without weak_response: it has no cascade head"
            )
        return self.cascade.score(answer.columns(prompt, weak_response))


def _chance(odds: Vector) -> Vector:
    chance: Vector = 1 / (1 + np.exp(-odds))
    return chance
