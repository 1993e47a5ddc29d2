"""The result of routing: candidates in order with the reasons, and how the answer may escalate."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.routing.prediction import CASCADE as CASCADE
from gateway.routing.prediction import LearnedHead, Prediction
from sluice.settings.routing import CascadeRoute, Trial

PINNED: Final = "pinned"
RULES: Final = "rules"
SAFETY: Final = "safety"
LEARNED: Final = "learned"
CANARY: Final = "canary"
BUDGET: Final = "budget"
LOAD: Final = "load"


@dataclass
class Candidate:
    """A model that could answer.

    Attributes:
        quality: predicted chance that its answer is right; None: not predicted.
        cost: expected, in the currency of the prices.
        wait_s: expected wait for a worker.
        reason: for its place in the order.
    """

    model: str
    tier: str
    reason: str
    quality: float | None = None
    cost: float = 0.0
    wait_s: float = 0.0


@dataclass(frozen=True)
class Learning:
    """What may be learned from the answer.

    Attributes:
        policy: which one of the configuration's routing policies routed; "" is the section itself.
        pair: the weak and the strong model that are compared; None: none are.
        shadows: models that also get a share of the requests of another one.
        kept: whether the tenant lets its prompts be kept.
    """

    policy: str
    pair: tuple[str, str] | None
    shadows: tuple[Trial, ...]
    kept: bool


@dataclass
class Plan:
    """Which model answers, and why.

    Attributes:
        model: the one that is asked first.
        strategy: who decided: one of the names in this module.
        reason: one sentence for people.
        degraded: whether the model is smaller than the chosen one, which could not have answered in time.
        candidates: best first; the model is the first.
        cascade: how the answer may escalate to a second model; None: it does not.
        answer_predictor: the learned part of the cascade, when it has one.
        versions: of what the decision was made with.
        learning: what may be learned from the answer; None: nothing is compared, or the safety policy decided.
        scores: what learned routers predicted, in the order in which they were asked.
    """

    model: str
    tier: str
    strategy: str
    reason: str
    degraded: bool = False
    candidates: tuple[Candidate, ...] = ()
    cascade: CascadeRoute | None = None
    answer_predictor: LearnedHead | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    learning: Learning | None = None
    scores: tuple[Prediction, ...] = ()
