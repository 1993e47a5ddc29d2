"""Rows on their way to the batchers: those of callers' requests, and those that the gateway itself asks for."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.trace import SpanKind

from gateway.admission.overload import OverloadControl
from gateway.admission.pipeline import Admission, AdmittedRequest
from gateway.admission.prompts import PreparedPrompt
from gateway.admission.usage import UsageAccounting
from gateway.records.record_builder import RecordBuilder
from gateway.streaming.attempt import ModelAttempt
from gateway.streaming.lifecycle import RequestTimings, StreamSpec
from gateway.streaming.registry import Registry
from gateway.streaming.stream import Stream
from gateway.telemetry.spans import CallSpans
from gateway.upstream.nats_transport import NatsTransport
from gateway.upstream.tasks import new_attempt, task_of
from gateway.validation.requests import ValidRequest
from sluice.errors import Cancelled, SluiceError
from sluice.internal.v1.task_pb2 import Task
from sluice.telemetry import names
from sluice.telemetry.tracing import headers_of
from sluice.v1.inference_pb2 import Started
from sluice.wire import subjects


@dataclass(frozen=True)
class RequestContext:
    """An admitted request, and what its parts share while it runs."""

    request: ValidRequest
    admitted: AdmittedRequest
    record: RecordBuilder
    spans: CallSpans
    timings: RequestTimings

    @property
    def request_id(self) -> str:
        """The name of the request."""
        return self.record.request_id

    @property
    def deadline(self) -> float:
        """Monotonic seconds."""
        return self.admitted.scheduling.deadline


@dataclass(frozen=True)
class Upstream:
    """Sends rows; holds what all of them share."""

    admission: Admission
    overload: OverloadControl
    usage: UsageAccounting
    registry: Registry
    transport: NatsTransport
    stall_s: float

    def new_attempt(
        self,
        request: ValidRequest,
        prepared: PreparedPrompt,
        row_id: str,
        held: Sequence[int] = (),
    ) -> ModelAttempt:
        """A model's attempt at the answer; ``held`` are the tokens that the caller was shown before."""
        return new_attempt(request, prepared, row_id, held, self.stall_s, time.monotonic())

    def send_first(self, context: RequestContext, attempt: ModelAttempt) -> None:
        """Publishes the task of a request's first row; `NatsTransport.submitted` raises what goes wrong."""
        task = self._task(context, attempt, context.admitted.first)
        self.transport.submit(task.request_id, self._publish(context, task))

    def send(
        self, context: RequestContext, attempt: ModelAttempt, prepared: PreparedPrompt
    ) -> None:
        """Publishes the task of another row; the registry decides what follows when that fails."""
        self.admission.sent(prepared, context.request.priority_class)
        task = self._task(context, attempt, prepared)
        self.transport.submit(task.request_id, self._publish_other(context, task))

    def _task(
        self, context: RequestContext, attempt: ModelAttempt, prepared: PreparedPrompt
    ) -> Task:
        gateway_id = self.transport.gateway_id
        return task_of(attempt, context.request, prepared, gateway_id, context.deadline)

    async def _publish_other(self, context: RequestContext, task: Task) -> None:
        try:
            await self._publish(context, task)
        except SluiceError as error:
            self.registry.publish_failed(task.request_id, error, time.monotonic())

    async def _publish(self, context: RequestContext, task: Task) -> None:
        start = time.monotonic()
        attributes = {
            names.MESSAGING_SYSTEM: "nats",
            names.MESSAGING_OPERATION: "send",
            names.MESSAGING_DESTINATION: subjects.tasks(task.model, task.priority_class),
        }
        with context.spans.hop(names.SPAN_PUBLISH, SpanKind.PRODUCER, attributes) as span:
            await self.transport.publish(task, headers_of(span), context.deadline)
        context.timings.publish_ms += (time.monotonic() - start) * 1000
        self.registry.published(task.request_id)


class InternalRow:
    """A row that the gateway itself wants an answer to: a guard's question, a shadow. No caller reads it.

    Attributes:
        stream: its answer, as far as it has arrived.
    """

    def __init__(
        self,
        upstream: Upstream,
        request: ValidRequest,
        prepared: PreparedPrompt,
        attempt: ModelAttempt,
        deadline: float,
        *,
        with_logprobs: bool = False,
    ) -> None:
        """``request`` gives tenant, class and workload; at ``deadline`` the row fails with `DeadlinePassed`."""
        self._upstream = upstream
        self._deadline = deadline
        self._ended = asyncio.Event()
        started = Started(request_id=attempt.row_id, model=attempt.model)
        spec = StreamSpec(started, deadline, with_logprobs, RequestTimings(time.monotonic()))
        self.stream = upstream.registry.open(spec, attempt, on_end=lambda _: self._ended.set())
        gateway_id = upstream.transport.gateway_id
        self._task = task_of(attempt, request, prepared, gateway_id, deadline)
        upstream.admission.sent(prepared, request.priority_class)

    async def answer(self, headers: Mapping[str, str]) -> Stream:
        """Sends the row with the trace context ``headers``; returns its stream when that has ended.

        A cancelled caller cancels the row.

        Raises:
            SluiceError: there is no answer.
        """
        try:
            await self._publish(headers)
            await self._ended.wait()
        finally:
            # Has no effect once the stream has ended.
            no_reader = Cancelled("nobody waits for the answer any more")
            self._upstream.registry.fail(self.stream, no_reader)
        if self.stream.error is not None:
            raise self.stream.error
        return self.stream

    async def _publish(self, headers: Mapping[str, str]) -> None:
        try:
            await self._upstream.transport.publish(self._task, headers, self._deadline)
        except SluiceError:
            # Without an acknowledgement the task may be stored all the same: frames prove it.
            if not self._ended.is_set():
                raise
        self._upstream.registry.published(self._task.request_id)
