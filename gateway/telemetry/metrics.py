"""Request metrics: what a gateway counts of each request when it has ended."""

import time
from collections.abc import Callable, Sequence
from typing import Final

from opentelemetry.trace import SpanContext

from gateway.routing.plan import Plan
from gateway.streaming.attempt import ModelAttempt
from gateway.streaming.stream import Stream
from gateway.validation.requests import ValidRequest
from sluice.telemetry import catalog
from sluice.telemetry.registry import MetricRegistry
from sluice.v1.admin_pb2 import RequestRecord
from sluice.v1.inference_pb2 import Finished, FinishReason
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

    def count_refusal(self, priority_class: str, reason: str, record: RequestRecord) -> None:
        """A valid request ended before it had a stream."""
        self._count("", priority_class, reason, record)

    def count_kept(self, request: ValidRequest, finished: Finished, record: RequestRecord) -> None:
        """``request`` got the answer of an earlier one."""
        outcome = word_of(FinishReason, finished.reason)
        self._count(finished.model, request.priority_class, outcome, record)

    def count_stream(
        self,
        request: ValidRequest,
        plan: Plan,
        stream: Stream,
        record: RequestRecord,
        span: SpanContext,
    ) -> None:
        """The stream of ``request`` ended; ``record`` is complete, ``span`` leads to its trace."""
        model, priority_class = stream.current.model, request.priority_class
        self._count(model, priority_class, _outcome(stream), record)
        self._count_attempts(priority_class, plan, stream.attempts, record)
        for attempt in stream.attempts:
            if attempt.escalation_reason:
                self._escalations[attempt.model, model] += 1
        self._record_times(request, stream, span)

    def count_rows(
        self,
        request: ValidRequest,
        operation: str,
        plan: Plan,
        attempts: Sequence[ModelAttempt],
        record: RequestRecord,
        span: SpanContext,
    ) -> None:
        """All rows of a request about texts have ended; the rest is as in `count_stream`."""
        error = record.error_reason
        self._count(plan.model, request.priority_class, error or "stop", record)
        self._count_attempts(request.priority_class, plan, attempts, record)
        labels = operation, "sluice", plan.model, request.priority_class, error
        self._duration.record(labels, ms_of(record.timings.total) / 1e3, span)

    def _count(self, model: str, priority_class: str, outcome: str, record: RequestRecord) -> None:
        self._requests[model, priority_class, outcome] += 1
        if record.cached:
            self._cached[model, priority_class] += 1
        for one in record.decisions:
            action = word_of(SafetyAction, one.action)
            self._safety[action, _TARGETS[one.in_answer]] += one.count

    def _count_attempts(
        self,
        priority_class: str,
        plan: Plan,
        attempts: Sequence[ModelAttempt],
        record: RequestRecord,
    ) -> None:
        """Of rows about texts the record has one attempt with the cost of all."""
        self._routes[plan.model, plan.strategy, "true" if plan.degraded else "false"] += 1
        for attempt in attempts:
            prompt_tokens, answer_tokens = attempt.billed_tokens
            self._tokens[attempt.model, "input"] += prompt_tokens
            if answer_tokens:
                self._tokens[attempt.model, "output"] += answer_tokens
            if attempt.assembler.recoveries:
                self._recoveries[attempt.model, priority_class] += attempt.assembler.recoveries
        for kept in record.attempts:
            if kept.cost:
                self._cost[kept.model, record.currency] += kept.cost

    def _record_times(self, request: ValidRequest, stream: Stream, span: SpanContext) -> None:
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


def _outcome(stream: Stream) -> str:
    """The finish reason in lower case, or the reason of the error."""
    if stream.error is not None:
        return stream.error.reason
    assert stream.finished is not None, "it has ended"
    return word_of(FinishReason, stream.finished.reason)
