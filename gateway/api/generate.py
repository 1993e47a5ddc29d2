"""One call of Generate, from the request to its last event."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import grpc
from opentelemetry.trace import Tracer

from gateway.admission.class_limiter import ClassLimiter
from gateway.admission.pipeline import IncomingRequest
from gateway.api.call_attributes import (
    attempt_end,
    call_attributes,
    end_attributes,
    reasons_attribute,
    request_attributes,
    started_attributes,
)
from gateway.api.several import Write, answer_all, requests_of
from gateway.identity.caller import Caller
from gateway.records.record_builder import RecordBuilder, RecordBuilders
from gateway.routing.cascade.limit import EscalationLimiter
from gateway.shared.state import SharedState
from gateway.streaming.delivery import Reader
from gateway.streaming.idempotency import Replay
from gateway.streaming.lifecycle import RequestTimings
from gateway.streaming.stream import Stream
from gateway.telemetry.drift import DriftMonitor
from gateway.telemetry.metrics import RequestMetrics
from gateway.telemetry.spans import CallSpans
from gateway.tools.events import PartEvents
from gateway.tools.formats import ToolFormat
from gateway.upstream.chunk_rows import ChunkRows
from gateway.upstream.escalation import Escalation
from gateway.upstream.guard_client import GuardClient
from gateway.upstream.guard_runner import GuardRunner
from gateway.upstream.rows import RequestContext, Upstream, already_complete
from gateway.upstream.shadow_runner import ShadowRunner
from gateway.validation.requests import ValidRequest, validate
from sluice.errors import Cancelled, DeadlinePassed, InternalError, SluiceError
from sluice.internal.v1.frame_pb2 import RowTimings
from sluice.settings import GatewaySettings
from sluice.telemetry import names
from sluice.telemetry.logs import about_request
from sluice.telemetry.tracing import headers_of
from sluice.v1.inference_pb2 import (
    NOTICE_KIND_REPLAYED,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    Notice,
    Started,
)
from sluice.wire.enums import word_of

_log = logging.getLogger(__name__)

_REPLAYED: Final = GenerateResponse(
    notice=Notice(
        kind=NOTICE_KIND_REPLAYED,
        message="the answer to an earlier request with this idempotency key",
    )
)


@dataclass(frozen=True)
class RequestObservers:
    """What is recorded, counted and learned of every request."""

    records: RecordBuilders
    metrics: RequestMetrics
    drift: DriftMonitor
    shadows: ShadowRunner

    def refused(self, request: ValidRequest, record: RecordBuilder, error: SluiceError) -> None:
        """A valid request ended before it had a stream."""
        record.finish_with_error(error)
        self.metrics.count_refusal(request.priority_class, error.reason, record.record)

    def kept(self, context: RequestContext, answer: Replay) -> None:
        """An admitted request gets the answer of an earlier one."""
        context.record.finish_kept(answer.finished)
        self.metrics.count_kept(context.request, answer.finished, context.record.record)

    def ended(self, context: RequestContext, cascade: Escalation | None, stream: Stream) -> None:
        """The stream of an admitted request ended."""
        score, plan = None if cascade is None else cascade.monitor.score, context.admitted.plan
        if score is not None:
            self.drift.scored(score)
            context.record.add_plan(replace(plan, scores=(*plan.scores, score)))
        context.record.finish(stream)
        self.shadows.ended(context, stream)
        record, span = context.record.record, context.spans.server.get_span_context()
        self.metrics.count_stream(context.request, plan, stream, record, span)


@dataclass(frozen=True)
class Generator:
    """Answers calls; holds what all of them share."""

    settings: GatewaySettings
    limiter: ClassLimiter
    upstream: Upstream
    escalations: EscalationLimiter
    guards: GuardClient
    state: SharedState
    observers: RequestObservers
    tracer: Tracer

    def timeout_s(self, remaining_s: float | None) -> float:
        """How long a call may take whose deadline is in ``remaining_s`` seconds (None: it has none)."""
        timeout_s = self.settings.default_timeout_s if remaining_s is None else remaining_s
        return min(timeout_s, self.settings.max_timeout_s)

    async def answer(
        self,
        request: GenerateRequest,
        caller: Caller,
        write: Callable[[GenerateResponse], Awaitable[None]],
        remaining_s: float | None,
        metadata: Mapping[str, str],
        *,
        is_item: bool = False,
    ) -> None:
        """Passes all events of the answer to ``caller`` to ``write``.

        Args:
            remaining_s: until the deadline of the call.
            metadata: for the trace context.
            is_item: as in `ValidRequest`.

        Raises:
            SluiceError: the call ends with it.
        """
        spans = CallSpans(self.tracer, names.SPAN_GENERATE, metadata)
        with spans.call():
            call = _Call(self, spans, write)
            valid = call.validated(request, remaining_s, caller)
            if is_item:
                valid = replace(valid, is_item=True)
            if valid.sampling.n <= 1:
                await call.run(valid)
            else:
                await self._answer_several(request, valid, write, spans)

    async def _answer_several(
        self, wire: GenerateRequest, request: ValidRequest, write: Write, spans: CallSpans
    ) -> None:
        reasons: dict[int, str] = {}

        async def note(event: GenerateResponse) -> None:
            if event.HasField("finished"):
                reasons[event.answer_index] = word_of(FinishReason, event.finished.reason)
            await write(event)

        async def answer(one: ValidRequest, write_one: Write) -> None:
            own = CallSpans(self.tracer, names.SPAN_GENERATE, headers_of(spans.server))
            further = self.limiter.call(one.priority_class, one.tenant)
            with own.call(), further if one.answer_index else nullcontext():
                call = _Call(self, own, write_one)
                call.describe(wire, one)
                await call.run(one)

        await answer_all(requests_of(request), answer, note)
        spans.describe(reasons_attribute, [reasons[index] for index in sorted(reasons)])


class _Call:
    """The state of one call. Its methods stand in the order in which they run."""

    def __init__(
        self,
        shared: Generator,
        spans: CallSpans,
        write: Callable[[GenerateResponse], Awaitable[None]],
    ) -> None:
        self._shared = shared
        self._upstream = shared.upstream
        self._registry = shared.upstream.registry
        self._spans = spans
        self._write = write
        self._timings = RequestTimings(arrived_at=time.monotonic())
        self._parts: PartEvents | None = None
        """Finds calls and reasoning in the answer; None: it can have neither."""
        self._has_events = asyncio.Event()
        self._request_id = new_request_id()
        """Of this call until it reads the stream of an earlier one."""
        self._timeout: asyncio.Timeout
        self._error: SluiceError | None = None
        """Why the call was stopped."""

    def validated(
        self, wire: GenerateRequest, remaining_s: float | None, caller: Caller
    ) -> ValidRequest:
        catalog, settings = self._upstream.admission.catalog, self._shared.settings
        timeout_s = self._shared.timeout_s(remaining_s)
        self._spans.describe(call_attributes, wire, caller.tenant, self._request_id)
        about_request(self._request_id, self._spans.trace_id)
        request = validate(
            wire, catalog, timeout_s, caller, self._shared.state.resume_key, settings.audio_max_s
        )
        self._spans.describe(request_attributes, request)
        return request

    def describe(self, wire: GenerateRequest, request: ValidRequest) -> None:
        """For a call whose request another one has validated."""
        about_request(self._request_id, self._spans.trace_id)
        self._spans.describe(call_attributes, wire, request.tenant, self._request_id)
        self._spans.describe(request_attributes, request)

    async def run(self, request: ValidRequest) -> None:
        try:
            async with asyncio.timeout(request.timeout_s) as self._timeout:
                await self._answer(request)
        except TimeoutError:
            raise (self._error or _deadline_passed()).of_request(self._request_id) from None
        except SluiceError as error:
            _log_failure(error, request.tenant)
            raise error.of_request(self._request_id) from error

    async def _answer(self, request: ValidRequest) -> None:
        found = await self._admit(request)
        if request.tools is not None or self._upstream.admission.catalog.marks_reasoning:
            parts_of = self._tool_format, self._marks_reasoning, found.text_before
            self._parts = PartEvents(request.tools, *parts_of, len(request.resume))
        if isinstance(found, Replay):
            await self._replay(request, found)
        else:
            await self._read(request, found)

    async def _admit(self, request: ValidRequest) -> Stream | Replay:
        """A new stream, or the answer that the key names. What is refused, or ends before that, leaves a record too."""
        observers = self._shared.observers
        record = observers.records.open(request, self._request_id, self._spans.trace_id)
        try:
            return self._find(request) or await self._begin(request, record)
        except BaseException as error:
            observers.refused(request, record, error_of(error, self._departure(request)))
            raise

    async def _begin(self, request: ValidRequest, record: RecordBuilder) -> Stream | Replay:
        if not request.key_is_shared:
            return await self._begin_in_slot(request, record)
        claim = self._shared.state.keys.claimed(request.key, request.fingerprint, request.timeout_s)
        async with claim:
            return self._find(request) or await self._begin_in_slot(request, record)

    async def _begin_in_slot(self, request: ValidRequest, record: RecordBuilder) -> Stream | Replay:
        async with self._shared.limiter.slot(request.priority_class, request.tenant):
            # Another call with the same key may have come while this one waited.
            found = self._find(request)
            if found is not None:
                return found
            known = request, record, self._spans, self._timings
            admitted = await self._upstream.admission.admit(IncomingRequest(*known))
        with admitted.reservation.released_on_error():
            return await self._begin_admitted(RequestContext(*known, admitted))

    async def _begin_admitted(self, context: RequestContext) -> Stream | Replay:
        """A kept answer, the stream that another call with the same key opened meanwhile, or a new one."""
        request, answers = context.request, self._shared.state.answers
        key = answers.key_of(context)
        if key:
            context.record.keep_answer(key)
            kept = await answers.find(context, key)
            if kept is not None:
                return self._kept(context, kept)
        try:
            found = self._find(request)
            if found is None and request.key_is_shared:
                self._shared.state.keys.check(request.key)
            if found is None:
                return self._open(context, key)
        except BaseException:
            answers.given_up(key, context.request_id)
            raise
        answers.given_up(key, context.request_id)
        context.admitted.reservation.release()
        return found

    def _kept(self, context: RequestContext, kept: Replay) -> Replay:
        """The answer of an earlier equal request, as that to this one."""
        context.admitted.reservation.release()
        spec, now = context.stream_spec(self._shared.state.resume_key), time.monotonic()
        assert spec.resume_token is not None, "callers read it"
        token = spec.resume_token(kept.finished.model)
        answer = kept.answer_to(spec.started, self._timings.with_row(RowTimings(), now, now), token)
        self._shared.observers.kept(context, answer)
        return answer

    def _find(self, request: ValidRequest) -> Stream | Replay | None:
        now = time.monotonic()
        return self._registry.find(
            request.key, request.fingerprint, request.resume, request.resume_model, now
        )

    def _departure(self, request: ValidRequest) -> SluiceError:
        """Why the caller does not wait any more."""
        return departure(request, self._timings, _deadline_passed())

    def _stop(self, error: SluiceError) -> None:
        """Ends the call with ``error``, whatever it waits for: a client that does not read blocks `_write`."""
        self._error = error
        if self._timeout.when() is not None and not self._timeout.expired():
            self._timeout.reschedule(0.0)

    def _open(self, context: RequestContext, answer_key: str) -> Stream:
        """A new stream, its task on the way. Nothing is awaited after it is open: the caller's `leave` closes it."""
        request, admitted = context.request, context.admitted
        for score in admitted.plan.scores:
            self._shared.observers.drift.scored(score)
        cascade = guards = chunks = None
        if admitted.second is not None:
            cascade = Escalation(self._upstream, self._shared.escalations, context)
        if admitted.guards or admitted.entity_guards:
            guards = GuardRunner(self._shared.guards, context)
        first = self._upstream.new_attempt(
            request,
            admitted.first,
            context.request_id,
            request.resume,
            counts_prompt=request.answer_index == 0,
        )
        if admitted.first.chunks:
            chunks = ChunkRows(self._upstream, context, first)
        on_end = partial(self._ended, context, answer_key, cascade, guards, chunks)
        stream = self._registry.open(
            context.stream_spec(self._shared.state.resume_key), first, cascade, guards, on_end
        )
        reason = already_complete(admitted.first.sampling, first.transcript)
        if reason is not None:
            self._registry.finish(stream, reason, time.monotonic())
        if chunks is not None and not stream.row_ended:
            chunks.start(stream)
        elif not stream.row_ended:
            self._upstream.send(context, first, admitted.first)
        if guards is not None and not stream.ended:
            guards.check_prompt(stream)  # beside the row
        return stream

    def _ended(
        self,
        context: RequestContext,
        answer_key: str,
        cascade: Escalation | None,
        guards: GuardRunner | None,
        chunks: ChunkRows | None,
        stream: Stream,
    ) -> None:
        if guards is not None:
            guards.close()
        if chunks is not None:
            chunks.close()
        now = time.monotonic()
        context.spans.end_attempts(partial(attempt_end, stream, now))
        used = self._upstream.usage.record_stream(context.request.tenant, stream, now)
        context.admitted.reservation.release(used)
        self._shared.state.keys.ended(context.request.key, stream)
        if answer_key:
            self._shared.state.answers.ended(answer_key, stream)
        self._shared.observers.ended(context, cascade, stream)

    async def _read(self, request: ValidRequest, stream: Stream) -> None:
        """Writes the events of a stream as they come."""
        self._request_id = stream.request_id
        limit = self._shared.settings.reader_buffer_tokens
        reader = Reader(len(request.resume), limit, self._has_events.set, self._stop)
        self._registry.join(stream, reader, request.resume_model)
        try:
            await self._write_started(await self._started(stream, reader, request.resume_model))
            await self._write_events(request, stream, reader)
        finally:
            self._registry.leave(stream, reader, self._departure(request))
            self._record_end(stream)

    async def _started(self, stream: Stream, reader: Reader, held_model: str) -> Started:
        """The first event, once JetStream has stored the task or frames prove it."""
        while True:
            self._has_events.clear()
            started = stream.started(reader, held_model)
            if started is not None:
                return started
            await self._has_events.wait()

    async def _write_started(self, started: Started) -> None:
        self._spans.describe(started_attributes, started)
        # Not interrupted: gRPC sends the headers with this event, and takes no status until it has.
        deadline = self._timeout.when()
        self._timeout.reschedule(None)
        await self._put(GenerateResponse(started=started))
        self._timeout.reschedule(deadline if self._error is None else 0.0)

    async def _write_events(self, request: ValidRequest, stream: Stream, reader: Reader) -> None:
        while True:
            self._has_events.clear()
            for event in stream.read(reader):
                if event.HasField("finished"):
                    # Whoever has the whole answer gets it again from every gateway.
                    await self._shared.state.keys.stored(request.key)
                await self._put(event)
                if event.HasField("finished"):
                    return
            await self._has_events.wait()

    async def _replay(self, request: ValidRequest, replay: Replay) -> None:
        """Writes the events of an answer that is complete."""
        try:
            await self._write_started(replay.started(request.resume_model))
            if not replay.finished.usage.cached:
                await self._put(_REPLAYED)
            for event in replay.events(len(request.resume), request.resume_model):
                await self._put(event)
        finally:
            self._record_end(replay)

    async def _put(self, event: GenerateResponse) -> None:
        if self._parts is None:
            await self._write(event)
            return
        for one in self._parts.events(event):
            await self._write(one)

    def _tool_format(self, model: str) -> ToolFormat:
        form = self._upstream.admission.catalog[model].tokenizer.tool_format
        assert form is not None, "its prompt had tools"
        return form

    def _marks_reasoning(self, model: str) -> bool:
        return self._upstream.admission.catalog[model].tokenizer.marks_reasoning

    def _record_end(self, answer: Stream | Replay) -> None:
        self._spans.describe(end_attributes, answer, self._upstream.usage.models)


