"""A head of the router, for prompts alone or with an answer: the learned parts, blended and calibrated."""

from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned.calibration import Calibration
from gateway.routing.learned.features import Vector
from gateway.routing.learned.forest import Forest
from gateway.routing.learned.grams import Vocabulary
from gateway.routing.learned.linear import Linear
from gateway.routing.learned.text import Text


@dataclass(frozen=True, slots=True)
class Score:
    """What the large model is worth for one prompt."""

    gain: float
    """P(large right) - P(small right), calibrated on held-out outcomes."""
    p_weak: float
    """P(small right)."""
    p_strong: float
    """P(large right)."""
    uncertainty: float
    """How far the trees are apart about the gain (one standard deviation), on the scale of the gain."""


class Blend(NamedTuple):
    """The share of each part; they add up to one."""

    regressions: float
    forest: float
    grams: float


@dataclass(frozen=True)
class Head:
    """The learned parts and how they are blended."""

    prior: Linear
    """How right other models were on other prompts, from the columns of a prompt."""
    linear: Linear
    vocabulary: Vocabulary
    gram_values: NDArray[np.float32]
    """[grams, 2]: what each gram adds to P(weak right) and P(strong right)."""
    gram_base: NDArray[np.float32]
    """[2]: the shares of right answers that grams add to."""
    forest: Forest
    blend: Blend
    calibration: Calibration

    def score(self, row: Vector, text: Text) -> Score:
        """The score of a prompt with the columns ``row``."""
        prior = self.prior.predict(row[: len(self.prior.mean)])
        trees = self.forest.predict(widen(row, prior))
        weak, strong = (
            self.blend.regressions * self.linear.predict(row)
            + self.blend.forest * (trees.sum(axis=0) / len(trees))
            + self.blend.grams * self.grams(text)
        ).tolist()
        gains = trees[:, 1] - trees[:, 0]
        mean = float(gains.sum()) / len(gains)
        spread = sqrt(max(0.0, float(gains @ gains) / len(gains) - mean * mean))
        return self._calibrated(weak, strong - weak, spread * self.blend.forest)

    def grams(self, text: Text) -> NDArray[np.float32]:
        """[2]: what the grams of ``text`` say."""
        indices, weights = self.vocabulary.look_up(text)
        said: NDArray[np.float32] = weights @ self.gram_values[indices] + self.gram_base
        return said

    def _calibrated(self, weak: float, gain: float, spread: float) -> Score:
        gain = self.calibration.gain(gain)
        weak = self.calibration.weak_right(weak)
        strong = min(1.0, max(0.0, weak + gain))
        return Score(gain, weak, strong, spread * self.calibration.gain_slope)


def widen(row: Vector, prior: NDArray[np.float32]) -> Vector:
    """The columns of the forest: those of the prompt, then what the prior says."""
    return np.concatenate((row, prior))
