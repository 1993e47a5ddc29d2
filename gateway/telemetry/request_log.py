"""The log of one request: each step reports once what happened, to one object.

Spans are made with the reports (`sluice/telemetry/names.py` lists them; contexts are passed explicitly). The record and
audit entry of a request (`gateway.telemetry.request_record`) and its metrics (`gateway.telemetry.metrics`) are made of
its log.
"""

import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.util.types import AttributeValue
from typing_extensions import override

from gateway.routing.router import Plan
from gateway.safety.findings import Action, move_labels
from gateway.safety.guards.checks import Checks, Decided
from gateway.safety.inspector import RequestInspection
from gateway.streaming.answer_stream import AnswerStream
from gateway.streaming.idempotency import Replay
from gateway.streaming.model_run import ModelRun
from gateway.validation.requests import ValidRequest
from sluice.defaults import AUTO
from sluice.errors import Cancelled, InternalError, SluiceError
from sluice.internal.v1.frame_pb2 import TaskTimings
from sluice.openai.errors import http_status
from sluice.settings.models import ModelSettings
from sluice.telemetry import logs, names
from sluice.telemetry.environment import EVENT, SPAN, content_capture
from sluice.telemetry.tracing import headers_of, start_server_span
from sluice.v1 import inference_pb2 as pb
from sluice.v1.admin_pb2 import ShadowRun
from sluice.wire import subjects
from sluice.wire.clock import set_duration
from sluice.wire.enums import word_of

Attributes = Mapping[str, AttributeValue]
Wire = pb.GenerateRequest | pb.EmbedRequest | pb.RerankRequest | pb.ScoreRequest

CALLER_GONE: Final = "the caller has gone"
"""The message of the error of a call that its caller cancelled."""
CONVERSATION_LABELS: Final = ("conversation_id", "session_id", "thread_id")
"""Labels (metadata in OpenAI's API) that may name a conversation; the first that is set counts."""
ERROR_CHARS_MAX: Final = 500
"""Longest error message in a trace, in characters."""
_QUOTED: Final = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
CONTENT_CHARS_MAX: Final = 65_536
"""Longest message of a conversation in a trace, in characters; collectors take 4 MiB at a time."""
_NO_HEADERS: Final[Mapping[str, str]] = {}


