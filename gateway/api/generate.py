"""One call of Generate, from the request to its last message.

Several answers to one request (``n``) are a call each, inside the caller's. Each is admitted, limited, recorded, traced
and kept by idempotency key for itself, so all that holds of one answer holds of each. Their rows have one prompt: a
worker computes it once and shares its blocks (prefix cache), and it is counted once, with the first answer. When one of
the calls fails, so does the caller's.
"""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

import grpc
from opentelemetry.trace import Tracer

from gateway.admission.calls import AnyCall, ClassLimiter, TimeLimit
from gateway.admission.pipeline import AdmittedRequest, RowsOf
from gateway.models.catalog import Catalog
from gateway.models.tool_events import PartEvents
from gateway.shared.state import SharedState
from gateway.streaming.answer import Answer, Reader
from gateway.streaming.idempotency import Replay
from gateway.telemetry.drift import DriftMonitor
from gateway.telemetry.metrics import RequestMetrics
from gateway.telemetry.request_log import CALLER_GONE, RequestLog
from gateway.telemetry.request_record import RequestRecords
from gateway.upstream.cascade import Cascade, EscalationLimiter
from gateway.upstream.chunk_rows import ChunkRows
from gateway.upstream.fallbacks import Fallbacks
from gateway.upstream.guards import GuardRunner
from gateway.upstream.rows import Upstream, already_complete
from gateway.upstream.shadow_runner import ShadowRunner
from gateway.validation.requests import ValidRequest, validate
from sluice.errors import (
    RETRY_AFTER_S,
    Cancelled,
    DeadlinePassed,
    InternalError,
    SluiceError,
    TransportUnavailable,
)
from sluice.internal.v1.frame_pb2 import RowTimings
from sluice.settings import GatewaySettings
from sluice.telemetry import names
from sluice.telemetry.tracing import headers_of
from sluice.v1.admin_pb2 import RouterScore
from sluice.v1.inference_pb2 import (
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
)
from sluice.wire.enums import word_of

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

STARTED_S: Final = 0.02
"""So long `Started` waits for the first token once a batcher has the task, to leave in one message with it, seconds."""
Write = Callable[[GenerateResponse], Awaitable[None]]


@dataclass(frozen=True)
class Kind:
    """What differs between the methods.

    Attributes:
        span: the name of a call's span.
        operation: as telemetry and records name the method; empty: it is a prompt or a chat.
        late: the message of an error when the deadline has passed.
    """

    span: str
    operation: str
    late: str


GENERATE: Final = Kind(
    names.SPAN_GENERATE, "", "the deadline passed before the answer was complete"
)


