"""Counts each request when it has ended: the request metrics of a gateway."""

import time
from collections.abc import Mapping
from typing import Final, Protocol

from opentelemetry.trace import SpanContext

from gateway.routing.router import price_of
from gateway.streaming.dispatch import Dispatch
from gateway.streaming.model_run import ModelRun, finish_reason_of
from gateway.telemetry.request_log import RequestLog
from sluice.errors import SluiceError
from sluice.telemetry.instruments import Instruments
from sluice.v1.admin_pb2 import RequestRecord
from sluice.v1.inference_pb2 import FinishReason
from sluice.v1.safety_pb2 import SafetyAction
from sluice.wire.enums import word_of

PREDICTED_WAIT_MS: Final = 50.0
"""Wait for a worker, in milliseconds, from which on the predicted time of an answer is judged: a request that does not
wait is never refused."""
_TARGETS: Final = {False: "input", True: "output"}


class RunningCalls(Protocol):
    """The calls of a gateway."""

    @property
    def active(self) -> int:
        """Calls that run."""

    @property
    def pending(self) -> Mapping[str, int]:
        """Calls of which nothing was sent to a batcher yet, by class."""


class RequestMetrics:
    """Valid requests by outcome, their tokens, cost and times, and what was decided about them."""

    def __init__(self, instruments: Instruments) -> None:
        """Count in `instruments`."""
        self._instruments = instruments
        self._requests = instruments.counter("sluice.requests")
        self._refused = instruments.counter("sluice.requests.refused")
        self._tokens = instruments.counter("sluice.tokens")
        self._cost = instruments.counter("sluice.cost")
        self._cached = instruments.counter("sluice.cached_answers")
        self._first_token = instruments.histogram("gen_ai.server.time_to_first_token")
        self._token_time = instruments.histogram("gen_ai.server.time_per_output_token")
        self._duration = instruments.histogram("gen_ai.server.request.duration")
        self._prediction_error = instruments.histogram("sluice.prediction.error")
        self._routes = instruments.counter("sluice.routes")
        self._escalations = instruments.counter("sluice.escalations")
        self._recoveries = instruments.counter("sluice.recoveries")
        self._safety = instruments.counter("sluice.safety.actions")

    def show(self, dispatch: Dispatch, calls: RunningCalls) -> None:
        """Show `calls`, and the runs of `dispatch`: waiting for room, sent again, given up."""
        observe = self._instruments.observe
        observe("sluice.requests.running", lambda: [((), calls.active)])
        observe(
            "sluice.requests.preparing",
            lambda: [((name,), count) for name, count in calls.pending.items()],
        )
        observe("sluice.room.waiting", lambda: list(dispatch.queued.items()))
        observe("sluice.room.oldest_age", lambda: dispatch.queued_s(time.monotonic()).items())
        observe("sluice.rows.resent", lambda: list(dispatch.resent.items()))
        observe("sluice.dead_letters", lambda: list(dispatch.given_up.items()))

    def refused(self, error: SluiceError) -> None:
        """Count the error of a call, unless it has a request id: `ended` counts valid requests."""
        if "request_id" not in error.metadata:
            self._refused[error.reason,] += 1

    def ended(self, log: RequestLog, record: RequestRecord) -> None:
        """Count a valid request that has ended, by its log and the record that was made of that."""
        assert log.request is not None, "it is valid"
        # A request that was refused counts for the model that it named.
        model = log.model or log.request.model or ""
        priority_class = log.request.priority_class
        outcome = record.error_reason or word_of(FinishReason, record.finish_reason)
        self._requests[model, priority_class, outcome] += 1
        if record.cached:
            self._cached[model, priority_class] += 1
        for decision in record.decisions:
            action = word_of(SafetyAction, decision.action)
            self._safety[action, _TARGETS[decision.in_answer]] += decision.count
        if log.runs is None or log.plan is None:
            return  # it was refused, or got an earlier answer
        plan, span = log.plan, log.server.get_span_context()
        self._routes[plan.model, plan.strategy_word, str(plan.degraded).lower()] += 1
        for run in log.runs:
            self._count_run(run, record.currency, model, priority_class, span)
        labels = log.method, "sluice", model, priority_class
        total_s = log.ended_at - log.arrived_at
        self._duration.record((*labels, log.error), total_s, span)
        if log.first_token_at is None:
            return
        self._first_token.record(labels, log.first_token_at - log.arrived_at, span)
        last = log.runs[-1]
        later = last.completion_tokens - last.resumed - 1
        if not log.error and later > 0:
            self._token_time.record(labels, (log.ended_at - log.first_token_at) / later, span)

    def _count_run(
        self, run: ModelRun, currency: str, answered_by: str, priority_class: str, span: SpanContext
    ) -> None:
        """Count a model's work on a request that `answered_by` answered."""
        prompt_tokens, answer_tokens = run.billed_tokens
        self._tokens[run.model, "input"] += prompt_tokens
        if answer_tokens:
            self._tokens[run.model, "output"] += answer_tokens
        if cost := price_of(run.settings, prompt_tokens, answer_tokens):
            self._cost[run.model, currency] += cost
        if run.recoveries:
            self._recoveries[run.model, priority_class] += run.recoveries
        if run.escalation_reason:
            self._escalations[run.model, answered_by] += 1
        took_s = run.last_token_at - run.sent_at
        is_whole = run.final is not None and finish_reason_of(run.final.end) is not None
        waited = run.timings.queue_ms >= PREDICTED_WAIT_MS
        if run.expected_s and is_whole and waited and took_s > 0:
            error = abs(run.expected_s / took_s - 1)
            self._prediction_error.record((run.model, priority_class), error, span)
