"""Answers a call of Generate, from the request to the last message.

1. `Generator.answer` validates the request and begins its log and its `RequestContext`.
2. Several answers to one request (`n`) are a request each, inside the call: admitted, limited, recorded, traced and
   stored by idempotency key for itself, so all that holds of one answer holds of each. Their runs have one prompt. A
   worker computes it once and shares its blocks (prefix cache); it is counted once, with the first answer. When one of
   them fails, so does the call.
3. An idempotency key may name a live or complete answer; else the request is admitted, and its run sent.
4. The messages of the answer are written as they come.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from opentelemetry.trace import Tracer

from gateway.admission.admission import Admission
from gateway.admission.class_limiter import ClassLimiter
from gateway.admission.request_context import Call, RequestContext, RequestKind
from gateway.api.methods import GrpcCall
from gateway.models.catalog import Catalog
from gateway.shared.state import SharedState
from gateway.streaming.answer_stream import AnswerStream, Steering
from gateway.streaming.idempotency import Replay
from gateway.streaming.part_events import PartEvents
from gateway.telemetry.drift import DriftMonitor
from gateway.telemetry.metrics import RequestMetrics
from gateway.telemetry.request_log import RequestLog
from gateway.telemetry.request_record import RequestRecords
from gateway.upstream.cascade import Cascade, EscalationLimiter
from gateway.upstream.chunk_runs import ChunkRuns
from gateway.upstream.guards import GuardRunner
from gateway.upstream.runs import Upstream, already_complete
from gateway.upstream.shadow_runner import ShadowRunner
from gateway.validation.requests import ValidRequest, validate
from sluice.background import wait_for_event
from sluice.errors import DeadlinePassed, InvalidRequest, TransportUnavailable, UnknownModel
from sluice.internal.v1.frame_pb2 import TaskTimings
from sluice.settings import GatewaySettings
from sluice.telemetry import names
from sluice.telemetry.tracing import headers_of
from sluice.v1.inference_pb2 import FinishReason, GenerateRequest, GenerateResponse, SamplingParams
from sluice.wire.enums import word_of

Write = Callable[[GenerateResponse], Awaitable[None]]
"""Takes a message of an answer; may keep and change it."""

STARTED_S: Final = 0.02
"""How long the first event waits for the first token, in seconds; a message of its own costs as much as that token."""

GENERATE: Final = RequestKind(
    names.SPAN_GENERATE, "", "the deadline passed before the answer was complete"
)


@dataclass(frozen=True)
class Generator:
    """Answers requests.

    Attributes:
        settings: The settings of the gateway.
        limiter: Calls that run and are prepared.
        admission: Decides about requests.
        upstream: Sends runs.
        escalations: Limits how many requests use the second model of a cascade.
        state: What the gateways of the mesh share.
        records: Writes records and audit entries.
        metrics: Counts requests.
        drift: Watches the predictions of routers.
        shadows: Gives requests to shadow models.
        tracer: Makes spans.
    """

    settings: GatewaySettings
    limiter: ClassLimiter
    admission: Admission
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
        return self.admission.in_force.policies.catalog

    def timeout_s(self, call: Call) -> float:
        """Return how long `call` may take, in seconds; raise DeadlinePassed if no time is left."""
        remaining_s, settings = call.remaining_s, self.settings
        if remaining_s is None:
            remaining_s = settings.default_timeout_s
        if remaining_s <= 0:
            raise DeadlinePassed("the deadline passed before the request arrived")
        return min(remaining_s, settings.max_timeout_s)

    # A coroutine that writes, not a generator: when the call is cancelled its `finally` runs at once.
    async def stream(self, request: GenerateRequest, call: GrpcCall) -> GenerateResponse | None:
        """Send all messages of the answer over gRPC but the last one, which is returned: it leaves with the status."""
        unfinished, last_message = max(1, request.sampling.n), None

        async def write(response: GenerateResponse) -> None:
            nonlocal unfinished, last_message
            unfinished -= response.HasField("finished")
            if unfinished:
                await call.write(response)
            else:
                last_message = response

        answering = self.answer(request, call, write)
        del request  # see `UnaryMethod`
        await answering
        return last_message

    async def answer(
        self, request: GenerateRequest, call: Call, write: Write, request_id: str | None = None
    ) -> RequestLog:
        """Pass all messages of the answer to `write`, and return its log.

        Args:
            request: The request of the call.
            call: The call that carries it.
            write: Takes the messages.
            request_id: See `RequestLog`.

        Raises:
            SluiceError: The call ends with it.
        """
        with RequestLog(
            self.tracer, GENERATE.span, call.metadata, request_id=request_id, route=call.route
        ) as log:
            log.received(request, call.caller.tenant)
            catalog, timeout_s = self.admission.in_force.policies.catalog, self.timeout_s(call)
            key, audio_max_s = self.state.resume_key, self.settings.audio_max_s
            try:
                valid = validate(request, catalog, timeout_s, call.caller, key, audio_max_s)
            except (InvalidRequest, UnknownModel):
                self.admission.limits.count_refused(call.caller)
                raise
            log.validated(valid)
            if valid.sampling.n <= 1:
                del request  # see `UnaryMethod`
                context = RequestContext(GENERATE, valid, log, key)
                await context.run(self._run(context, write))
            else:
                await self._answer_several(request, valid, write, log)
            return log

    async def _answer_several(
        self, wire: GenerateRequest, request: ValidRequest, write: Write, log: RequestLog
    ) -> None:
        """Pass the messages of all answers to `write`, one at a time and with the index of the answer.

        Raises:
            SluiceError: The first that one of them raised; the others were cancelled.
        """
        lock, reasons = asyncio.Lock(), dict[int, str]()

        async def answer(part: ValidRequest) -> None:
            async def write_part(response: GenerateResponse) -> None:
                if response.HasField("finished"):
                    reasons[part.answer_index] = word_of(FinishReason, response.finished.reason)
                response.answer_index = part.answer_index
                async with lock:
                    await write(response)

            part_log = RequestLog(
                self.tracer,
                GENERATE.span,
                headers_of(log.server),
                request_id=None if part.answer_index else log.request_id,
            )
            # The first answer runs as the call itself.
            running = (
                self.limiter.running(part.priority_class, part.tenant)
                if part.answer_index
                else nullcontext()
            )
            with part_log, running:
                part_log.received(wire, part.tenant)
                part_log.validated(part)
                context = RequestContext(GENERATE, part, part_log, self.state.resume_key)
                await context.run(self._run(context, write_part))

        try:
            async with asyncio.TaskGroup() as group:
                for part in requests_of(request):
                    group.create_task(answer(part))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        ended = [reasons[index] for index in sorted(reasons)]
        log.describe({names.GEN_AI_FINISH_REASONS: ended})

    async def _run(self, context: RequestContext, write: Write) -> None:
        """Pass the messages of one answer to `write`."""
        request = context.request
        try:
            if request.key:
                find, begin = partial(self._find, request), partial(self._begin, context)
                answer = await self.state.keys.run_once(request, context.request_id, find, begin)
            else:
                answer = await self._begin(context)
        except BaseException as error:
            self.refused(context, error)
            raise
        context.answer_id = answer.request_id
        await self._deliver(context, answer, write)

    def _find(self, request: ValidRequest) -> AnswerStream | Replay | None:
        """Return the live or complete answer that the key of the request names; None if there is none."""
        return self.upstream.registry.find(
            request.key, request.fingerprint, request.resume, request.resume_model, time.monotonic()
        )

    async def _begin(self, context: RequestContext) -> AnswerStream | Replay:
        """Return a new answer, or the cached answer to an equal request."""
        request, answers = context.request, self.state.answers
        await self.admit(context)
        with self.admission.releasing(context):
            key = context.log.answer_key = answers.key_of(context) if answers.enabled else ""
            if key:
                cached = await answers.find(context, key)
                if cached is not None:
                    return self._replay(context, cached)
            try:
                if request.key_is_shared:
                    self.state.keys.check_claim(request.key)
                return self._open(context)
            except BaseException:
                answers.abandon(key, context)
                raise

    async def admit(self, context: RequestContext) -> None:
        """Decide all about a request; raise as `Admission.admit`, and TransportUnavailable."""
        records = self.records
        if records.store.audit_writer.is_full:
            raise TransportUnavailable("JetStream does not store the audit of earlier requests")
        try:
            await self.admission.admit(context)
        finally:
            if context.log.findings:
                records.decided(context.log)

    def _replay(self, context: RequestContext, cached: Replay) -> Replay:
        """Return the cached answer to an equal request as that to this one."""
        self.admission.release(context)
        log, now = context.log, time.monotonic()
        timings = log.timings(TaskTimings(), 0.0, now, now)
        token = context.resume_token(cached.finished.model)
        answer = cached.answer_to(context.started(), timings, token)
        log.replayed(answer)
        self.ended(log)
        return answer

    def _open(self, context: RequestContext) -> AnswerStream:
        """Return a new answer, its task on the way. Add no suspending `await` before `_deliver`, which ends it."""
        request, prompt, upstream = context.request, context.prompts[0], self.upstream
        for score in context.plan.scores:
            self.drift.scored(score)
        steering = Steering()
        cascade, guards = None, None
        if context.plan.cascade is not None:
            cascade = Cascade(upstream, self.escalations, context)
            steering.is_held, steering.next_run = cascade.holds, cascade.next_run
        if context.safety.guards or context.safety.answer_readers:
            guards = GuardRunner(upstream, context)
            steering.checks, steering.check_answer = guards.checks, guards.check_answer
        if context.allow_degraded and not request.resume:
            steering.fall_back = partial(upstream.fall_back, context)
        first = upstream.new_run(
            request,
            prompt,
            context.request_id,
            context.deadline,
            request.resume,
            counts_prompt=request.answer_index == 0,
        )
        is_complete = (
            already_complete(prompt.sampling, first.transcript) if request.resume else None
        )
        on_end = partial(self._on_end, context, cascade)
        stream = AnswerStream(upstream.registry, context, first, on_end, steering)
        if is_complete is not None:
            stream.finish(is_complete, time.monotonic())
        elif prompt.chunks:
            ChunkRuns(upstream, context, first).start(stream)
        else:
            upstream.send(context, first)
        if guards is not None and not stream.has_ended:
            guards.check_prompt(stream)  # while the run is computed
        context.prompts = ()  # they take memory, and the answer may take long
        return stream

    def _on_end(
        self, context: RequestContext, cascade: Cascade | None, answer: AnswerStream
    ) -> None:
        """Record, count and learn from an answer that has ended."""
        now, log = time.monotonic(), context.log
        log.ended(answer, now)
        used = self.upstream.record_end(context, answer, now)
        is_refused = answer.error is not None and not answer.was_accepted
        self.admission.release(context, used, answer.error if is_refused else None)
        self.state.keys.on_end(context.key, answer)
        if log.answer_key:
            self.state.answers.on_end(log.answer_key, answer)
        if cascade is not None and cascade.score is not None:
            self.drift.scored(cascade.score)
            context.plan.scores.append(cascade.score)
        self.ended(log)
        if log.answer_findings or (log.guards is not None and log.guards.decided):
            self.records.decided(log)
        self.shadows.ended(context, answer)

    def ended(self, log: RequestLog) -> None:
        """Record and count a valid request that was refused, got a cached answer, or whose runs have ended."""
        self.metrics.ended(log, self.records.ended(log))

    def refused(self, context: RequestContext, error: BaseException) -> None:
        """Record and count a request that `error` ended before it had an answer."""
        context.log.error = context.error_of(error).reason
        self.ended(context.log)

    def _parts_of(self, request: ValidRequest, answer: AnswerStream | Replay) -> PartEvents:
        """Return what finds tool calls and reasoning in the answer."""
        policies = self.admission.in_force.policies
        return PartEvents(
            request.tools,
            lambda model: policies.catalog[model].tokenizer,
            answer.text_before,
            len(request.resume),
            partial(policies.inspector.assembled, request.tenant, request.labels),
        )

    async def _deliver(
        self, context: RequestContext, answer: AnswerStream | Replay, write: Write
    ) -> None:
        """Write the events of an answer as they come; those that are there together in one message."""
        request, has_events = context.request, asyncio.Event()
        parts = None
        if request.tools is not None or self.catalog.marks_reasoning:
            parts = self._parts_of(request, answer)

        async def put(response: GenerateResponse) -> None:
            if response.HasField("finished"):
                # Whoever has the whole answer gets it again from every gateway.
                await self.state.keys.wait_stored(request.key)
            if parts is None or parts.change(response):
                await write(response)
            if parts is not None and parts.blocked and isinstance(answer, AnswerStream):
                # The policy blocks what was assembled from the answer.
                answer.block(parts.blocked, time.monotonic())

        reader = answer.join(
            len(request.resume),
            self.settings.reader_buffer_tokens,
            has_events.set,
            context.stop,
            model=request.resume_model,
        )
        try:
            # The first event comes once a batcher has the task, or frames prove it.
            while (started := answer.started(reader, request.resume_model)) is None:
                await has_events.wait()
                has_events.clear()
            context.log.started(started)
            first = answer.read(reader)
            if first is None:
                # A first token that comes soon shares its message with this event.
                await wait_for_event(has_events, STARTED_S)
                first = answer.read(reader) or GenerateResponse()
            first.started.CopyFrom(started)
            # Not interrupted: gRPC sends the headers with this message, and takes no status until it has.
            with context.uninterrupted():
                await put(first)
            is_finished = first.HasField("finished")
            del started, first  # an answer may take long
            while not is_finished:
                await has_events.wait()
                has_events.clear()
                if (response := answer.read(reader)) is not None:
                    await put(response)
                    is_finished = response.HasField("finished")
        finally:
            answer.leave(reader, context.departure())
            context.log.delivered(answer, self.catalog.settings)


def requests_of(request: ValidRequest) -> list[ValidRequest]:
    """Return one request for each of the n answers."""
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
    """Return the parameters of one answer.

    The first has the request's seed, the others seeds that depend on it and their index alone.
    """
    sampling = SamplingParams()
    sampling.CopyFrom(params)
    sampling.ClearField("n")
    if index and sampling.HasField("seed"):
        digest = hashlib.sha256(f"{sampling.seed} {index}".encode()).digest()
        sampling.seed = int.from_bytes(digest[:8]) >> 1
    return sampling
