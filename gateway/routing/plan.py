"""The result of routing: the decision as records have it, and how the answer may escalate."""

from dataclasses import dataclass

from gateway.routing.prediction import LearnedHead
from sluice.settings.routing import CascadeRoute
from sluice.v1.admin_pb2 import RouteCandidate, RouteRecord
from sluice.v1.inference_pb2 import RouteStrategy
from sluice.wire.enums import word_of


@dataclass
class Plan:
    """Which model answers, and why. The router makes and changes it; overload control alone changes it afterwards.

    Attributes:
        route: the decision; its first candidate is asked first.
        policy: which one of the configuration's routing policies routed; "" is the section itself.
        cascade: how the answer may escalate to a second model; None: it does not.
        answer_predictor: the learned part of the cascade, when it has one.
    """

    route: RouteRecord
    policy: str = ""
    cascade: CascadeRoute | None = None
    answer_predictor: LearnedHead | None = None

    @property
    def model(self) -> str:
        """The one that is asked first."""
        return self.route.candidates[0].model

    @property
    def tier(self) -> str:
        """Of that model."""
        return self.route.candidates[0].tier

    @property
    def strategy(self) -> str:
        """The word of who decided."""
        return word_of(RouteStrategy, self.route.strategy)

    def move(self, model: str, tier: str, reason: str, *, last: bool = False) -> None:
        """``model`` becomes the first candidate, or the last one, for ``reason``."""
        others = {one.model: one for one in self.route.candidates}
        moved = others.pop(model, RouteCandidate(model=model, tier=tier))
        moved.reason = reason
        del self.route.candidates[:]
        ordered = (*others.values(), moved) if last else (moved, *others.values())
        self.route.candidates.extend(ordered)
