"""Predictions of learned routers, and what makes them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.routing.learned.model import Estimate
from sluice.v1.admin_pb2 import RouterHead, RouterScore


class HeadKey(NamedTuple):
    """Identifies a head of a learned router as a policy uses it; a new artefact has new keys."""

    policy: str
    """The policy's key in the configuration, see `policy_key`."""
    version: str
    """Of the artefact, its first 12 digits."""
    head: RouterHead.ValueType


class HeadPrediction(NamedTuple):
    """What follows from what one head predicted for one request, under the policy's target.

    Attributes:
        score: what it predicted, as records have it.
        strong: whether the strong model should answer.
        reason: one sentence with the gain and the threshold, without any text of the request.
    """

    score: RouterScore
    strong: bool
    reason: str


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

    def predict(self, prompt: str, answer: str = "") -> HeadPrediction:
        """The prediction for one request, by the caller's turns."""
        found = self.score(prompt, answer)
        strong = found.gain >= self.threshold
        word = "at least" if strong else "below"
        reason = f"predicted gain {found.gain:.2f} is {word} {self.threshold:.2f}"
        chances = dict(zip(self.models, (found.p_weak, found.p_strong), strict=True))
        score = RouterScore(**self.by._asdict(), gain=found.gain, chances=chances)
        return HeadPrediction(score, strong, reason)


def policy_key(name: str) -> str:
    """The configuration key of the policy ``name``; "" is the section itself."""
    return f"routing.policies.{name}" if name else "routing"
