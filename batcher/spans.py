"""Spans of a batcher's requests: task, queue, batch, as sluice/telemetry/names.py describes them.

A request that its gateway sends again has another task span, with its own queue span.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, StatusCode, Tracer

from batcher.core.queued_request import QueuedRequest
from batcher.core.scheduler.entry import Batch
from sluice.internal.v1 import frame_pb2
from sluice.telemetry import names
from sluice.telemetry.tracing import TRACEPARENT, context_of, is_unsampled, traceparent_of
from sluice.wire import subjects

_END_WORDS: Final = {
    end: name.removeprefix("TASK_END_").lower() for name, end in frame_pb2.TaskEnd.items()
}
_ANSWERED: Final = {"stop": "answered", "length": "answered"}


@dataclass(slots=True)
class _Spans:
    task: Span
    context: Context
    inner: Span
    """The queue span, then the batch span."""


class RequestSpans:
    """Open spans by request."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[QueuedRequest, _Spans] = {}

    def on_added(self, request: QueuedRequest) -> None:
        """Start the spans of a request: its task span is a child of the context in its headers."""
        if is_unsampled(request.headers):
            return
        task = request.task
        attributes: dict[str, str | int] = {
            names.REQUEST_ID: task.request_id,
            names.PRIORITY_CLASS: task.priority_class,
            names.TENANT: task.tenant,
            names.ATTEMPT: task.attempt,
            names.GEN_AI_REQUEST_MODEL: task.model,
            names.GEN_AI_MAX_TOKENS: task.sampling.max_tokens,
            names.INPUT_TOKENS: len(task.prompt_token_ids),
            names.MESSAGING_SYSTEM: "nats",
            names.MESSAGING_TEMPLATE: subjects.ALL_TASKS,
            names.MESSAGING_OPERATION: "process",
        }
        span = self._tracer.start_span(
            names.SPAN_TASK, context_of(request.headers), SpanKind.CONSUMER, attributes
        )
        if span.is_recording():
            context = trace.set_span_in_context(span, Context())
            of_queue = {name: attributes[name] for name in (names.PRIORITY_CLASS, names.ATTEMPT)}
            queue = self._tracer.start_span(names.SPAN_QUEUE, context, attributes=of_queue)
            self._open[request] = _Spans(span, context, queue)

    def on_ended(self, request: QueuedRequest) -> None:
        """End the spans of a request that has ended here, was returned, or was superseded."""
        spans = self._open.pop(request, None)
        if spans is None:
            return
        end, final = end_word(request), request.final
        if request.batch is not None:
            # The worker was lost, or returned the request.
            is_lost = final is not None and final.return_cause != frame_pb2.RETURN_CAUSE_UNSPECIFIED
            if is_lost:
                spans.inner.set_attribute(names.OUTPUT_TOKENS, len(request.produced))
                lost = "the worker was lost or returned the request"
                spans.inner.set_status(StatusCode.ERROR, lost)
            spans.inner.set_attribute(names.END, "lost" if is_lost else _ANSWERED.get(end, end))
        spans.inner.end()
        spans.task.set_attribute(names.OUTPUT_TOKENS, len(request.produced))
        if final is None:
            spans.task.set_attribute(names.END, end)
            superseded = "superseded by another attempt, or its gateway is gone"
            spans.task.set_status(StatusCode.ERROR, superseded)
        else:
            spans.task.set_attribute(names.GEN_AI_FINISH_REASONS, (end,))
            if final.HasField("error"):
                spans.task.set_attribute(names.ERROR_REASON, final.error.reason)
                spans.task.set_status(StatusCode.ERROR, final.error.message)
        spans.task.end()

    def on_batch(self, batch: Batch[QueuedRequest]) -> list[str]:
        """Start the batch spans.

        Triton's spans become children of the sender of the first traced request, because it
        outlives a batcher that is killed; hence the links to it. Without a traced request Triton
        makes no spans.

        Returns:
            The traceparent for Triton, then one for the engine spans of each request.
        """
        received = [request.headers.get(TRACEPARENT, "") for request in batch.entries]
        members = [self._open[request] for request in batch.entries if request in self._open]
        own, links = "", _links_to(members)
        traces = []
        for request, traceparent in zip(batch.entries, received, strict=True):
            spans = self._open.get(request)
            if spans is not None:
                spans.inner.end()
                attributes = _batch_attributes(batch, request)
                spans.inner = self._tracer.start_span(
                    names.SPAN_BATCH, spans.context, attributes=attributes, links=links
                )
                own_trace = traceparent_of(spans.inner)
                if not own and spans.inner.is_recording():
                    own = traceparent or own_trace
                    links = _links_to([spans])
                traceparent = own_trace
            traces.append(traceparent)
        return [own, *traces]

    def of_request(self, request: QueuedRequest) -> SpanContext | None:
        """Return the task span of an open request; None if it is not traced."""
        spans = self._open.get(request)
        return None if spans is None else spans.task.get_span_context()

    def close(self) -> None:
        """End the open spans."""
        for spans in self._open.values():
            spans.inner.end()
            spans.task.end()
        self._open.clear()


def _links_to(members: Iterable[_Spans]) -> list[Link]:
    """Return a link to each span that sent one of the tasks."""
    senders = [spans.task.parent for spans in members if isinstance(spans.task, ReadableSpan)]
    return [Link(sender) for sender in {span.span_id: span for span in senders if span}.values()]


def _batch_attributes(
    batch: Batch[QueuedRequest], request: QueuedRequest
) -> dict[str, str | int | float]:
    return {
        names.BATCH_ID: batch.batch_id,
        names.BATCH_ROWS: len(batch.entries),
        names.BATCH_CAUSE: batch.cause,
        names.BATCH_LIMIT: batch.limit,
        names.WORKER_ID: batch.worker_id,
        names.ATTEMPT: request.attempt,
    }


def end_word(request: QueuedRequest) -> str:
    """Return how a request ended; "superseded" if its gateway is gone or has sent it again."""
    if request.final is None:
        return "superseded"
    return _END_WORDS.get(request.final.end, "unspecified")
