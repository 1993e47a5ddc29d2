"""What the gateway learns from how requests end: who spent what, and which models fail."""

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.admission.overload import OverloadControl
from gateway.routing.breaker import Breakers
from gateway.routing.budget import Spending
from gateway.routing.router import ModelFacts
from gateway.streaming.leg import Leg
from gateway.streaming.stream import Stream
from sluice.errors import EngineFailed, ModelUnavailable, SluiceError

_FAILURES = (EngineFailed, ModelUnavailable)
"""Errors that a model is to blame for."""


class UsageAccounting:
    """Spending by tenant and breakers by model.

    Args:
        models: by name, for their prices.
    """

    def __init__(self, breakers: Breakers, models: Mapping[str, ModelFacts]) -> None:
        self.breakers = breakers
        self.spending = Spending()
        self.models = models

    def ended(self, tenant: str, stream: Stream, now: float) -> None:
        """A stream of ``tenant`` ended."""
        for leg in stream.legs:
            self.spending.add(tenant, self.cost(leg), now)
            if leg is not stream.leg:
                self._judge_aside(leg, now)
        self.judge(stream.leg.model, stream.error, now)

    def _judge_aside(self, leg: Leg, now: float) -> None:
        """What a leg says about its model where another one answered."""
        if leg.error is not None:
            self.judge(leg.model, leg.error, now)
        elif leg.unused and not leg.assembler.heard:
            self.breakers.abandoned(leg.model)
        else:
            self.breakers.succeeded(leg.model, now)  # it answered, if not well, or not to the end

    def cost(self, leg: Leg) -> float:
        """Of a row so far."""
        return self.models[leg.model].cost(leg.prompt_tokens, len(leg.transcript.token_ids))

    def judge(self, model: str, error: SluiceError | None, now: float) -> None:
        """What a row that has ended, with ``error`` or without, says about ``model``."""
        if error is None:
            self.breakers.succeeded(model, now)
        elif isinstance(error, _FAILURES):
            self.breakers.failed(model, now)
        else:
            self.breakers.abandoned(model)


@dataclass(frozen=True)
class CurrentLoad:
    """`gateway.routing.router.RuntimeState` for a request of one class, at one moment."""

    usage: UsageAccounting
    overload: OverloadControl
    priority_class: str
    at: float

    def wait_s(self, model: str) -> float:
        """See `RuntimeState.wait_s`."""
        return self.overload.wait_s(model, self.priority_class, self.at)

    def spent(self, tenant: str) -> float:
        """See `RuntimeState.spent`."""
        return self.usage.spending.spent(tenant, self.at)
