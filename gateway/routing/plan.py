"""The result of routing: the decision, as records show it, and how the answer may escalate."""

from dataclasses import dataclass

from gateway.routing.prediction import LearnedHead
from sluice.settings.routing import CascadeRoute
from sluice.v1.admin_pb2 import RouteCandidate, RouteRecord
from sluice.v1.inference_pb2 import RouteStrategy
from sluice.wire.enums import word_of


@dataclass
class Plan:
    """Names the model that answers, and why.

    The router makes and changes a plan; afterwards only overload control changes it.

    Attributes:
        route: the decision; its first candidate answers first.
        policy: name of the routing policy; "" is the section `routing` itself.
        cascade: how the answer may escalate to a second model; None if it may not.
        answer_predictor: learned head that judges the first answer, if there is one.
    """

    route: RouteRecord
    policy: str = ""
    cascade: CascadeRoute | None = None
    answer_predictor: LearnedHead | None = None

    @property
    def model(self) -> str:
        """Model that answers first."""
        return self.route.candidates[0].model

    @property
    def tier(self) -> str:
        """Tier of that model."""
        return self.route.candidates[0].tier

    @property
    def strategy(self) -> str:
        """Name of the strategy that decided."""
        return word_of(RouteStrategy, self.route.strategy)

    def move(self, model: str, tier: str, reason: str, *, last: bool = False) -> None:
        """Make `model` the first candidate, or the last one, for `reason`."""
        others = {candidate.model: candidate for candidate in self.route.candidates}
        moved = others.pop(model, RouteCandidate(model=model, tier=tier))
        moved.reason = reason
        del self.route.candidates[:]
        ordered = (*others.values(), moved) if last else (moved, *others.values())
        self.route.candidates.extend(ordered)
