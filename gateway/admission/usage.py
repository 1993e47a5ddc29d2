"""What the gateway learns from how requests end: who spent what, and which models fail."""

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.admission.overload import OverloadControl
from gateway.routing.breaker import Breakers
from gateway.routing.budget import Spending
from gateway.routing.router import ModelFacts
from gateway.streaming.attempt import ModelAttempt
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
        for attempt in stream.attempts:
            self.spending.add(tenant, self.cost(attempt), now)
            if attempt is not stream.current:
                self._judge_aside(attempt, now)
        self.judge(stream.current.model, stream.error, now)

    def _judge_aside(self, attempt: ModelAttempt, now: float) -> None:
        """Judges the model of an attempt where another attempt gave the answer."""
        if attempt.error is not None:
            self.judge(attempt.model, attempt.error, now)
        elif attempt.unused_reason and not attempt.assembler.has_frames:
            self.breakers.abandoned(attempt.model)
        else:
            self.breakers.succeeded(
                attempt.model, now
            )  # it answered, if not well, or not to the end

    def cost(self, attempt: ModelAttempt) -> float:
        """Of a row so far."""
        return self.models[attempt.model].cost(attempt.prompt_tokens, attempt.completion_tokens)

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
