"""A learned router: plain arrays, scored with numpy in a fraction of a millisecond.

`learning.train` makes one, `artefact.load` reads it. It never changes; a newer one replaces it as a
whole. A policy uses it as `LearnedHead`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned.answer import columns
from gateway.routing.learned.features import buckets
from sluice.v1.admin_pb2 import RouterHead, RouterScore

Vector = NDArray[np.float32]
Array = NDArray[Any]

CLIP: Final = 3.0
"""Standard deviations beyond which a column is clipped."""


def damp(counts: Vector) -> Vector:
    """Shorten long tails of counts: sign(x) log(1 + |x|)."""
    damped: Vector = np.copysign(np.log1p(np.abs(counts)), counts)
    return damped


@dataclass(frozen=True)
class Words:
    """Logistic regressions on hashed words, weighted by inverse document frequency."""

    rarity: Vector
    """[HASHED]: inverse document frequency; 0 for words that training saw only once."""
    coefficients: Vector
    """[HASHED, 2]."""
    intercepts: Vector
    """[2]."""

    def predict(self, example: NDArray[Any]) -> Vector:
        """Return [2]: P(weak right) and P(strong right) for the `features.buckets` of a prompt."""
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
        """Return [2]: P(weak right) and P(strong right) for the `answer.columns` of an answer."""
        scaled = np.clip((damp(example) - self.mean) / self.scale, -CLIP, CLIP)
        return _chance(scaled @ self.coefficients + self.intercepts)


@dataclass(frozen=True)
class Threshold:
    """A threshold and what it did on held-out outcomes: the large model answers for gains of at least `value`."""

    value: float
    large_share: float
    quality: float
    """Mean outcome."""


@dataclass(frozen=True)
class Calibration:
    """Lines from raw to calibrated predictions, and the held-out rows behind them.

    Each row was predicted by a model that had not seen it. They map a target to a threshold.
    """

    lines: NDArray[np.float64]
    """[2, 2]: slope and intercept of the gain, then of P(weak right)."""
    gains: NDArray[np.float32]
    """Calibrated gain of each held-out row."""
    weak: NDArray[np.float32]
    strong: NDArray[np.float32]

    def estimate(self, weak: float, strong: float) -> "Estimate":
        """Calibrate predictions of P(weak right) and P(strong right)."""
        (slope, intercept), (weak_slope, weak_intercept) = self.lines.tolist()
        gain = min(1.0, max(-1.0, slope * (strong - weak) + intercept))
        p_weak = min(1.0, max(0.0, weak_slope * weak + weak_intercept))
        return Estimate(gain, p_weak, min(1.0, max(0.0, p_weak + gain)))

    def for_quality(self, share: float) -> Threshold:
        """Return the threshold with the least use of the large model that kept `share` (0 to 1) of its quality.

        There always is one: the large model everywhere keeps all of it.
        """
        least = share * self.thresholds[-1].quality - 1e-9
        return next(threshold for threshold in self.thresholds if threshold.quality >= least)

    def for_large_share(self, share: float) -> Threshold:
        """Return the threshold that sends at most `share` (0 to 1) of the prompts to the large model."""
        return [
            threshold for threshold in self.thresholds if threshold.large_share <= share + 1e-9
        ][-1]

    @cached_property
    def thresholds(self) -> list[Threshold]:
        """All thresholds that divide the held-out rows; equal gains go together."""
        ordered, mean = np.sort(self.gains)[::-1], quality(self.gains, self.weak, self.strong)
        # Beyond what any gain can be.
        bounds = np.concatenate(([4.0], ordered, [-4.0]))
        return [
            Threshold(float(bounds[at : at + 2].mean()), at / len(ordered), float(mean[at]))
            for at in cuts(ordered).tolist()
        ]


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

    def score(self, prompt: str, answer: str = "") -> Estimate:
        """Estimate the gain for `prompt`; a head for answers also reads the small model's `answer`."""
        words = isinstance(self.part, Words)
        example = buckets(prompt) if words else columns(prompt, answer)
        return self.calibration.estimate(*self.part.predict(example).tolist())


@dataclass(frozen=True)
class LearnedRouter:
    """A head for prompts, and one for the small model's answers."""

    prompts: Head
    cascade: Head | None
    version: str = ""
    """Hash of the artefact it came from; empty for one just trained."""


def _chance(odds: Vector) -> Vector:
    chance: Vector = 1 / (1 + np.exp(-odds))
    return chance


def cuts(descending: Array) -> Array:
    """Return the numbers of rows that a threshold can send, from none to all; equal scores go together."""
    between = np.flatnonzero(np.diff(descending)) + 1
    return np.concatenate(([0], between, [len(descending)]))


def quality(scores: Array, weak: Array, strong: Array) -> Array:
    """Return the mean outcome [rows + 1] with the 0, 1, ... highest scores on the large model.

    Rows with equal scores count as in random order.
    """
    order = np.argsort(-scores, kind="stable")
    gains = np.concatenate(([0.0], np.cumsum((strong - weak)[order], dtype=np.float64)))
    reachable = cuts(scores[order])
    sent = np.arange(len(scores) + 1)
    mean: Array = (weak.sum(dtype=np.float64) + np.interp(sent, reachable, gains[reachable])) / len(
        scores
    )
    return mean


class HeadKey(NamedTuple):
    """Identifies a head of a learned router as a policy uses it; a new artefact has new keys."""

    policy: str
    """Key of the policy in the configuration, see `policy_key`."""
    version: str
    """First 12 digits of the artefact's hash."""
    head: RouterHead.ValueType


class HeadPrediction(NamedTuple):
    """Prediction of one head for one request, under the target of the policy.

    Attributes:
        score: the prediction, as records show it.
        strong: whether the strong model should answer.
        reason: one sentence with gain and threshold, without text of the request.
    """

    score: RouterScore
    strong: bool
    reason: str


@dataclass(frozen=True, eq=False)
class LearnedHead:
    """A head of an artefact, which chooses between two models.

    Attributes:
        models: the weak one and the strong one.
        score: estimates by the prompt and, in a cascade, the weak model's whole answer.
        threshold: least gain at which the strong model answers.
        gains: predicted gains of the rows held out of training.
    """

    by: HeadKey
    models: tuple[str, str]
    score: Callable[[str, str], Estimate]
    threshold: float
    gains: NDArray[np.float32]

    def predict(self, prompt: str, answer: str = "") -> HeadPrediction:
        """Predict for one request from the text of the caller's turns."""
        estimate = self.score(prompt, answer)
        strong = estimate.gain >= self.threshold
        relation = "at least" if strong else "below"
        reason = f"predicted gain {estimate.gain:.2f} is {relation} {self.threshold:.2f}"
        chances = dict(zip(self.models, (estimate.p_weak, estimate.p_strong), strict=True))
        score = RouterScore(**self.by._asdict(), gain=estimate.gain, chances=chances)
        return HeadPrediction(score, strong, reason)


def policy_key(name: str) -> str:
    """Return the configuration key of the policy `name`; "" is the section itself."""
    return f"routing.policies.{name}" if name else "routing"