@dataclass(frozen=True)
class Generator:
    """Answers calls; holds what all of them share, and what is recorded, counted and learned of each from its log."""

    settings: GatewaySettings
    limiter: ClassLimiter
    upstream: Upstream
    escalations: EscalationLimiter
    state: SharedState
    records: RequestRecords
    metrics: RequestMetrics
    drift: DriftMonitor
    shadows: ShadowRunner
    tracer: Tracer

    @property
    def catalog(self) -> Catalog:
        """The models of the policies in force."""
        return self.upstream.admission.in_force.policies.catalog

    def ended(self, log: RequestLog) -> None:
        """A valid request has ended: it was refused, got an earlier answer, or its rows have ended."""
        self.metrics.ended(log, self.records.ended(log))

    def answered(self, context: AdmittedRequest, score: RouterScore | None, answer: Answer) -> None:
        """The answer of an admitted request ended, as its log says; ``score``: of the first model's answer."""
        log = context.log
        if score is not None:
            self.drift.scored(score)
            context.plan.route.scores.append(score)
        self.ended(log)
        if log.answer_taken or (log.guards is not None and log.guards.decided):
            self.records.decided(log)
        self.shadows.ended(context, answer)

    def timeout_s(self, call: AnyCall) -> float:
        """How long ``call`` may take, seconds; raises DeadlinePassed where no time is left."""
        remaining_s, settings = call.remaining_s, self.settings
        if remaining_s is None:
            remaining_s = settings.default_timeout_s
        if remaining_s <= 0:
            raise DeadlinePassed("the deadline passed before the request arrived")
        return min(remaining_s, settings.max_timeout_s)

    async def answer(
        self, request: GenerateRequest, call: AnyCall, write: Write, request_id: str | None = None
    ) -> RequestLog:
        """Pass all messages of the answer to ``write``, which may keep and change them, and return its log.

        Args:
            request: what is asked.
            call: who asks.
            write: takes the messages.
            request_id: see `RequestLog`.

        Raises:
            SluiceError: the call ends with it.
        """
        with RequestLog(
            self.tracer, GENERATE.span, call.metadata, request_id=request_id, route=call.route
        ) as log:
            log.asked(request, call.caller.tenant)
            with self.upstream.admission.refusals_counted(call.caller):
                valid = validate(
                    request,
                    self.catalog,
                    self.timeout_s(call),
                    call.caller,
                    self.state.resume_key,
                    self.settings.audio_max_s,
                )
            log.valid(valid)
            if valid.sampling.n <= 1:
                only = _GenerateCall(self, log, valid.timeout_s, write)
                await only.within_deadline(valid, only.answer)
            else:
                await self._answer_several(request, valid, write, log)
            return log

    async def _answer_several(
        self, wire: GenerateRequest, request: ValidRequest, write: Write, log: RequestLog
    ) -> None:
        """The messages of all answers go to ``write``, one at a time and with the index of the answer.

        Raises:
            SluiceError: the first that one of them raised; the others were cancelled.
        """
        turn, reasons = asyncio.Lock(), dict[int, str]()

        async def answer(one: ValidRequest) -> None:
            async def write_one(response: GenerateResponse) -> None:
                if response.HasField("finished"):
                    reasons[one.answer_index] = word_of(FinishReason, response.finished.reason)
                response.answer_index = one.answer_index
                async with turn:
                    await write(response)

            own = RequestLog(
                self.tracer,
                GENERATE.span,
                headers_of(log.server),
                request_id=None if one.answer_index else log.request_id,
            )
            further = self.limiter.call(one.priority_class, one.tenant)
            with own, further if one.answer_index else nullcontext():
                own.asked(wire, one.tenant)
                own.valid(one)
                call = _GenerateCall(self, own, one.timeout_s, write_one)
                await call.within_deadline(one, call.answer)

        try:
            async with asyncio.TaskGroup() as group:
                for one in requests_of(request):
                    group.create_task(answer(one))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        ended = [reasons[index] for index in sorted(reasons)]
        log.describe({names.GEN_AI_FINISH_REASONS: ended})