class RequestLog(AbstractContextManager["RequestLog"]):
    """What happened to one request. As a context manager it ends the span of the request's call.

    Attributes:
        request_id: The id of the request.
        operation: How telemetry and records name the method; empty for a prompt or a chat.
        arrived_at: When it came, in monotonic seconds.
        arrived_unix_ms: The same moment, in milliseconds since the epoch.
        server: The span of the call.
        trace_id: The trace, 32 hex digits.
        recorded: Whether the spans of its steps are recorded; else at most that of the call is.
        request: The valid request; None if there is none.
        method: The name of the method in spans and metrics, also for a prompt or a chat.
        policy: Version of the safety policy that decided about the prompt.
        findings: Findings in the prompt, by rule and action.
        blocked: Whether the policy blocks the prompt.
        governed_model: The model that must answer by the policy; may be empty.
        seen: The texts as a model would see them.
        checks: Checks of the token classifiers whose findings were decided with those of the rules.
        plan: The routing decision.
        answer_key: The key that the answer is cached by.
        model: The model that answers, or answered; empty if none was asked.
        runs: The runs that worked on it; None if it was refused, or got an earlier answer.
        guards: The checks of guard models.
        answer_findings: Findings in the answer, by rule and action.
        finished: How the answer ended.
        error: The reason of the error that ended the request; may be empty.
        first_token_at: When callers could see something, in monotonic seconds.
        ended_at: When it ended, in monotonic seconds.
        shadows: Models that were given the request as well.
        left: Why the caller did not wait for the end.
    """

    request: ValidRequest | None = None
    method = ""
    policy = ""
    findings: Mapping[tuple[str, Action], int] = {}
    blocked = False
    governed_model = ""
    seen: Sequence[str] = ()
    checks: Sequence[Decided] = ()
    plan: Plan | None = None
    answer_key = ""
    model = ""
    runs: Sequence[ModelRun] | None = None
    guards: Checks | None = None
    answer_findings: Mapping[tuple[str, Action], int] = {}
    finished: pb.Finished | None = None
    error = ""
    first_token_at: float | None = None
    ended_at = 0.0
    shadows: Sequence[ShadowRun] = ()
    left: SluiceError | None = None
    _step = ""

    def __init__(
        self,
        tracer: trace.Tracer,
        span: str,
        metadata: Mapping[str, str],
        operation: str = "",
        request_id: str | None = None,
        route: str = "",
    ) -> None:
        """Begin the log of a call.

        Args:
            tracer: Makes its spans.
            span: The name of its gRPC method.
            metadata: Metadata of the call, with its trace context.
            operation: See the class.
            request_id: The id that the caller knows the request by; None for a new one.
            route: The path of an HTTP call, which names its span.
        """
        self.request_id = request_id or new_request_id()
        self.operation = operation
        self.arrived_at = time.monotonic()
        self.arrived_unix_ms = time.time_ns() // 1_000_000
        self.server = start_server_span(tracer, f"POST {route}" if route else span, metadata)
        context = self.server.get_span_context()
        self.trace_id = trace.format_trace_id(context.trace_id)
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
        self._unseen = trace.NonRecordingSpan(context) if self.recorded else self.server
        self._steps_ms: dict[str, float] = {}
        self._step_at = self.arrived_at
        self._step_span: trace.Span = self._unseen
        self._run_spans: dict[str, trace.Span] = {}

    # The call.

    def received(self, wire: Wire, tenant: str) -> None:
        """Take the message of the call, which may be invalid: attributes that every call is searched by.

        From now on log lines of this task have the ids of request and trace.
        """
        logs.subject.set((self.request_id, self.trace_id))
        if self.server.is_recording():
            # Text that was put in the wrong field must not get into traces.
            model = wire.model or AUTO
            self.server.set_attributes(
                {
                    names.REQUEST_ID: self.request_id,
                    names.TENANT: tenant,
                    names.GEN_AI_REQUEST_MODEL: model if subjects.is_token(model) else "invalid",
                    names.PRIORITY_CLASS: word_of(pb.Priority, wire.priority),
                }
            )

    def validated(self, request: ValidRequest) -> None:
        """Take the valid request."""
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
        """Set attributes of the span of the call."""
        self.server.set_attributes(attributes)

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            sent = self._error_sent(error)
            _fail(self.server, sent)
            if self._is_grpc:
                self.server.set_attribute(names.RPC_STATUS, sent.code.name)
            else:
                status = http_status(sent.code.value[0], sent.reason)
                self.server.set_attribute(names.HTTP_STATUS, status)
            if self._step:
                _fail(self._step_span, sent)
        if self._step:
            self.step("")
        self.server.end()

    def _error_sent(self, error: BaseException) -> SluiceError:
        """Return what the caller of a call that `error` ended has got, or would have."""
        if isinstance(error, SluiceError):
            return error
        if isinstance(error, Exception):
            return InternalError("the gateway failed; its log has the reason")
        return self.left or Cancelled(CALLER_GONE)

    def _conversation(self) -> Attributes:
        """Return the attribute that names the conversation of the request, if a label does."""
        labels = {} if self.request is None else self.request.labels
        ids = [labels[name] for name in CONVERSATION_LABELS if labels.get(name)]
        return {names.GEN_AI_CONVERSATION: ids[0]} if ids else {}

    # The prompt.

    def step(self, name: str) -> trace.Span:
        """Begin the next step of the admission, end the one before, and return its span; an empty name is the end."""
        now = time.monotonic()
        if self._step:
            # A request whose model has no room for it is routed again.
            took_ms = (now - self._step_at) * 1000
            self._steps_ms[self._step] = self._steps_ms.get(self._step, 0.0) + took_ms
            self._step_span.end()
        self._step, self._step_at = name, now
        self._step_span = self._unseen
        if name and self.recorded:
            self._step_span = self._tracer.start_span(name, self._context)
        return self._step_span

    def inspected(self, inspection: RequestInspection) -> None:
        """Take what the safety policy has decided about the prompt."""
        self.policy = inspection.policy.version
        self.findings, self.checks = inspection.counts, inspection.checks
        self.seen = inspection.edited
        self.blocked = bool(inspection.blocked)
        self.governed_model = inspection.governed[0] if inspection.governed else ""
        if self.recorded:
            self._step_span.set_attributes(
                {names.SAFETY_POLICY: self.policy, **finding_attributes(self.findings)}
            )

    def routed(self, plan: Plan) -> None:
        """Take the routing decision; it replaces an earlier one."""
        self.plan = plan
        if self.recorded:
            self._step_span.set_attributes(
                {
                    names.ROUTE_STRATEGY: plan.strategy_word,
                    names.ROUTE_REASON: plan.reason,
                    names.ROUTE_DEGRADED: plan.degraded,
                    names.TIER: plan.candidates[0].tier,
                    names.GEN_AI_RESPONSE_MODEL: plan.model,
                }
            )

    # Its runs.

    @contextmanager
    def child(
        self, name: str, attributes: Attributes, kind: trace.SpanKind = trace.SpanKind.INTERNAL
    ) -> Iterator[trace.Span]:
        """Yield a span around work outside the admission; a SluiceError that passes through is recorded."""
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

    def run_attributes(self, model: str, run_id: str) -> Attributes:
        """Return the attributes of the span of a run, or of several that are sent together."""
        return {
            names.GEN_AI_OPERATION: self.method,
            names.GEN_AI_SYSTEM: "sluice",
            names.GEN_AI_REQUEST_MODEL: model,
            names.REQUEST_ID: run_id,
            names.MESSAGING_SYSTEM: "nats",
            names.MESSAGING_OPERATION: names.SEND,
            names.MESSAGING_TEMPLATE: subjects.ALL_TASKS,
            **self._conversation(),
        }

    def run_sent(self, run_id: str, model: str) -> Mapping[str, str]:
        """Begin the span of a run that is sent, and return the trace headers of its tasks; it ends with the answer."""
        if not self.recorded:
            return headers_of(self._unseen)
        attributes = self.run_attributes(model, run_id)
        name = f"{self.method} {model}"
        span = self._tracer.start_span(name, self._context, trace.SpanKind.CLIENT, attributes)
        self._run_spans[run_id] = span
        return headers_of(span)

    # The answer.

    def started(self, started: pb.Started) -> None:
        """Take the first event of the answer."""
        if self.server.is_recording():
            self.server.set_attributes(
                {
                    names.REQUEST_ID: started.request_id,
                    names.ROUTE_STRATEGY: word_of(pb.RouteStrategy, started.route.strategy),
                    names.GEN_AI_INPUT_TOKENS: started.prompt_tokens,
                }
            )

    def replayed(self, answer: Replay) -> None:
        """Take the answer of an earlier request, which this one gets."""
        self.finished, self.model = answer.finished, answer.finished.model

    def ended(self, answer: AnswerStream, now: float) -> None:
        """Take the answer to the request, which has ended."""
        self.runs, self.model = answer.runs, answer.current.model
        self.finished, self.first_token_at = answer.finished, answer.first_token_at
        self.ended_at = now
        self.error = "" if answer.error is None else answer.error.reason
        self.guards = answer.checks
        output = answer.current.output
        if answer.finished is not None and output is not None:
            self.answer_findings = output.outcome().counts
        for run_id, span in self._run_spans.items():
            attributes, ago_s = _run_end(answer, now, run_id)
            span.set_attributes(attributes)
            if answer.error is not None and run_id == answer.current.run_id:
                _fail(span, answer.error)
            self._add_content(span, answer, run_id)
            span.end(time.time_ns() - int(ago_s * 1e9))
        self._run_spans.clear()

    def _add_content(self, span: trace.Span, answer: AnswerStream, run_id: str) -> None:
        """Add prompt and answer, as the model and the caller saw them, if the operator wants that."""
        targets, run = content_capture(), answer.current
        if not targets or run.run_id != run_id or self.request is None:
            return
        turns = zip(self.request.conversation.turns, self.seen, strict=False)
        prompt = [_message(turn.role, seen) for turn, seen in turns]
        message = _message("assistant", answer.text_before(run.completion_tokens))
        if answer.finished is not None:
            message["finish_reason"] = word_of(pb.FinishReason, answer.finished.reason)
        content = {
            names.GEN_AI_INPUT_MESSAGES: json.dumps(prompt, ensure_ascii=False),
            names.GEN_AI_OUTPUT_MESSAGES: json.dumps([message], ensure_ascii=False),
        }
        if SPAN in targets:
            span.set_attributes(content)
        if EVENT in targets:
            span.add_event(names.GEN_AI_DETAILS, content)

    def runs_ended(
        self, plan: Plan, runs: Sequence[ModelRun], usage: pb.Usage, error: str, now: float
    ) -> None:
        """Take the runs of a request about texts, which have ended; `error` is the reason of the one that failed it."""
        self.runs, self.model, self.error, self.ended_at = runs, plan.model, error, now
        if self.server.is_recording():
            self.server.set_attributes(
                {
                    names.GEN_AI_RESPONSE_MODEL: plan.model,
                    **usage_attributes(usage, sum(run.cost for run in runs)),
                    names.TIER: plan.candidates[0].tier,
                    names.ROUTE_STRATEGY: plan.strategy_word,
                    names.CACHED: usage.cached,
                }
            )
        finals = [run.final.timings for run in runs if run.final]
        last = finals[-1] if finals else TaskTimings()
        self.finished = pb.Finished(
            reason=pb.FINISH_REASON_UNSPECIFIED if error else pb.FINISH_REASON_STOP,
            timings=self.timings(last, sum(run.queued_s for run in runs), now, now),
            usage=usage,
        )

    def delivered(self, answer: AnswerStream | Replay, models: Mapping[str, ModelSettings]) -> None:
        """Take the end of a call: it reads no more of `answer`."""
        if self.server.is_recording():
            self.server.set_attributes(_end_attributes(answer, models))

    def timings(
        self, run: TaskTimings, queued_s: float, first_token_at: float, now: float
    ) -> pb.Timings:
        """Return the timings of an answer that ends `now`; `queued_s`: how long its runs waited for a batcher."""
        timings, steps_ms = pb.Timings(), self._steps_ms
        total_ms = (now - self.arrived_at) * 1000
        admitted_ms = (self._step_at - self.arrived_at) * 1000
        worked_ms = run.queue_ms + run.batch_ms + run.prefill_ms + run.decode_ms
        named_ms = admitted_ms + queued_s * 1000 + worked_ms
        for message, ms in (  # set in place: a message that is passed in is copied
            (timings.admission, admitted_ms - sum(steps_ms.values())),
            (timings.safety, steps_ms.get(names.SPAN_SAFETY, 0.0)),
            (timings.route, steps_ms.get(names.SPAN_ROUTE, 0.0)),
            (timings.tokenize, steps_ms.get(names.SPAN_TOKENIZE, 0.0)),
            (timings.publish, queued_s * 1000),
            (timings.queue, run.queue_ms),
            (timings.batch, run.batch_ms),
            (timings.prefill, run.prefill_ms),
            (timings.decode, run.decode_ms),
            (timings.delivery, max(0.0, total_ms - named_ms)),
            (timings.time_to_first_token, (first_token_at - self.arrived_at) * 1000),
            (timings.total, total_ms),
        ):
            set_duration(message, ms)
        return timings


