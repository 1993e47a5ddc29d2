"""What requests use: spending of tenants, and what their ends say of models.

The end of a request counts for its tenant's spending, for the circuit breakers of its models, and for the lengths of
answers that are expected next.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import Final

from gateway.admission.overload import OverloadControl, SchedulingParams
from gateway.admission.tenant_limits import TenantLimits
from gateway.routing.budget import DAY_S, MONTH_PERIODS, Spending
from gateway.streaming.load_table import Breakers
from gateway.streaming.model_run import ModelRun
from gateway.streaming.registry import ResultCollector
from sluice.errors import DeadlinePassed, EngineFailed, ModelUnavailable, SluiceError
from sluice.internal.v1.frame_pb2 import TASK_END_LENGTH

HUNG_S: Final = 10.0
"""How long a model may give no token to any task, while one waits for it, until it counts as hung, in seconds."""
_FAILURES: Final = (EngineFailed, ModelUnavailable)
"""Errors that count against the model."""


class UsageAccounting:
    """Spending by tenant, breakers by model, and lengths of answers.

    Attributes:
        breakers: Circuit breakers of the models.
        spending: Costs of the last hour.
        days: Costs of each day of a month.
        limits: What tenants have taken of their limits.
        hung_s: See `HUNG_S`.
    """

    def __init__(
        self,
        overload: OverloadControl,
        breakers: Breakers,
        streams: Iterable[ResultCollector],
        unix_offset_s: float = 0.0,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Account for the requests of a gateway.

        Args:
            overload: Learns from lengths of answers.
            breakers: Circuit breakers of the models.
            streams: The live answers.
            unix_offset_s: Seconds between `clock` and the Unix epoch.
            clock: Returns monotonic seconds.
        """
        self.breakers = breakers
        self._overload = overload
        self.spending = Spending(unix_offset_s)
        self.days = Spending(unix_offset_s, DAY_S, MONTH_PERIODS)
        self.limits = TenantLimits(self.spending, self.days, clock, unix_offset_s)
        self._streams = streams
        self.hung_s = HUNG_S
        self._last_token_at: dict[str, float] = {}
        """When runs that have ended got their last token, by model."""

    def record_stream(self, request: SchedulingParams, stream: ResultCollector, now: float) -> int:
        """Add the cost of a stream that has ended, and judge its models.

        Returns:
            The tokens of its prompts and answers.
        """
        tokens = 0
        for run in stream.runs:
            if not run.is_sent:
                continue
            billed = run.billed_tokens
            tokens += sum(billed)
            cost = run.settings.cost(*billed)
            self.spending.add(request.tenant, cost, now)
            self.days.add(request.tenant, cost, now)
            error = stream.error if run is stream.current else None
            if run.error is None:  # else it was counted when a fallback took over
                self.record_result(request, run, error, now)
        return tokens

    def record_result(
        self, request: SchedulingParams, run: ModelRun, error: SluiceError | None, now: float
    ) -> None:
        """Judge a model by a run that has ended, with `error` or without.

        Errors that are not the model's fault count neither way.
        """
        model = run.model
        last = max(self._last_token_at.get(model, -inf), run.last_token_at)
        self._last_token_at[model] = last
        if error is None:
            self.breakers.succeeded(model)
            if run.completion_tokens and not run.resumed:
                is_cut = run.final is not None and run.final.end == TASK_END_LENGTH
                self._overload.ended(model, request, run.completion_tokens, is_cut=is_cut)
        elif isinstance(error, _FAILURES) or (
            isinstance(error, DeadlinePassed) and self._is_hung(run, now)
        ):
            self.breakers.failed(model, request.rules.breaker, now)
        else:
            self.breakers.abandoned(model)

    def _is_hung(self, run: ModelRun, now: float) -> bool:
        """Return whether nobody got a token of the model for `hung_s` while the run waited for one.

        A shorter deadline proves nothing; nor does a wait while the model works for others.
        """
        since = now - self.hung_s
        if not run.was_accepted or max(run.sent_at, self._last_token_at[run.model]) > since:
            return False
        live = (other for stream in self._streams for other in stream.runs)
        return not any(other.last_token_at > since for other in live if other.model == run.model)
