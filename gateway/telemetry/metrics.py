"""Request metrics: what a gateway counts of each request when it has ended."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from opentelemetry.trace import SpanContext

from gateway.routing.plan import Plan
from gateway.streaming.answer import Answer
from gateway.streaming.row import Row
from gateway.streaming.sent_row import Line
from gateway.validation.requests import ValidRequest
from sluice.telemetry import catalog
from sluice.telemetry.registry import MetricRegistry
from sluice.v1.admin_pb2 import RequestRecord
from sluice.v1.inference_pb2 import FinishReason
from sluice.v1.safety_pb2 import SafetyAction
from sluice.wire.clock import ms_of
from sluice.wire.enums import word_of

_TARGETS: Final = {False: "input", True: "output"}


class RequestMetrics:
    """Valid requests by outcome, their tokens, cost and times, and what was decided about them."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._registry = registry
        self._requests = registry.counter(catalog.REQUESTS)
        self._tokens = registry.counter(catalog.TOKENS)
        self._cost = registry.counter(catalog.COST)
        self._cached = registry.counter(catalog.CACHED)
        self._first_token = registry.histogram(catalog.FIRST_TOKEN)
        self._token_time = registry.histogram(catalog.TOKEN_TIME)
        self._duration = registry.histogram(catalog.DURATION)
        self._routes = registry.counter(catalog.ROUTES)
        self._escalations = registry.counter(catalog.ESCALATIONS)
        self._recoveries = registry.counter(catalog.RECOVERIES)
        self._safety = registry.counter(catalog.SAFETY_ACTIONS)

    def show_running(self, running: Callable[[], int]) -> None:
        """``running``: calls that run now."""
        self._registry.observe(catalog.RUNNING, lambda: [((), running())])

    def show_waiting(self, waiting: Callable[[], Mapping[Line, int]]) -> None:
        """``waiting``: rows that wait for room now, by model and class."""
        self._registry.observe(
            catalog.ROOM_WAITING,
            lambda: [(tuple(line), rows) for line, rows in waiting().items()],
        )

    def count(
        self,
        request: ValidRequest,
        record: RequestRecord,
        model: str = "",
        plan: Plan | None = None,
        attempts: Sequence[Row] = (),
    ) -> None:
        """A valid request has ended, as its ``record`` says.

        Args:
            model: the one that answered.
            plan: unless the request was refused, or got the answer of an earlier one.
            attempts: its rows. Of those about texts the record has one attempt with the cost of all.
        """
        priority_class = request.priority_class
        outcome = record.error_reason or word_of(FinishReason, record.finish_reason)
        self._requests[model, priority_class, outcome] += 1
        if record.cached:
            self._cached[model, priority_class] += 1
        for one in record.decisions:
            action = word_of(SafetyAction, one.action)
            self._safety[action, _TARGETS[one.in_answer]] += one.count
        if plan is not None:
            self._routes[plan.model, plan.strategy, "true" if plan.degraded else "false"] += 1
        for attempt in attempts:
            prompt_tokens, answer_tokens = attempt.billed_tokens
            self._tokens[attempt.model, "input"] += prompt_tokens
            if answer_tokens:
                self._tokens[attempt.model, "output"] += answer_tokens
            if attempt.assembler.recoveries:
                self._recoveries[attempt.model, priority_class] += attempt.assembler.recoveries
            if attempt.escalation_reason:
                self._escalations[attempt.model, model] += 1
        for kept in record.attempts:
            if kept.cost:
                self._cost[kept.model, record.currency] += kept.cost

    def time_rows(
        self, request: ValidRequest, record: RequestRecord, model: str, span: SpanContext
    ) -> None:
        """How long a request about texts took; ``span`` leads to its trace."""
        labels = record.operation, "sluice", model, request.priority_class, record.error_reason
        self._duration.record(labels, ms_of(record.timings.total) / 1e3, span)

    def time_stream(self, request: ValidRequest, stream: Answer, span: SpanContext) -> None:
        """How long an answer that has just ended took, and its tokens."""
        operation = "text_completion" if request.conversation.raw else "chat"
        labels = operation, "sluice", stream.current.model, request.priority_class
        now, error = time.monotonic(), "" if stream.error is None else stream.error.reason
        self._duration.record((*labels, error), now - stream.spec.timings.arrived_at, span)
        if stream.first_token_s is None or stream.first_token_at is None:
            return
        self._first_token.record(labels, stream.first_token_s, span)
        later = stream.current.completion_tokens - stream.current.resumed - 1
        if not error and later > 0:
            self._token_time.record(labels, (now - stream.first_token_at) / later, span)
