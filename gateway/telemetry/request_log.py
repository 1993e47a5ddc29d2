"""What happens to one request, told once to one object by whoever does it.

Its spans are made while it is told (`sluice/telemetry/names.py` lists them; contexts are passed explicitly). Its record
and audit entry (`gateway.telemetry.request_record`) and its metrics (`gateway.telemetry.metrics`) are made of it.
"""

import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
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

from gateway.routing.plan import Plan
from gateway.safety.actions import Action
from gateway.safety.dry_run import move_labels
from gateway.safety.guards.checks import Checks, Decided
from gateway.safety.inspector import RequestInspection
from gateway.streaming.answer import Answer
from gateway.streaming.idempotency import Replay
from gateway.streaming.row import Row
from gateway.validation.requests import ValidRequest
from sluice.defaults import AUTO
from sluice.errors import Cancelled, InternalError, SluiceError
from sluice.internal.v1.frame_pb2 import RowTimings
from sluice.openai.errors import http_status
from sluice.settings.models import ModelSettings
from sluice.telemetry import names
from sluice.telemetry.environment import EVENT, SPAN, content_capture
from sluice.telemetry.logs import about_request
from sluice.telemetry.tracing import headers_of, start_server_span, trace_id_of
from sluice.v1.admin_pb2 import ShadowRun
from sluice.v1.inference_pb2 import (
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    EmbedRequest,
    Finished,
    FinishReason,
    GenerateRequest,
    Priority,
    RerankRequest,
    RouteStrategy,
    ScoreRequest,
    Started,
    Timings,
    Usage,
)
from sluice.wire import subjects
from sluice.wire.clock import set_duration, unix_ms
from sluice.wire.enums import word_of

Attributes = Mapping[str, AttributeValue]
Wire = GenerateRequest | EmbedRequest | RerankRequest | ScoreRequest

CALLER_GONE: Final = "the caller has gone"
CONVERSATION_LABELS: Final = ("conversation_id", "session_id", "thread_id")
"""Labels, which OpenAI's API calls metadata, that name a conversation; the first one that is there counts."""
ERROR_CHARS_MAX: Final = 500
"""Bound of the error messages in traces."""
_QUOTED: Final = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
CONTENT_CHARS_MAX: Final = 65_536
"""Bound of a message in traces; collectors take 4 MiB at a time."""
_NO_HEADERS: Final[Mapping[str, str]] = {}