def untraced() -> RequestLog:
    """Return the log of a request that only checks or counts a text: it is not recorded."""
    return RequestLog(_NO_TRACER, "", _NO_HEADERS)


_NO_TRACER: Final = trace.NoOpTracer()


def new_request_id() -> str:
    """Return a unique id; 15 random bytes are 20 url-safe characters."""
    return f"req-{secrets.token_urlsafe(15)}"


def finding_attributes(findings: Mapping[tuple[str, Action], int]) -> Attributes:
    """Return the attributes for findings by rule and action: the pairs, and a count for each action."""
    if not findings:
        return {}
    counts: Counter[str] = Counter()
    for (_, action), count in findings.items():
        counts[names.FINDING_COUNT + action.name.lower()] += count
    pairs = sorted(f"{rule}:{action.name.lower()}" for rule, action in findings)
    return {names.FINDINGS: pairs, **counts}


def _message(role: str, text: str) -> dict[str, Any]:
    """Return a message in the form of the conventions for generative AI."""
    if len(text) > CONTENT_CHARS_MAX:
        text = f"{text[:CONTENT_CHARS_MAX]}..."
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _fail(span: trace.Span, error: SluiceError) -> None:
    """Mark `span` as failed with `error`, without what its message may quote of the caller's text."""
    if span.is_recording():
        span.set_attribute(names.ERROR_REASON, error.reason)
        message = _QUOTED.sub("'...'", error.message)[:ERROR_CHARS_MAX]
        span.set_status(trace.Status(trace.StatusCode.ERROR, f"{error.reason}: {message}"))


