"""Predictions of learned routers, in a form that is kept after the request, and what makes them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned.model import Estimate

PROMPT: Final = "prompt"
CASCADE: Final = "cascade"


class HeadKey(NamedTuple):
    """Identifies a head of a learned router as a policy uses it; a new artefact has new keys."""

    policy: str
    """The policy's key in the configuration, see `policy_key`."""
    version: str
    """Of the artefact, its first 12 digits."""
    head: str
    """`PROMPT` or `CASCADE`."""


@dataclass(frozen=True)
class Prediction:
    """What one head predicted for one request, and what follows from it under the policy's target.

    Attributes:
        gain: P(strong right) - P(weak right).
        chances: P(right) of each of the two models.
        strong: whether the strong model should answer.
        reason: one sentence with the gain and the threshold, without any text of the request.
    """

    by: HeadKey
    gain: float
    chances: Mapping[str, float]
    strong: bool = False
    reason: str = ""


@dataclass(frozen=True, eq=False)
class LearnedHead:
    """A head of an artefact, which chooses between two models.

    Attributes:
        models: the weak one and the strong one.
        score: by the prompt and, in a cascade, the weak model's whole answer.
        threshold: the gain from which on the strong model answers.
        gains: what it predicted for the rows held out of its training.
    """

    by: HeadKey
    models: tuple[str, str]
    score: Callable[[str, str], Estimate]
    threshold: float
    gains: NDArray[np.float32]

    def predict(self, prompt: str, answer: str = "") -> Prediction:
        """The prediction for one request, by the caller's turns."""
        found = self.score(prompt, answer)
        strong = found.gain >= self.threshold
        word = "at least" if strong else "below"
        reason = f"predicted gain {found.gain:.2f} is {word} {self.threshold:.2f}"
        chances = dict(zip(self.models, (found.p_weak, found.p_strong), strict=True))
        return Prediction(self.by, found.gain, chances, strong, reason)


def policy_key(name: str) -> str:
    """The configuration key of the policy ``name``; "" is the section itself."""
    return f"routing.policies.{name}" if name else "routing"