class RequestLog:
    """What happened to one request, in a call of its own. As a context manager it ends the span of the call.

    Attributes:
        request_id: of what the call asks for.
        operation: as telemetry and records name the method; empty: it is a prompt or a chat.
        arrived_at: monotonic seconds.
        arrived_unix_ms: the same moment.
        server: the span of the call.
        trace_id: 32 hex digits.
        recorded: whether somebody will see the spans of its hops; else at most that of the call is seen.
        request: what was asked; None: nothing that is valid.
        method: as spans and metrics name it, also where it is a prompt or a chat.
        policy: version of the safety policy that decided about the prompt.
        taken: findings in the prompt, by rule and action.
        blocked: whether the policy blocks the prompt.
        governed_model: the one that must answer by the policy; may be empty.
        seen: the texts as a model would see them.
        checks: of the token classifiers whose findings were decided with those of the rules.
        plan: the routing decision.
        answer_key: under which the answer is kept, or was found.
        publish_ms: how long its rows waited for room at a batcher.
        model: the one that answers, or answered; empty: none was asked.
        rows: those that worked on it; None: it was refused, or got an earlier answer.
        guards: the checks of guard models.
        answer_taken: findings in the answer, by rule and action.
        finished: how the answer ended.
        error: why there is none, or why the request was not admitted, a reason; may be empty.
        first_token_at: when callers could see something, monotonic seconds.
        ended_at: monotonic seconds.
        shadows: the models that were given the request as well.
        left: why the caller did not wait for the end.
    """

    request: ValidRequest | None = None
    method = ""
    policy = ""
    taken: Mapping[tuple[str, Action], int] = {}
    blocked = False
    governed_model = ""
    seen: Sequence[str] = ()
    checks: Sequence[Decided] = ()
    plan: Plan | None = None
    answer_key = ""
    publish_ms = 0.0
    model = ""
    rows: Sequence[Row] | None = None
    guards: Checks | None = None
    answer_taken: Mapping[tuple[str, Action], int] = {}
    finished: Finished | None = None
    error = ""
    first_token_at: float | None = None
    ended_at = 0.0
    shadows: Sequence[ShadowRun] = ()
    left: SluiceError | None = None
    _hop = ""

    def __init__(
        self,
        tracer: Tracer,
        span: str,
        metadata: Mapping[str, str],
        operation: str = "",
        request_id: str | None = None,
        route: str = "",
    ) -> None:
        """Begin the log of a call that has come.

        Args:
            tracer: makes its spans.
            span: the name of its gRPC method.
            metadata: has its trace context.
            operation: see the class.
            request_id: by which the caller knows the request already; None: a new one.
            route: of a call over HTTP, which its span is named by.
        """
        self.request_id = request_id or new_request_id()
        self.operation = operation
        self.arrived_at = time.monotonic()
        self.arrived_unix_ms = unix_ms()
        self.server = start_server_span(tracer, f"POST {route}" if route else span, metadata)
        context = self.server.get_span_context()
        self.trace_id = trace_id_of(self.server)
        self.recorded = self.server.is_recording()
        self._tracer = tracer
        if self.recorded:
            self._context = trace.set_span_in_context(self.server, Context())
            self.server.set_attributes(
                {names.HTTP_METHOD: "POST", names.HTTP_ROUTE: route}
                if route
                else {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: span}
            )
        self._is_grpc = not route
        self._unseen = NonRecordingSpan(context) if self.recorded else self.server
        self._hops_ms: dict[str, float] = {}
        self._hop_at = self.arrived_at
        self._hop_span: Span = self._unseen
        self._row_spans: dict[str, Span] = {}

    # The call.

    def asked(self, wire: Wire, tenant: str) -> None:
        """The call asks for ``wire``, which may be invalid: what every call is searched by."""
        about_request(self.request_id, self.trace_id)
        if self.server.is_recording():
            # Text that was put in the wrong field must not get into traces.
            model = wire.model or AUTO
            self.server.set_attributes(
                {
                    names.REQUEST_ID: self.request_id,
                    names.TENANT: tenant,
                    names.GEN_AI_REQUEST_MODEL: model if subjects.is_token(model) else "invalid",
                    names.PRIORITY_CLASS: word_of(Priority, wire.priority),
                }
            )

    def valid(self, request: ValidRequest) -> None:
        """What the call asks for is valid."""
        self.request = request
        prompted = "text_completion" if request.conversation.raw else "chat"
        self.method = self.operation or prompted
        if self.server.is_recording():
            self.server.set_attributes(
                {
                    names.GEN_AI_OPERATION: self.method,
                    names.GEN_AI_SYSTEM: "sluice",
                    names.PRIORITY_CLASS: request.priority_class,
                }
            )
            if request.sampling.HasField("max_tokens"):
                self.server.set_attribute(names.GEN_AI_MAX_TOKENS, request.sampling.max_tokens)
            self.server.set_attributes(self._conversation())

    def describe(self, attributes: Attributes) -> None:
        """More that is said of the call."""
        self.server.set_attributes(attributes)

    def __enter__(self) -> "RequestLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            ended = self._ended_with(error)
            _fail(self.server, ended)
            if self._is_grpc:
                self.server.set_attribute(names.RPC_STATUS, ended.code.name)
            else:
                status = http_status(ended.code.value[0], ended.reason)
                self.server.set_attribute(names.HTTP_STATUS, status)
            if self._hop:
                _fail(self._hop_span, ended)
        if self._hop:
            self.hop("")
        self.server.end()

    def _ended_with(self, error: BaseException) -> SluiceError:
        """Tell what the caller of a call that ``error`` ended has got, or would have."""
        if isinstance(error, SluiceError):
            return error
        if isinstance(error, Exception):
            return InternalError("the gateway failed; its log has the reason")
        return self.left or Cancelled(CALLER_GONE)

    def _conversation(self) -> Attributes:
        """Name the conversation that the request is part of, as its labels do."""
        labels = {} if self.request is None else self.request.labels
        found = next((labels[name] for name in CONVERSATION_LABELS if labels.get(name)), "")
        return {names.GEN_AI_CONVERSATION: found} if found else {}

    # The prompt.

    def hop(self, name: str) -> Span:
        """The next step of the admission begins, and the one before it ends; an empty ``name``: that was the last."""
        now = time.monotonic()
        if self._hop:
            # A request whose model has no room for it is routed again.
            took_ms = (now - self._hop_at) * 1000
            self._hops_ms[self._hop] = self._hops_ms.get(self._hop, 0.0) + took_ms
            self._hop_span.end()
        self._hop, self._hop_at = name, now
        self._hop_span = self._unseen
        if name and self.recorded:
            self._hop_span = self._tracer.start_span(name, self._context)
        return self._hop_span

    def inspected(self, inspection: RequestInspection) -> None:
        """The safety policy has decided about the prompt; see the attributes."""
        verdict, self.policy = inspection.verdict, inspection.policy.version
        self.taken, self.checks = verdict.taken, inspection.checks
        self.seen = [result.text for result in inspection.inspected]
        self.blocked = bool(verdict.blocked)
        self.governed_model = verdict.governed[0] if verdict.governed else ""
        if self.recorded:
            self._hop_span.set_attributes(
                {names.SAFETY_POLICY: self.policy, **finding_attributes(verdict.taken)}
            )

    def routed(self, plan: Plan) -> None:
        """The request was routed; replaces an earlier decision."""
        self.plan = plan
        if self.recorded:
            self._hop_span.set_attributes(
                {
                    names.ROUTE_STRATEGY: plan.strategy,
                    names.ROUTE_REASON: plan.route.reason,
                    names.ROUTE_DEGRADED: plan.route.degraded,
                    names.TIER: plan.tier,
                    names.GEN_AI_RESPONSE_MODEL: plan.model,
                }
            )

    # Its rows.

    @contextmanager
    def child(
        self, name: str, attributes: Attributes, kind: SpanKind = SpanKind.INTERNAL
    ) -> Iterator[Span]:
        """A span around something beside the admission; an error that passes through is recorded."""
        span = self._unseen
        if self.recorded:
            span = self._tracer.start_span(name, self._context, kind, attributes)
        try:
            yield span
        except SluiceError as error:
            _fail(span, error)
            raise
        finally:
            span.end()

    def row_attributes(self, model: str, row_id: str) -> Attributes:
        """Describe the span of a row, or of several that are sent together."""
        return {
            names.GEN_AI_OPERATION: self.method,
            names.GEN_AI_SYSTEM: "sluice",
            names.GEN_AI_REQUEST_MODEL: model,
            names.REQUEST_ID: row_id,
            names.MESSAGING_SYSTEM: "nats",
            names.MESSAGING_OPERATION: names.SEND,
            names.MESSAGING_TEMPLATE: subjects.ALL_TASKS,
            **self._conversation(),
        }

    def row_sent(self, row_id: str, model: str) -> Mapping[str, str]:
        """A row is on its way: what its tasks carry of its span, which ends with the answer."""
        if not self.recorded:
            return headers_of(self._unseen)
        attributes = self.row_attributes(model, row_id)
        name = names.model_span(self.method, model)
        span = self._tracer.start_span(name, self._context, SpanKind.CLIENT, attributes)
        self._row_spans[row_id] = span
        return headers_of(span)

    # The answer.

    def started(self, started: Started) -> None:
        """The caller is told who answers."""
        if self.server.is_recording():
            self.server.set_attributes(
                {
                    names.REQUEST_ID: started.request_id,
                    names.ROUTE_STRATEGY: word_of(RouteStrategy, started.route.strategy),
                    names.GEN_AI_INPUT_TOKENS: started.prompt_tokens,
                }
            )

    def kept(self, answer: Replay) -> None:
        """The request gets the answer of an earlier one."""
        self.finished, self.model = answer.finished, answer.finished.model

    def ended(self, answer: Answer, now: float) -> None:
        """The answer to the request has ended."""
        self.rows, self.model = answer.attempts, answer.current.model
        self.finished, self.first_token_at = answer.finished, answer.first_token_at
        self.ended_at = now
        self.error = "" if answer.error is None else answer.error.reason
        self.guards = None if answer.guards is None else answer.guards.checks
        output = answer.current.output
        if answer.finished is not None and output is not None:
            self.answer_taken = output.outcome().taken
        for row_id, span in self._row_spans.items():
            attributes, ago_s = _row_end(answer, now, row_id)
            span.set_attributes(attributes)
            if answer.error is not None and row_id == answer.current.row_id:
                _fail(span, answer.error)
            self._add_content(span, answer, row_id)
            span.end(time.time_ns() - int(ago_s * 1e9))
        self._row_spans.clear()

    def _add_content(self, span: Span, answer: Answer, row_id: str) -> None:
        """Add what was asked and answered, as the model and the caller saw it, where the operator wants that."""
        wanted, row = content_capture(), answer.current
        if not wanted or row.row_id != row_id or self.request is None:
            return
        turns = zip(self.request.conversation.turns, self.seen, strict=False)
        asked = [_message(turn.role, seen) for turn, seen in turns]
        answered = _message("assistant", answer.text_before(row.completion_tokens))
        if answer.finished is not None:
            answered["finish_reason"] = word_of(FinishReason, answer.finished.reason)
        content = {
            names.GEN_AI_INPUT_MESSAGES: json.dumps(asked, ensure_ascii=False),
            names.GEN_AI_OUTPUT_MESSAGES: json.dumps([answered], ensure_ascii=False),
        }
        if SPAN in wanted:
            span.set_attributes(content)
        if EVENT in wanted:
            span.add_event(names.GEN_AI_DETAILS, content)

    def rows_ended(
        self, plan: Plan, rows: Sequence[Row], usage: Usage, error: str, now: float
    ) -> None:
        """All rows of a request about texts have ended; ``error`` is the reason of the one that failed it."""
        self.rows, self.model, self.error, self.ended_at = rows, plan.model, error, now
        if self.server.is_recording():
            self.server.set_attributes(
                {
                    names.GEN_AI_RESPONSE_MODEL: plan.model,
                    **usage_attributes(usage, sum(row.cost for row in rows)),
                    names.TIER: plan.tier,
                    names.ROUTE_STRATEGY: plan.strategy,
                    names.CACHED: usage.cached,
                }
            )
        last = next((one.final.timings for one in reversed(rows) if one.final), RowTimings())
        self.finished = Finished(
            reason=FINISH_REASON_UNSPECIFIED if error else FINISH_REASON_STOP,
            timings=self.timings(last, now, now),
            usage=usage,
        )

    def delivered(self, answer: Answer | Replay, models: Mapping[str, ModelSettings]) -> None:
        """The call has read of ``answer`` what it will read."""
        if self.server.is_recording():
            self.server.set_attributes(_end_attributes(answer, models))

    def timings(self, row: RowTimings, first_token_at: float, now: float) -> Timings:
        """The timings of an answer that ends ``now``."""
        made, hops = Timings(), self._hops_ms
        total_ms = (now - self.arrived_at) * 1000
        admitted_ms = (self._hop_at - self.arrived_at) * 1000
        worked_ms = row.queue_ms + row.batch_ms + row.prefill_ms + row.decode_ms
        named_ms = admitted_ms + self.publish_ms + worked_ms
        for message, ms in (  # a message that is made apart is copied
            (made.admission, admitted_ms - sum(hops.values())),
            (made.safety, hops.get(names.SPAN_SAFETY, 0.0)),
            (made.route, hops.get(names.SPAN_ROUTE, 0.0)),
            (made.tokenize, hops.get(names.SPAN_TOKENIZE, 0.0)),
            (made.publish, self.publish_ms),
            (made.queue, row.queue_ms),
            (made.batch, row.batch_ms),
            (made.prefill, row.prefill_ms),
            (made.decode, row.decode_ms),
            (made.delivery, max(0.0, total_ms - named_ms)),
            (made.time_to_first_token, (first_token_at - self.arrived_at) * 1000),
            (made.total, total_ms),
        ):
            set_duration(message, ms)
        return made


