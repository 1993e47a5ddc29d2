"""The result of routing: candidates in order with the reasons, and how the answer may escalate."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    """Which model answers, and why. The router makes and changes it; overload control alone changes it afterwards.

    Attributes:
        strategy: who decided: one of the names in this module.
        reason: one sentence for people.
        candidates: best first; the first is asked first.
        degraded: whether the model is smaller than the chosen one, which could not have answered in time.
        cascade: how the answer may escalate to a second model; None: it does not.
        answer_predictor: the learned part of the cascade, when it has one.
        versions: of what the decision was made with.
        learning: what may be learned from the answer; None: nothing is compared, or the safety policy decided.
        scores: what learned routers predicted, in the order in which they were asked.
    """

    strategy: str
    reason: str
    candidates: tuple[Candidate, ...]
    degraded: bool = False
    cascade: CascadeRoute | None = None
    answer_predictor: LearnedHead | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    learning: Learning | None = None
    scores: tuple[Prediction, ...] = ()

    @property
    def model(self) -> str:
        """The one that is asked first."""
        return self.candidates[0].model

    @property
    def tier(self) -> str:
        """Of that model."""
        return self.candidates[0].tier

    def move(self, model: str, tier: str, reason: str, *, last: bool = False) -> None:
        """``model`` becomes the first candidate, or the last one, for ``reason``."""
        moved, others = Candidate(model, tier, reason), list[Candidate]()
        for one in self.candidates:
            if one.model == model:
                moved = replace(one, reason=reason)
            else:
                others.append(one)
        self.candidates = (*others, moved) if last else (moved, *others)
