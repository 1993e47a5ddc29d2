"""One call of Generate, from the request to its last event."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from opentelemetry.trace import SpanKind, Tracer
from opentelemetry.util.types import AttributeValue

from gateway.admission.class_limiter import ClassLimiter
from gateway.admission.pipeline import Admission, AdmittedRequest
from gateway.admission.prompts import PreparedPrompt
from gateway.admission.usage import UsageAccounting
from gateway.records.record_builder import RecordBuilder, RecordBuilders
from gateway.safety.dry_run import move_labels
from gateway.streaming.endings import Hops
from gateway.streaming.leg import Leg
from gateway.streaming.reader import Reader
from gateway.streaming.registry import Registry
from gateway.streaming.states import StreamState
from gateway.streaming.stream import Stream
from gateway.streaming.ticket import Ticket
from gateway.telemetry.drift import DriftMonitor
from gateway.telemetry.metrics import RequestMetrics
from gateway.telemetry.spans import CallSpans, finding_attributes
from gateway.upstream.dispatch import Dispatch
from gateway.upstream.escalation import Cascading, Escalation
from gateway.upstream.guard_client import Asking
from gateway.upstream.guard_runner import Asked, Guarding
from gateway.upstream.shadows import Ended, Shadowing
from gateway.upstream.tasks import new_request_id, open_stream, started_of, task_of
from gateway.validation.requests import ValidRequest, tenant_of, validate
from sluice.defaults import AUTO
from sluice.errors import DeadlinePassed, SluiceError
from sluice.internal.v1.task_pb2 import Task
from sluice.settings import GatewaySettings
from sluice.telemetry import names
from sluice.telemetry.tracing import headers_of
from sluice.v1.inference_pb2 import (
    NOTICE_KIND_REPLAYED,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    Notice,
    Started,
)
from sluice.wire import subjects
from sluice.wire.enums import word_of

_REPLAYED: Final = Notice(
    kind=NOTICE_KIND_REPLAYED, message="the answer to an earlier request with this idempotency key"
)


@dataclass(frozen=True)
class Generator:
    """Answers calls; holds what all of them share."""

    settings: GatewaySettings
    limiter: ClassLimiter
    admission: Admission
    registry: Registry
    dispatch: Dispatch
    records: RecordBuilders
    usage: UsageAccounting
    cascading: Cascading
    asking: Asking
    shadowing: Shadowing
    drift: DriftMonitor
    metrics: RequestMetrics
    tracer: Tracer

    def ended(
        self,
        request: ValidRequest,
        admitted: AdmittedRequest,
        record: RecordBuilder,
        spans: CallSpans,
        stream: Stream,
    ) -> None:
        """A stream ended: writes its record, and learns from it."""
        if stream.ticket.cascade is not None:
            stream.ticket.cascade.ended()
        if stream.ticket.guards is not None:
            stream.ticket.guards.close()
        record.finish(stream)
        self.usage.ended(request.tenant, stream, time.monotonic())
        self.shadowing.ended(Ended(request, admitted, record, spans, stream))
        self.metrics.ended(request, stream)

    async def answer(
        self, request: GenerateRequest, context: Any, metadata: Mapping[str, str]
    ) -> None:
        """Writes all events of the answer to ``context``, a grpc.aio ServicerContext.

        Raises:
            SluiceError: the call ends with it.
        """
        spans = CallSpans(self.tracer, names.SPAN_GENERATE, metadata)
        with spans.whole():
            await _Call(self, spans, context).run(request, tenant_of(metadata))


class _Call:
    """The state of one call."""

    def __init__(self, shared: Generator, spans: CallSpans, context: Any) -> None:
        self._shared = shared
        self._registry = shared.registry
        self._spans = spans
        self._context = context
        self._hops = Hops(arrived_at=time.monotonic())
        self._news = asyncio.Event()
        self._replayed = False

    async def run(self, wire: GenerateRequest, tenant: str) -> None:
        catalog, settings = self._shared.admission.catalog, self._shared.settings
        remaining_s = self._context.time_remaining()
        request = validate(wire, catalog, remaining_s, settings.default_timeout_s, tenant)
        self._record_request(wire, request)
        try:
            async with asyncio.timeout(request.timeout_s):
                await self._answer(request)
        except TimeoutError:
            raise DeadlinePassed("the deadline passed before the answer was complete") from None

    async def _answer(self, request: ValidRequest) -> None:
        stream = self._find(request)
        if stream is None:
            async with self._shared.limiter.slot(request.priority_class):
                # Another call with the same key may have come while this one waited.
                stream = self._find(request) or await self._admit(request)
        self._replayed = stream.finished is not None and stream.first_frame_at is not None
        limit = self._shared.settings.reader_buffer_tokens
        reader = Reader(len(request.resume), limit, self._news.set)
        self._registry.join(stream, reader, request.resume_model)
        joined_at = time.monotonic()
        try:
            await self._deliver(stream, reader, request.resume_model)
        except SluiceError as error:
            raise error.of_request(stream.request_id) from error
        finally:
            self._registry.leave(stream, reader)
            self._record_stream(stream, joined_at)

    def _find(self, request: ValidRequest) -> Stream | None:
        now = time.monotonic()
        return self._registry.find(
            request.key, request.fingerprint, request.resume, request.resume_model, now
        )

    async def _admit(self, request: ValidRequest) -> Stream:
        """A new stream, its task on the way. Nothing is awaited after it is open: the caller's `leave` closes it."""
        record = self._shared.records.open(request, new_request_id(), self._spans.trace_id)
        try:
            admitted = await self._shared.admission.admit(request, self._spans, self._hops, record)
        except SluiceError as error:
            record.finish_with_error(error)
            self._shared.metrics.refused(request.priority_class, error.reason)
            raise error.of_request(record.request_id) from error
        # Another call with the same key may have come while this one was tokenized.
        found = self._find(request)
        if found is not None:
            return found
        for score in admitted.plan.scores:
            self._shared.drift.scored(score)
        stream = self._open(request, admitted, record)
        self._registry.open(stream)
        if stream.ended:
            self._registry.close(stream, time.monotonic())
        else:
            self._start(request, stream, admitted)
        return stream

    def _start(self, request: ValidRequest, stream: Stream, admitted: AdmittedRequest) -> None:
        """The row and the checks of its prompt run side by side."""
        if not stream.row_ended:
            self._submit(request, stream, admitted.first)
            self._registry.stand_by(stream, time.monotonic())
        if stream.ticket.guards is not None:
            stream.ticket.guards.begin(stream)

    def _guards(self, request: ValidRequest, admitted: AdmittedRequest) -> Guarding | None:
        if not admitted.guards:
            return None
        send = partial(self._submit_governed, request)
        return Guarding(self._shared.asking, Asked(request, admitted, self._spans, send))

    def _open(
        self, request: ValidRequest, admitted: AdmittedRequest, record: RecordBuilder
    ) -> Stream:
        stall_s = self._shared.settings.stall_s
        cascade = None
        if admitted.second is not None:
            send = partial(self._submit_second, request)
            cascade = Escalation(self._shared.cascading, request, admitted, record, stall_s, send)
        ticket = Ticket(
            started=started_of(record.request_id, admitted, self._spans.trace_id),
            deadline=self._hops.arrived_at + request.timeout_s,
            with_logprobs=request.sampling.HasField("logprobs"),
            hops=self._hops,
            key=request.key,
            fingerprint=request.fingerprint,
            on_end=_Once(partial(self._shared.ended, request, admitted, record, self._spans)),
            cascade=cascade,
            guards=self._guards(request, admitted),
        )
        return open_stream(request, admitted, ticket, stall_s)

    def _submit(self, request: ValidRequest, stream: Stream, prepared: PreparedPrompt) -> None:
        dispatch = self._shared.dispatch
        task = task_of(stream, request, prepared, dispatch.gateway_id)
        dispatch.submit(task.request_id, self._publish(stream, task))

    def _submit_governed(
        self, request: ValidRequest, stream: Stream, prepared: PreparedPrompt
    ) -> None:
        self._submit_second(request, stream, stream.leg, prepared)

    def _submit_second(
        self, request: ValidRequest, stream: Stream, leg: Leg, prepared: PreparedPrompt
    ) -> None:
        """As `_submit`, for another row than the first; what goes wrong is the stream's business."""
        self._shared.admission.sent(prepared, request.priority_class)
        dispatch = self._shared.dispatch
        task = task_of(stream, request, prepared, dispatch.gateway_id, leg)
        dispatch.submit(task.request_id, self._publish_second(stream, task))

    async def _publish_second(self, stream: Stream, task: Task) -> None:
        try:
            await self._publish(stream, task)
        except SluiceError as error:
            self._registry.unpublished(stream, task.request_id, error, time.monotonic())

    async def _publish(self, stream: Stream, task: Task) -> None:
        start = time.monotonic()
        attributes = {
            names.MESSAGING_SYSTEM: "nats",
            names.MESSAGING_OPERATION: "send",
            names.MESSAGING_DESTINATION: subjects.tasks(task.model, task.priority_class),
        }
        with self._spans.hop(names.SPAN_PUBLISH, SpanKind.PRODUCER, attributes) as span:
            await self._shared.dispatch.publish(task, headers_of(span), stream.ticket.deadline)
        self._hops.publish_ms += (time.monotonic() - start) * 1000
        stream.published(task.request_id)

    async def _deliver(self, stream: Stream, reader: Reader, held_model: str) -> None:
        await self._wait_until_published(stream)
        started = stream.started(held_model)
        self._record_started(started)
        await self._write(GenerateResponse(started=started))
        if self._replayed:
            await self._write(GenerateResponse(notice=_REPLAYED))
        while True:
            self._news.clear()
            for event in stream.read(reader):
                await self._write(event)
                if event.HasField("finished"):
                    return
            await self._news.wait()

    async def _wait_until_published(self, stream: Stream) -> None:
        try:
            await self._shared.dispatch.submitted(stream.request_id)
        except SluiceError:
            # Without an acknowledgement the task may have been stored all the same: frames are proof.
            if stream.state is StreamState.PUBLISHING:
                raise

    async def _write(self, event: GenerateResponse) -> None:
        await self._context.write(event)

    def _record_request(self, wire: GenerateRequest, request: ValidRequest) -> None:
        self._spans.server.set_attributes(
            {
                names.GEN_AI_OPERATION: "text_completion" if wire.raw_prompt else "chat",
                names.GEN_AI_SYSTEM: "sluice",
                names.GEN_AI_REQUEST_MODEL: request.model or AUTO,
                names.PRIORITY_CLASS: request.priority_class,
                names.TENANT: request.tenant,
            }
        )
        if request.sampling.HasField("max_tokens"):
            self._spans.server.set_attribute(names.GEN_AI_MAX_TOKENS, request.sampling.max_tokens)

    def _record_started(self, started: Started) -> None:
        self._spans.server.set_attributes(
            {
                names.REQUEST_ID: started.request_id,
                names.GEN_AI_RESPONSE_MODEL: started.model,
                names.TIER: started.route.tier,
                names.ROUTE_STRATEGY: started.route.strategy,
                names.GEN_AI_INPUT_TOKENS: started.prompt_tokens,
            }
        )

    def _record_stream(self, stream: Stream, joined_at: float) -> None:
        """The stream span, and the end on the server span. A replay has no stream."""
        if stream.finished is not None:
            reason = word_of(FinishReason, stream.finished.reason)
            self._spans.server.set_attributes(
                {
                    names.GEN_AI_FINISH_REASONS: [reason],
                    names.GEN_AI_OUTPUT_TOKENS: stream.finished.usage.completion_tokens,
                }
            )
        escalated = [leg.handed_over for leg in stream.legs if leg.handed_over]
        if escalated:
            self._spans.server.set_attribute(names.ROUTE_ESCALATED, escalated[-1])
        if stream.first_token_at is not None:
            ttft_s = stream.first_token_at - stream.ticket.hops.arrived_at
            self._spans.server.set_attribute(names.GEN_AI_TTFT, ttft_s)
        if stream.first_frame_at is not None and not self._replayed:
            lasted_s = time.monotonic() - max(stream.first_frame_at, joined_at)
            attributes = {names.ATTEMPT: stream.attempt, **_found_in(stream)}
            self._spans.past(names.SPAN_STREAM, lasted_s, attributes)


class _Once:
    """Is called once, and then holds nothing any more: a finished stream may wait long for a replay."""

    def __init__(self, end: Callable[[Stream], None]) -> None:
        self._end: Callable[[Stream], None] | None = end

    def __call__(self, stream: Stream) -> None:
        end, self._end = self._end, None
        assert end is not None, "a stream ends once"
        end(stream)


def _found_in(stream: Stream) -> dict[str, AttributeValue]:
    """What the safety policy says of an answer that is complete."""
    if stream.finished is None or stream.leg.answer is None:
        return {}
    outcome = stream.leg.answer.outcome()
    found = {names.SAFETY_POLICY: outcome.policy, **finding_attributes(outcome.taken)}
    return {**found, names.DRY_RUN: move_labels(outcome.moves)} if outcome.moves else found