class RunningCall(TimeLimit):
    """A call of any kind while it runs: its deadline, its record, and the error that it ends with."""

    def __init__(self, shared: Generator, kind: Kind, log: RequestLog, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._shared = shared
        self._upstream = shared.upstream
        self._kind = kind
        self._log = log
        self._request_id = log.request_id
        """Of the request whose answer it reads."""
        self._stopped: SluiceError | None = None
        """Why the call was ended from outside."""

    async def within_deadline(
        self, request: ValidRequest, work: Callable[[AdmittedRequest], Awaitable[_T]]
    ) -> _T:
        """What ``work`` gives, which it has until the deadline of ``request``.

        Raises:
            SluiceError: with the id of the request.
        """
        incoming = AdmittedRequest(request, self._log, self._shared.state.resume_key)
        try:
            with self:
                return await work(incoming)
        except TimeoutError:
            error = self._stopped or DeadlinePassed(self._kind.late)
            raise error.of_request(self._request_id) from None
        except asyncio.CancelledError:
            self.departure(request)
            raise
        except SluiceError as error:
            _log_failure(error, request.tenant)
            raise error.of_request(self._request_id) from error

    def refused(self, error: BaseException, request: ValidRequest) -> None:
        """The request was not admitted, or ended before that: it leaves a record too."""
        self._log.error = self.error_of(error, request).reason
        self._shared.ended(self._log)

    async def admit(self, incoming: AdmittedRequest, rows_of: RowsOf | None = None) -> None:
        """Decides all about a request; raises as `Admission.admit`, and TransportUnavailable."""
        request, records = incoming.request, self._shared.records
        if records.store.audit_writer.is_full:
            raise TransportUnavailable(
                "JetStream does not store the audit of earlier requests",
                retry_after_s=RETRY_AFTER_S,
            )
        limiter = self._shared.limiter
        limiter.preparing[request.priority_class] += 1
        try:
            async with limiter.slot(request.priority_class, request.tenant):
                await self._upstream.admission.admit(incoming, rows_of)
        finally:
            limiter.preparing[request.priority_class] -= 1
            if self._log.taken:
                records.decided(self._log)

    def error_of(self, error: BaseException, request: ValidRequest) -> SluiceError:
        """What the call ends with that ``error`` ended."""
        if isinstance(error, SluiceError):
            return error
        if isinstance(error, asyncio.CancelledError):
            return self.departure(request)
        return InternalError("the gateway failed; its log has the reason")

    def departure(self, request: ValidRequest) -> SluiceError:
        """Why the caller does not wait any more. It ends its call by its own clock; gRPC rounds deadlines by 1 %."""
        if self._log.left is None:
            late = time.monotonic() - self._log.arrived_at >= 0.98 * request.timeout_s
            gone = DeadlinePassed(self._kind.late) if late else Cancelled(CALLER_GONE)
            self._log.left = gone
        return self._log.left


class _GenerateCall(RunningCall):
    """A call of Generate. Its methods stand in the order in which they run."""

    _parts: PartEvents | None = None
    """Finds calls and reasoning in the answer; None: it can have neither."""
    _cascade: Cascade | None = None
    _guards: GuardRunner | None = None
    _chunks: ChunkRows | None = None
    _fallbacks: Fallbacks | None = None

    def __init__(self, shared: Generator, log: RequestLog, timeout_s: float, write: Write) -> None:
        super().__init__(shared, GENERATE, log, timeout_s)
        self._registry = shared.upstream.registry
        self._write = write
        self._has_events = asyncio.Event()

    async def answer(self, incoming: AdmittedRequest) -> None:
        request = incoming.request
        begin, keys = partial(self._begin, incoming), self._shared.state.keys
        try:
            if request.key:
                find = partial(self._find, request)
                found = await keys.once(request, self._request_id, find, begin)
            else:
                found = await begin()
        except BaseException as error:
            self.refused(error, request)
            raise
        policies = self._upstream.admission.in_force.policies
        catalog, inspector = policies.catalog, policies.inspector
        if request.tools is not None or catalog.marks_reasoning:
            self._parts = PartEvents(
                request.tools,
                lambda model: catalog[model].tokenizer,
                found.text_before,
                len(request.resume),
                partial(inspector.assembled, request.tenant, request.labels),
            )
        await self._read(request, found)

    def _find(self, request: ValidRequest) -> Answer | Replay | None:
        """The live or complete answer that the key of the request names."""
        now = time.monotonic()
        return self._registry.find(
            request.key, request.fingerprint, request.resume, request.resume_model, now
        )

    async def _begin(self, incoming: AdmittedRequest) -> Answer | Replay:
        """A new answer, or the kept answer to an equal request."""
        request, answers = incoming.request, self._shared.state.answers
        await self.admit(incoming)
        with incoming.reservation:
            key = self._log.answer_key = answers.key_of(incoming) if answers.enabled else ""
            if key:
                kept = await answers.find(incoming, key)
                if kept is not None:
                    return self._kept(incoming, kept)
            try:
                if request.key_is_shared:
                    self._shared.state.keys.check(request.key)
                return self._open(incoming)
            except BaseException:
                answers.given_up(key, incoming.request_id)
                raise

    def _kept(self, context: AdmittedRequest, kept: Replay) -> Replay:
        """The answer of an earlier equal request, as that to this one."""
        context.reservation.release()
        log, now = self._log, time.monotonic()
        timings = log.timings(RowTimings(), now, now)
        token = context.resume_token(kept.finished.model)
        answer = kept.answer_to(context.started(), timings, token)
        log.kept(answer)
        self._shared.ended(log)
        return answer

    def _open(self, context: AdmittedRequest) -> Answer:
        """A new answer, its task on the way. Nothing is awaited after it is open: the caller's `leave` closes it."""
        request, prepared, guards = context.request, context.first, None
        for score in context.plan.route.scores:
            self._shared.drift.scored(score)
        if context.second is not None:
            self._cascade = Cascade(self._upstream, self._shared.escalations, context)
        policy = context.inspection.compiled
        if policy.guards or policy.answer_readers:
            self._guards = guards = GuardRunner(self._upstream, context)
        first = self._upstream.new_row(
            request,
            prepared,
            context.request_id,
            request.resume,
            counts_prompt=request.answer_index == 0,
        )
        if context.allow_degraded and not request.resume:
            self._fallbacks = Fallbacks(self._upstream, context)
        on_end = partial(self._ended, context)
        answer = self._registry.open(context, first, self._cascade, guards, on_end, self._fallbacks)
        reason = already_complete(prepared.sampling, first.transcript) if request.resume else None
        if reason is not None:
            answer.finish(reason, time.monotonic())
        elif prepared.chunks:
            self._chunks = ChunkRows(self._upstream, context, first)
            self._chunks.start(answer)
        else:
            self._upstream.send(context, first, prepared)
        if guards is not None and not answer.ended:
            guards.check_prompt(answer)  # beside the row
        return answer

    def _ended(self, context: AdmittedRequest, answer: Answer) -> None:
        for one in (self._guards, self._chunks, self._fallbacks):
            if one is not None:
                one.close()
        now = time.monotonic()
        self._log.ended(answer, now)
        used = self._upstream.usage.record_stream(context, answer, now)
        context.reservation.release(
            used, None if answer.error is None or answer.taken else answer.error
        )
        self._shared.state.keys.ended(context.request.key, answer)
        if self._log.answer_key:
            self._shared.state.answers.ended(self._log.answer_key, answer)
        score = None if self._cascade is None else self._cascade.score
        self._shared.answered(context, score, answer)

    async def _read(self, request: ValidRequest, answer: Answer | Replay) -> None:
        """Writes the events of an answer as they come; those that are there together in one message."""
        self._request_id = answer.request_id
        limit = self._shared.settings.reader_buffer_tokens
        wake = self._has_events.set
        reader = Reader(len(request.resume), limit, wake, self._stop, self._accepted)
        answer.join(reader, request.resume_model)
        try:
            # The first event comes once a batcher has the task, or frames prove it.
            while (started := answer.started(reader, request.resume_model)) is None:
                await self._has_events.wait()
                self._has_events.clear()
            self._log.started(started)
            response = answer.read(reader) or GenerateResponse()
            response.started.CopyFrom(started)
            # Not interrupted: gRPC sends the headers with this message, and takes no status until it has.
            self.paused = True
            await self._put(request, response)
            self.resume()
            self._block(answer)
            while not response.HasField("finished"):
                await self._has_events.wait()
                self._has_events.clear()
                if (new := answer.read(reader)) is not None:
                    response = new
                    await self._put(request, response)
                self._block(answer)
        finally:
            answer.leave(reader, self.departure(request))
            self._log.delivered(answer, self._shared.catalog.settings)

    def _block(self, answer: Answer | Replay) -> None:
        """End the answer where the policy blocks what was assembled from it."""
        if self._parts is not None and self._parts.blocked and isinstance(answer, Answer):
            answer.block(self._parts.blocked, time.monotonic())

    def _accepted(self) -> None:
        """`Started` may go: with the first token, or alone when that takes longer."""
        asyncio.get_running_loop().call_later(STARTED_S, self._has_events.set)

    def _stop(self, error: SluiceError) -> None:
        """Ends the call with ``error``, whatever it waits for: a client that does not read blocks `_write`."""
        self._stopped = error
        self.expire()

    async def _put(self, request: ValidRequest, response: GenerateResponse) -> None:
        if response.HasField("finished"):
            # Whoever has the whole answer gets it again from every gateway.
            await self._shared.state.keys.stored(request.key)
        if self._parts is None or self._parts.change(response):
            await self._write(response)


def _log_failure(error: SluiceError, tenant: str) -> None:
    """Callers hear of every error; the log has those that somebody has to look at.

    Of the others it has no message, which may say what was wrong with the caller's own text.
    """
    if error.code is grpc.StatusCode.INTERNAL:
        _log.warning("%s of %s: %s", error.reason, tenant, error.message)
    else:
        _log.debug("%s of %s", error.reason, tenant)


def requests_of(request: ValidRequest) -> list[ValidRequest]:
    """One request for each of the n answers."""
    route_key = secrets.token_hex(8)
    return [
        replace(
            request,
            sampling=_sampling(request.sampling, index),
            # No tenant has "#" in its name.
            key=request.key.replace(" ", f"#{index} ", 1) if index else request.key,
            answer_index=index,
            route_key=route_key,
        )
        for index in range(request.sampling.n)
    ]


def _sampling(params: SamplingParams, index: int) -> SamplingParams:
    """For one answer; the first has the request's seed, the others seeds that depend on it and their index alone."""
    sampling = SamplingParams()
    sampling.CopyFrom(params)
    sampling.ClearField("n")
    if index and sampling.HasField("seed"):
        digest = hashlib.sha256(f"{sampling.seed} {index}".encode()).digest()
        sampling.seed = int.from_bytes(digest[:8]) >> 1
    return sampling