def _end_attributes(
    answer: AnswerStream | Replay, models: Mapping[str, ModelSettings]
) -> Attributes:
    """Return how the answer ended, as far as it has, for the span of the call."""
    finished = answer.finished
    attributes: dict[str, AttributeValue]
    if isinstance(answer, AnswerStream):
        model, attributes = answer.current.model, _course(answer)
    else:
        model = answer.finished.model
        attributes = {names.MODELS_TRIED: [attempt.model for attempt in answer.finished.attempts]}
    attributes[names.GEN_AI_RESPONSE_MODEL] = model
    if model in models:
        attributes[names.TIER] = models[model].tier
    if finished is not None:
        attributes[names.GEN_AI_FINISH_REASONS] = [word_of(pb.FinishReason, finished.reason)]
        cost = sum(run.cost for run in answer.runs) if isinstance(answer, AnswerStream) else 0.0
        attributes |= usage_attributes(finished.usage, cost)
        if finished.usage.cached:
            attributes[names.CACHED] = True
    return attributes


def usage_attributes(usage: pb.Usage, cost: float) -> dict[str, AttributeValue]:
    """Return the attributes for tokens, and what they cost."""
    attributes: dict[str, AttributeValue] = {
        names.GEN_AI_INPUT_TOKENS: usage.prompt_tokens,
        names.GEN_AI_OUTPUT_TOKENS: usage.completion_tokens,
    }
    if usage.cached_prompt_tokens:
        attributes[names.GEN_AI_CACHED_TOKENS] = usage.cached_prompt_tokens
    if cost:
        attributes[names.GEN_AI_COST] = cost
    return attributes


