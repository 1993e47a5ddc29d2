"""The spans of one call (sluice/telemetry/names.py lists them). Contexts are passed explicitly."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    NoOpTracer,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
)
from opentelemetry.util.types import AttributeValue

from gateway.routing.router import ModelFacts
from gateway.safety.actions import Action
from gateway.safety.dry_run import move_labels
from gateway.streaming.answer import Answer
from gateway.streaming.idempotency import Replay
from gateway.validation.requests import ValidRequest
from sluice.defaults import AUTO
from sluice.errors import SluiceError
from sluice.telemetry import names
from sluice.telemetry.tracing import context_of, trace_id_of
from sluice.v1.inference_pb2 import FinishReason, GenerateRequest, Priority, RouteStrategy, Started
from sluice.wire.attempts import ATTEMPTS_PER_TASK
from sluice.wire.enums import word_of
from sluice.wire.subjects import is_token

Attributes = dict[str, AttributeValue]


class CallSpans:
    """The server span of one call, and the spans of its hops under it.

    Attributes:
        trace_id: 32 hex digits.
        recorded: whether somebody will see them; else at most the server span is seen.
        unseen: stands for the hops of a call that is not recorded.
    """

    def __init__(self, tracer: Tracer, name: str, metadata: Mapping[str, str]) -> None:
        self._tracer = tracer
        self.server = tracer.start_span(name, context_of(metadata), SpanKind.SERVER)
        self._context = trace.set_span_in_context(self.server, Context())
        context = self.server.get_span_context()
        self.unseen: Span = NonRecordingSpan(context)
        self.recorded = self.server.is_recording() and context.trace_flags.sampled
        self.trace_id = trace_id_of(self.server)
        self._attempts: dict[str, Span] = {}

    @contextmanager
    def hop(
        self,
        name: str,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> Iterator[Span]:
        """A span around one hop; an error that passes through is recorded."""
        span = self.start_hop(name, kind, attributes)
        try:
            yield span
        except SluiceError as error:
            fail(span, error.reason)
            raise
        finally:
            span.end()

    def start_hop(
        self, name: str, kind: SpanKind, attributes: Mapping[str, AttributeValue] | None = None
    ) -> Span:
        """The span of a hop that begins now; the caller ends it."""
        if not self.recorded:
            return self.unseen
        return self._tracer.start_span(name, self._context, kind, attributes)

    def describe(self, make: Callable[..., Mapping[str, AttributeValue]], *about: Any) -> None:
        """Gives the server span the attributes that ``make`` makes of ``about``."""
        if self.server.is_recording():
            self.server.set_attributes(make(*about))

    def start_attempt(self, row_id: str, attributes: Mapping[str, AttributeValue]) -> Span:
        """The span of a model's row, until `end_attempts`."""
        span = self.start_hop(names.SPAN_ATTEMPT, SpanKind.PRODUCER, attributes)
        if self.recorded:
            self._attempts[row_id] = span
        return span

    def end_attempts(
        self, describe: Callable[[str], tuple[Mapping[str, AttributeValue], float]]
    ) -> None:
        """The request has ended; ``describe`` a row: how it ended, and how many seconds ago."""
        for row_id, span in self._attempts.items():
            attributes, ago_s = describe(row_id)
            span.set_attributes(attributes)
            span.end(time.time_ns() - int(ago_s * 1e9))
        self._attempts.clear()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Ends the server span; an exception that passes through is recorded."""
        try:
            yield
        except BaseException as error:
            fail(self.server, _reason_of(error))
            raise
        finally:
            self.server.end()


UNTRACED: Final = CallSpans(NoOpTracer(), "", {})
"""The spans of calls that are not traced."""


def finding_attributes(taken: Mapping[tuple[str, Action], int]) -> Attributes:
    """Attributes for findings by rule and action: the pairs, and a count for each action."""
    if not taken:
        return {}
    pairs = sorted(f"{rule}:{action.name.lower()}" for rule, action in taken)
    counts: Counter[Action] = Counter()
    for (_, action), count in taken.items():
        counts[action] += count
    numbers = {names.FINDING_COUNT + action.name.lower(): n for action, n in counts.items()}
    return {names.FINDINGS: pairs, **numbers}


def fail(span: Span, reason: str) -> None:
    """Marks ``span`` as failed with an ErrorInfo reason."""
    span.set_attribute(names.ERROR_REASON, reason)
    span.set_status(Status(StatusCode.ERROR, reason))


def _reason_of(error: BaseException) -> str:
    if isinstance(error, SluiceError):
        return error.reason
    return "INTERNAL" if isinstance(error, Exception) else "CANCELLED"


def request_attributes(request: ValidRequest, operation: str = "") -> Attributes:
    """What was asked, for the server span; unless it names an ``operation`` it is a prompt or a chat."""
    prompted = "text_completion" if request.conversation.raw else "chat"
    attributes: Attributes = {
        names.GEN_AI_OPERATION: operation or prompted,
        names.GEN_AI_SYSTEM: "sluice",
        names.GEN_AI_REQUEST_MODEL: request.model or AUTO,
        names.PRIORITY_CLASS: request.priority_class,
        names.TENANT: request.tenant,
    }
    if request.sampling.HasField("max_tokens"):
        attributes[names.GEN_AI_MAX_TOKENS] = request.sampling.max_tokens
    return attributes


def started_attributes(started: Started) -> Attributes:
    """Who answers, for the server span."""
    return {
        names.REQUEST_ID: started.request_id,
        names.GEN_AI_RESPONSE_MODEL: started.model,
        names.TIER: started.route.tier,
        names.ROUTE_STRATEGY: word_of(RouteStrategy, started.route.strategy),
        names.GEN_AI_INPUT_TOKENS: started.prompt_tokens,
    }


def call_attributes(wire: GenerateRequest, tenant: str, request_id: str) -> Attributes:
    """What every call is searched by, before it is known to be valid."""
    # Text that was put in the wrong field must not get into traces.
    model = wire.model or AUTO
    return {
        names.REQUEST_ID: request_id,
        names.TENANT: tenant,
        names.GEN_AI_REQUEST_MODEL: model if is_token(model) else "invalid",
        names.PRIORITY_CLASS: word_of(Priority, wire.priority),
    }


def end_attributes(answer: Answer | Replay, models: Mapping[str, ModelFacts]) -> Attributes:
    """How the answer ended, as far as it has, for the server span."""
    attributes: Attributes = {}
    finished = answer.finished
    if finished is not None:
        attributes[names.GEN_AI_FINISH_REASONS] = [word_of(FinishReason, finished.reason)]
        attributes[names.GEN_AI_OUTPUT_TOKENS] = finished.usage.completion_tokens
        attributes[names.MODELS_TRIED] = [one.model for one in finished.attempts]
        if finished.usage.cached:
            attributes[names.CACHED] = True
        attributes |= _answering(finished.model, models)
    if isinstance(answer, Answer):
        attributes[names.MODELS_TRIED] = [one.model for one in answer.attempts]
        attributes |= _answering(answer.current.model, models) | _recovery(answer)
    if answer.escalation_reason:
        attributes[names.ROUTE_ESCALATED] = answer.escalation_reason
    if answer.first_token_s is not None:
        attributes[names.GEN_AI_TTFT] = answer.first_token_s
    return attributes


def _answering(model: str, models: Mapping[str, ModelFacts]) -> Attributes:
    tier = {names.TIER: models[model].tier} if model in models else {}
    return {names.GEN_AI_RESPONSE_MODEL: model, **tier}


def _recovery(stream: Answer) -> Attributes:
    recovered = [one.assembler for one in stream.attempts if one.assembler.recoveries]
    if not recovered:
        return {}
    return {
        names.RECOVERED: sum(one.recoveries for one in recovered),
        names.RECOVERED_FROM: "batcher" if recovered[-1].recovered_task else "worker",
        names.RECOVERED_GAP_S: max(one.recovered_gap_s for one in recovered),
    }


def attempt_end(stream: Answer, now: float, row_id: str) -> tuple[Attributes, float]:
    """How a row of ``stream``, which has ended now, ended, for its span; and how many seconds ago."""
    attempt = next((one for one in stream.attempts if one.row_id == row_id), None)
    if attempt is None:
        return {names.END: "unused"}, 0.0
    last = attempt is stream.current
    end = "answered" if stream.error is None else stream.error.reason.lower()
    attributes: Attributes = {
        names.END: end if last else "escalated",
        names.TASK_ATTEMPT: attempt.assembler.attempt // ATTEMPTS_PER_TASK,
        names.GEN_AI_OUTPUT_TOKENS: attempt.completion_tokens,
    }
    if last and stream.finished is not None and attempt.inspection is not None:
        outcome = attempt.inspection.outcome()
        attributes[names.SAFETY_POLICY] = outcome.policy
        attributes |= finding_attributes(outcome.taken)
        if outcome.moves:
            attributes[names.DRY_RUN] = move_labels(outcome.moves)
    return attributes, 0.0 if last else now - attempt.left_at(now)
