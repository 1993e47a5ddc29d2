"""What follows from the end of a request: the tenant's spending, and the circuit breakers of the models."""

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.admission.overload import OverloadControl
from gateway.admission.prompts import PreparedPrompt
from gateway.routing.breaker import Breakers
from gateway.routing.budget import Reservation, Spending
from gateway.routing.plan import Plan
from gateway.routing.router import ModelFacts
from gateway.streaming.attempt import ModelAttempt
from gateway.streaming.stream import Stream
from sluice.errors import EngineFailed, ModelUnavailable, SluiceError

_FAILURES = (EngineFailed, ModelUnavailable)
"""Errors that count against the model."""


class UsageAccounting:
    """Spending by tenant and breakers by model.

    Args:
        models: by name, for their prices.
        unix_offset_s: see `Spending`.
    """

    def __init__(
        self, breakers: Breakers, models: Mapping[str, ModelFacts], unix_offset_s: float = 0.0
    ) -> None:
        self.breakers = breakers
        self.spending = Spending(unix_offset_s)
        self.models = models

    def record_stream(self, tenant: str, stream: Stream, now: float) -> None:
        """A stream of ``tenant`` has ended: adds the cost of its attempts, and judges their models."""
        for attempt in stream.attempts:
            self.spending.add(tenant, self.cost(attempt), now)
            if attempt is not stream.current:
                self._record_other_attempt(attempt, now)
        self.record_result(stream.current.model, stream.error, now)

    def reserve(self, tenant: str, plan: Plan) -> Reservation:
        """A request of ``tenant`` was routed: until its end the tenant's spending includes what it may cost."""
        return self.spending.reserve(tenant, plan.candidates[0].cost)

    def cost_max(self, *prepared: PreparedPrompt | None) -> float:
        """The cost of the longest answers to ``prepared`` prompts."""
        return sum(
            self.models[one.model.name].cost(len(one.prompt_token_ids), one.sampling.max_tokens)
            for one in prepared
            if one is not None
        )

    def cost(self, attempt: ModelAttempt) -> float:
        """The cost of the tokens of an attempt so far."""
        return self.models[attempt.model].cost(attempt.prompt_tokens, attempt.completion_tokens)

    def record_result(self, model: str, error: SluiceError | None, now: float) -> None:
        """A row of ``model`` has ended, with ``error`` or without. Other errors than `_FAILURES` count neither way."""
        if error is None:
            self.breakers.succeeded(model, now)
        elif isinstance(error, _FAILURES):
            self.breakers.failed(model, now)
        else:
            self.breakers.abandoned(model)

    def _record_other_attempt(self, attempt: ModelAttempt, now: float) -> None:
        """An attempt that did not give the answer. One that was cancelled before its first frame does not count."""
        if attempt.error is None and attempt.unused_reason and not attempt.assembler.has_frames:
            self.breakers.abandoned(attempt.model)
        else:
            self.record_result(attempt.model, attempt.error, now)


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
