"""Predictions of learned routers, in a form that is kept after the request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

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
class HeadScore:
    """What one head predicted for one request."""

    by: HeadKey
    gain: float
    """P(strong right) - P(weak right)."""
    chances: Mapping[str, float]
    """P(right) of each of the two models."""


@dataclass(frozen=True)
class Prediction:
    """A score and what follows from it under the policy's target.

    Attributes:
        strong: whether the strong model should answer.
        reason: one sentence with the gain and the threshold, without any text of the request.
    """

    score: HeadScore
    strong: bool
    reason: str


class PromptPredictor(Protocol):
    """Predicts from a prompt alone."""

    def predict(self, prompt: str) -> Prediction:
        """For the caller's turns."""


class AnswerPredictor(Protocol):
    """Predicts from a prompt and the weak model's whole answer."""

    def predict(self, prompt: str, answer: str) -> Prediction:
        """For the caller's turns and the answer."""


def policy_key(name: str) -> str:
    """The configuration key of the policy ``name``; "" is the section itself."""
    return f"routing.policies.{name}" if name else "routing"