def untraced() -> RequestLog:
    """The log of a request that only checks or counts a text: nobody sees it."""
    return RequestLog(_NO_TRACER, "", _NO_HEADERS)


_NO_TRACER: Final = NoOpTracer()


def new_request_id() -> str:
    """A unique name; 15 random bytes are 20 url-safe characters."""
    return f"req-{secrets.token_urlsafe(15)}"


def finding_attributes(taken: Mapping[tuple[str, Action], int]) -> Attributes:
    """Attributes for findings by rule and action: the pairs, and a count for each action."""
    if not taken:
        return {}
    counts: Counter[str] = Counter()
    for (_, action), count in taken.items():
        counts[names.FINDING_COUNT + action.name.lower()] += count
    pairs = sorted(f"{rule}:{action.name.lower()}" for rule, action in taken)
    return {names.FINDINGS: pairs, **counts}


def _message(role: str, text: str) -> dict[str, Any]:
    """Write a message in the form of the conventions for generative AI."""
    if len(text) > CONTENT_CHARS_MAX:
        text = f"{text[:CONTENT_CHARS_MAX]}..."
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _fail(span: Span, error: SluiceError) -> None:
    """Mark ``span`` as failed with ``error``, whose message may quote what the caller sent: that is left out."""
    if span.is_recording():
        span.set_attribute(names.ERROR_REASON, error.reason)
        message = _QUOTED.sub("'...'", error.message)[:ERROR_CHARS_MAX]
        span.set_status(Status(StatusCode.ERROR, f"{error.reason}: {message}"))


