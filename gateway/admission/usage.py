"""What follows from the end of a request: the tenant's spending, the circuit breakers of the models, and the lengths of
answers that are expected next."""

from collections.abc import Callable, Iterable
from math import inf
from typing import Final

from gateway.admission.overload import OverloadControl, SchedulingParams
from gateway.admission.prompts import PreparedPrompt
from gateway.admission.tenant_limits import TenantLimits
from gateway.identity.caller import Caller
from gateway.routing.breaker import Breakers
from gateway.routing.budget import DAY_S, MONTH_PERIODS, Reservation, Spending
from gateway.streaming.row import Row
from gateway.streaming.row_result import RowResult
from sluice.errors import DeadlinePassed, EngineFailed, ModelUnavailable, SluiceError
from sluice.internal.v1.frame_pb2 import ROW_END_LENGTH
from sluice.settings import Settings

HUNG_S: Final = 10.0
"""A model that gives no token to any row for this long, while one waits for it, hangs."""
_FAILURES: Final = (EngineFailed, ModelUnavailable)
"""Errors that count against the model."""


class UsageAccounting:
    """Spending by tenant, breakers by model, and lengths of answers.

    Args:
        overload: learns from the lengths.
        streams: the live ones.
        unix_offset_s: see `Spending`.
        clock: monotonic seconds.

    Attributes:
        spending: of the last hour.
        days: of each day of a month.
        limits: what tenants have taken of theirs.
    """

    def __init__(
        self,
        overload: OverloadControl,
        breakers: Breakers,
        streams: Iterable[RowResult],
        unix_offset_s: float = 0.0,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.breakers = breakers
        self._overload = overload
        self.spending = Spending(unix_offset_s)
        self.days = Spending(unix_offset_s, DAY_S, MONTH_PERIODS)
        self.limits = TenantLimits(self.spending, self.days, clock, unix_offset_s)
        self._streams = streams
        self._last_token_at: dict[str, float] = {}
        """Of the rows that have ended, by model."""

    def record_stream(self, request: SchedulingParams, stream: RowResult, now: float) -> int:
        """A stream for ``request`` has ended: adds the cost of its attempts, and judges their models.

        Returns the tokens of prompt and answers.
        """
        tokens = 0
        for attempt in stream.attempts:
            if not attempt.sent:
                continue
            billed = attempt.billed_tokens
            tokens += sum(billed)
            cost = attempt.settings.cost(*billed)
            self.spending.add(request.tenant, cost, now)
            self.days.add(request.tenant, cost, now)
            error = stream.error if attempt is stream.current else None
            if attempt.error is None:  # else it was counted when a fallback took over
                self.record_result(request, attempt, error, now)
        return tokens

    def hold_longest(
        self,
        settings: Settings,
        reservation: Reservation,
        payer: Caller,
        *prepared: PreparedPrompt | None,
    ) -> None:
        """A request of ``payer`` may take and cost the longest answers to ``prepared``; raises LimitReached."""
        rows = [one for one in prepared if one is not None]
        reservation.cost = tokens = 0
        for one in rows:
            length = len(one.prompt_token_ids), one.sampling.max_tokens
            reservation.cost += one.model.settings.cost(*length)
            tokens += sum(length)
        model = rows[0].model.name
        reservation.settle = self.limits.reserve(settings, payer, model, tokens)

    def record_result(
        self, request: SchedulingParams, attempt: Row, error: SluiceError | None, now: float
    ) -> None:
        """A row for ``request`` has ended, with ``error`` or without.

        Errors that are not its model's fault count neither way.
        """
        model = attempt.model
        last = max(self._last_token_at.get(model, -inf), attempt.last_token_at)
        self._last_token_at[model] = last
        if error is None:
            self.breakers.succeeded(model)
            if attempt.completion_tokens and not attempt.resumed:
                is_cut = attempt.final is not None and attempt.final.end == ROW_END_LENGTH
                self._overload.ended(model, request, attempt.completion_tokens, is_cut=is_cut)
        elif isinstance(error, _FAILURES) or (
            isinstance(error, DeadlinePassed) and self._hung(attempt, now)
        ):
            self.breakers.failed(model, request.rules.breaker, now)
        else:
            self.breakers.abandoned(model)

    def _hung(self, attempt: Row, now: float) -> bool:
        """Whether nobody got a token of the model for `HUNG_S` while the row waited for one.

        A shorter deadline proves nothing; nor does a wait while the model works for others.
        """
        since = now - HUNG_S
        if not attempt.taken or max(attempt.sent_at, self._last_token_at[attempt.model]) > since:
            return False
        live = (one for stream in self._streams for one in stream.attempts)
        return not any(one.last_token_at > since for one in live if one.model == attempt.model)