def error_of(error: BaseException, departure: SluiceError) -> SluiceError:
    """What a call ends with that ``error`` ended; ``departure``: why its caller does not wait any more."""
    if isinstance(error, SluiceError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return departure
    return InternalError("the gateway failed; its log has the reason")


def departure(request: ValidRequest, timings: RequestTimings, late: DeadlinePassed) -> SluiceError:
    """Why the caller of ``request`` does not wait any more; ``late`` when its deadline has passed.

    It ends its call by its own clock; gRPC rounds deadlines by 1 %.
    """
    waited_s = time.monotonic() - timings.arrived_at
    return late if waited_s >= 0.98 * request.timeout_s else Cancelled("the caller has gone")


def _log_failure(error: SluiceError, tenant: str) -> None:
    """Callers hear of every error; the log has those that somebody has to look at.

    Of the others it has no message, which may say what was wrong with the caller's own text.
    """
    if error.code is grpc.StatusCode.INTERNAL:
        _log.warning("%s of %s: %s", error.reason, tenant, error.message)
    else:
        _log.debug("%s of %s", error.reason, tenant)


def _deadline_passed() -> DeadlinePassed:
    return DeadlinePassed("the deadline passed before the answer was complete")


def new_request_id() -> str:
    """A unique name; 15 random bytes are 20 url-safe characters."""
    return f"req-{secrets.token_urlsafe(15)}"