def _end_attributes(answer: Answer | Replay, models: Mapping[str, ModelSettings]) -> Attributes:
    """How the answer ended, as far as it has, for the span of the call."""
    finished = answer.finished
    attributes: dict[str, AttributeValue]
    if isinstance(answer, Answer):
        model, attributes = answer.current.model, _course(answer)
    else:
        model = answer.finished.model
        attributes = {names.MODELS_TRIED: [one.model for one in answer.finished.attempts]}
    attributes[names.GEN_AI_RESPONSE_MODEL] = model
    if model in models:
        attributes[names.TIER] = models[model].tier
    if finished is not None:
        attributes[names.GEN_AI_FINISH_REASONS] = [word_of(FinishReason, finished.reason)]
        cost = sum(row.cost for row in answer.attempts) if isinstance(answer, Answer) else 0.0
        attributes |= usage_attributes(finished.usage, cost)
        if finished.usage.cached:
            attributes[names.CACHED] = True
    return attributes


def usage_attributes(usage: Usage, cost: float) -> dict[str, AttributeValue]:
    """Count tokens, and what they cost."""
    attributes: dict[str, AttributeValue] = {
        names.GEN_AI_INPUT_TOKENS: usage.prompt_tokens,
        names.GEN_AI_OUTPUT_TOKENS: usage.completion_tokens,
    }
    if usage.cached_prompt_tokens:
        attributes[names.GEN_AI_CACHED_TOKENS] = usage.cached_prompt_tokens
    if cost:
        attributes[names.GEN_AI_COST] = cost
    return attributes


