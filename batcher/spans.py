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
from sluice.internal.v1 import frame_pb2, task_pb2
from sluice.telemetry import names
from sluice.telemetry.tracing import TRACEPARENT, context_of, is_unsampled, traceparent_of
from sluice.wire import subjects

_END_WORDS: Final = {
    end: name.removeprefix("TASK_END_").lower() for name, end in frame_pb2.TaskEnd.items()
}


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
        task = self._tracer.start_span(
            names.SPAN_TASK, context_of(request.headers), SpanKind.CONSUMER
        )
        if not task.is_recording():
            return
        attributes = _task_attributes(request.task)
        task.set_attributes(attributes)
        context = trace.set_span_in_context(task, Context())
        of_queue = {name: attributes[name] for name in (names.PRIORITY_CLASS, names.ATTEMPT)}
        queue = self._tracer.start_span(names.SPAN_QUEUE, context, attributes=of_queue)
        self._open[request] = _Spans(task, context, queue)

    def on_ended(self, request: QueuedRequest) -> None:
        """End the spans of a request that has ended here, or was returned."""
        spans = self._open.pop(request, None)
        if spans is None:
            return
        if request.batch is None:
            spans.inner.end()
        else:
            _end_batch(spans.inner, request)
        _end_task(spans.task, request)

    def on_batch(self, batch: Batch[QueuedRequest]) -> list[str]:
        """Start the batch spans.

        Triton's spans become children of the sender of the first traced request, because it
        outlives a batcher that is killed; hence the links to it. Without a traced request Triton
        makes no spans.

        Returns:
            The traceparent for Triton, then one for the engine spans of each request.
        """
        members = {
            request: self._open[request] for request in batch.entries if request in self._open
        }
        received = [request.headers.get(TRACEPARENT, "") for request in batch.entries]
        if not members:
            return ["", *received]
        links = _links_to(spans.task for spans in members.values())
        own = ""
        for request, spans in members.items():
            spans.inner.end()
            spans.inner = self._tracer.start_span(
                names.SPAN_BATCH,
                spans.context,
                attributes=_batch_attributes(batch, request),
                links=links,
            )
            if not own and spans.inner.is_recording():
                own = request.headers.get(TRACEPARENT, "") or traceparent_of(spans.inner)
                links = _links_to([spans.task])
        traces = [
            traceparent_of(members[request].inner) if request in members else traceparent
            for request, traceparent in zip(batch.entries, received, strict=True)
        ]
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


def _links_to(tasks: Iterable[Span]) -> list[Link]:
    """Return a link to each span that sent one of the tasks."""
    senders = [task.parent for task in tasks if isinstance(task, ReadableSpan)]
    return [Link(sender) for sender in {span.span_id: span for span in senders if span}.values()]


def _task_attributes(task: task_pb2.Task) -> dict[str, str | int]:
    return {
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


def _batch_attributes(
    batch: Batch[QueuedRequest], request: QueuedRequest
) -> dict[str, str | int | float]:
    return {
        names.BATCH_ID: batch.batch_id,
        names.BATCH_ROWS: len(batch.entries),
        names.BATCH_CAUSE: batch.cause,
        names.BATCH_LIMIT: batch.limit,
        names.BATCH_PADDING_SHARE: batch.padding_share,
        names.BATCH_LONGEST_WAIT_MS: batch.longest_wait.waited_s * 1e3,
        names.BATCH_LONGEST_WAIT_REQUEST: batch.longest_wait.request_id,
        names.WORKER_ID: batch.worker_id,
        names.ATTEMPT: request.attempt,
    }


def _is_lost(request: QueuedRequest) -> bool:
    """Return whether the worker was lost or returned the request."""
    return (
        request.final is not None
        and request.final.return_cause != frame_pb2.RETURN_CAUSE_UNSPECIFIED
    )


def _end_batch(span: Span, request: QueuedRequest) -> None:
    if _is_lost(request):
        span.set_attribute(names.END, "lost")
        span.set_attribute(names.OUTPUT_TOKENS, len(request.produced))
        span.set_status(StatusCode.ERROR, "the worker was lost or returned the request")
    else:
        end = end_word(request)
        span.set_attribute(names.END, "answered" if end in _ANSWERED else end)
    span.end()


_ANSWERED: Final = frozenset({"stop", "length"})


def end_word(request: QueuedRequest) -> str:
    """Return how a request ended; "superseded" if its gateway is gone or has sent it again."""
    return (
        "superseded" if request.final is None else _END_WORDS.get(request.final.end, "unspecified")
    )


def _end_task(span: Span, request: QueuedRequest) -> None:
    span.set_attribute(names.OUTPUT_TOKENS, len(request.produced))
    if request.final is not None:
        span.set_attribute(names.GEN_AI_FINISH_REASONS, (end_word(request),))
        if request.final.HasField("error"):
            span.set_attribute(names.ERROR_REASON, request.final.error.reason)
            span.set_status(StatusCode.ERROR, request.final.error.message)
    else:
        span.set_attribute(names.END, end_word(request))
        span.set_status(StatusCode.ERROR, "superseded by another attempt, or its gateway is gone")
    span.end()
