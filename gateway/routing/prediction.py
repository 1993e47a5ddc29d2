"""Heads of learned routers as policies use them, and their predictions."""

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