def _course(answer: Answer) -> dict[str, AttributeValue]:
    """What happened while the answer was computed."""
    rows = answer.attempts
    attributes: dict[str, AttributeValue] = {names.MODELS_TRIED: [one.model for one in rows]}
    if recovered := [one for one in rows if one.recoveries]:
        attributes[names.RECOVERED] = sum(one.recoveries for one in recovered)
        attributes[names.RECOVERED_FROM] = recovered[-1].recovered_from
        attributes[names.RECOVERED_GAP_S] = max(one.recovered_gap_s for one in recovered)
    if reasons := [one.escalation_reason for one in rows if one.escalation_reason]:
        attributes[names.ROUTE_ESCALATED] = reasons[-1]
    if answer.first_token_at is not None:
        attributes[names.GEN_AI_TTFT] = answer.first_token_at - answer.request.arrived_at
    return attributes


def _row_end(answer: Answer, now: float, row_id: str) -> tuple[Attributes, float]:
    """How a row of ``answer``, which has ended now, ended, for its span; and how many seconds ago."""
    row = next((one for one in answer.attempts if one.row_id == row_id), None)
    if row is None:
        return {names.END: "unused"}, 0.0
    last = row is answer.current
    end = "answered" if answer.error is None else answer.error.reason.lower()
    attributes: dict[str, AttributeValue] = {
        names.END: end if last else "escalated",
        names.ATTEMPT: row.attempt,
        names.GEN_AI_RESPONSE_MODEL: row.model,
        **usage_attributes(row.usage, row.cost),
    }
    if row.hint_tokens:
        attributes[names.HINT_TOKENS] = row.hint_tokens
    if last and answer.finished is not None and row.output is not None:
        outcome = row.output.outcome()
        attributes[names.SAFETY_POLICY] = outcome.policy
        attributes |= finding_attributes(outcome.taken)
        if outcome.moves:
            attributes[names.DRY_RUN] = move_labels(outcome.moves)
    return attributes, 0.0 if last else now - row.left_at(now)