def _course(answer: AnswerStream) -> dict[str, AttributeValue]:
    """Return what happened while the answer was computed."""
    runs = answer.runs
    attributes: dict[str, AttributeValue] = {names.MODELS_TRIED: [run.model for run in runs]}
    if recovered := [run for run in runs if run.recoveries]:
        attributes[names.RECOVERED] = sum(run.recoveries for run in recovered)
        attributes[names.RECOVERED_FROM] = recovered[-1].recovered_from
        attributes[names.RECOVERED_GAP_S] = max(run.recovered_gap_s for run in recovered)
    if reasons := [run.escalation_reason for run in runs if run.escalation_reason]:
        attributes[names.ROUTE_ESCALATED] = reasons[-1]
    if answer.first_token_at is not None:
        attributes[names.GEN_AI_TTFT] = answer.first_token_at - answer.arrived_at
    return attributes


def _run_end(answer: AnswerStream, now: float, run_id: str) -> tuple[Attributes, float]:
    """Return how a run of an answer that has ended now ended, for its span; and how many seconds ago."""
    run = next((run for run in answer.runs if run.run_id == run_id), None)
    if run is None:
        return {names.END: "unused"}, 0.0
    last = run is answer.current
    end = "answered" if answer.error is None else answer.error.reason.lower()
    attributes: dict[str, AttributeValue] = {
        names.END: end if last else "escalated",
        names.ATTEMPT: run.attempt_number,
        names.GEN_AI_RESPONSE_MODEL: run.model,
        **usage_attributes(run.usage, run.cost),
    }
    if run.hint_tokens:
        attributes[names.HINT_TOKENS] = run.hint_tokens
    if last and answer.finished is not None and run.output is not None:
        outcome = run.output.outcome()
        attributes[names.SAFETY_POLICY] = outcome.policy
        attributes |= finding_attributes(outcome.counts)
        if outcome.moves:
            attributes[names.DRY_RUN] = move_labels(outcome.moves)
    return attributes, 0.0 if last else now - run.given_up_at(now)
