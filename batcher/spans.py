"""The spans of held rows: task, queue, batch, as sluice/telemetry/names.py describes them.

A row that its gateway sends again has another task span, with its own queue.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, StatusCode, Tracer

from batcher.core.row import Row
from batcher.core.scheduler.task import Batch
from sluice.internal.v1 import frame_pb2, task_pb2
from sluice.telemetry import names
from sluice.telemetry.lost_spans import RecentRows
from sluice.telemetry.tracing import (
    TRACEPARENT,
    context_of,
    is_unsampled,
    traceparent_of,
)
from sluice.wire import subjects

_END_WORDS: Final = {
    end: name.removeprefix("TASK_END_").lower() for name, end in frame_pb2.TaskEnd.items()
}


@dataclass(slots=True)
class _Spans:
    task: Span
    context: Context
    inner: Span
    """Of the queue, then of the batch."""


GATEWAY_UNSENT_S: Final = 30.0
"""A gateway may keep its spans for so long after a row has ended: its caller reads, or a guard does."""


class RowSpans:
    """Open spans by row.

    Attributes:
        of_workers, of_gateways: rows that have ended lately, whose spans these may not have sent yet.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[Row, _Spans] = {}
        self.of_workers = RecentRows(tracer, "worker")
        self.of_gateways = RecentRows(tracer, "gateway", keep_s=GATEWAY_UNSENT_S)

    def began(self, row: Row) -> None:
        """A row has come: its task span hangs under the context in its headers."""
        if is_unsampled(row.headers):
            return
        task = self._tracer.start_span(names.SPAN_TASK, context_of(row.headers), SpanKind.CONSUMER)
        if not task.is_recording():
            return
        attributes = _task_attributes(row.task)
        task.set_attributes(attributes)
        context = trace.set_span_in_context(task, Context())
        of_queue = {name: attributes[name] for name in (names.PRIORITY_CLASS, names.ATTEMPT)}
        queue = self._tracer.start_span(names.SPAN_QUEUE, context, attributes=of_queue)
        self._open[row] = _Spans(task, context, queue)

    def ended(self, row: Row) -> None:
        """A row has ended here, or was returned."""
        spans = self._open.pop(row, None)
        if spans is None:
            return
        now = time.monotonic()
        if row.batch is None:
            spans.inner.end()
        else:
            _end_batch(spans.inner, row)
            if not _is_lost(row):
                self.of_workers.ended(row.worker, row.headers, now)
        _end_task(spans.task, row)
        self.of_gateways.ended(row.task.gateway, row.headers, now)

    def formed(self, batch: Batch[Row]) -> list[str]:
        """Opens the batch spans; returns the traceparent for Triton, then one for the engine spans of each row.

        The batch span of the first row that is traced stands for the batch. Triton's spans hang under its
        sender, which outlives a batcher that is killed, and so links lead there; without a traced row there are none.
        """
        members = {row: self._open[row] for row in batch.rows if row in self._open}
        if not members:
            return ["", *[row.headers.get(TRACEPARENT, "") for row in batch.rows]]
        links = _links_to(spans.task for spans in members.values())
        own = ""
        for row, spans in members.items():
            spans.inner.end()
            spans.inner = self._tracer.start_span(
                names.SPAN_BATCH,
                spans.context,
                attributes=_batch_attributes(batch, row),
                links=links,
            )
            if not own and spans.inner.is_recording():
                own = row.headers.get(TRACEPARENT, "") or traceparent_of(spans.inner)
                links = _links_to([spans.task])
        return [
            own,
            *(
                traceparent_of(members[row].inner)
                if row in members
                else row.headers.get(TRACEPARENT, "")
                for row in batch.rows
            ),
        ]

    def of_row(self, row: Row) -> SpanContext | None:
        """The task span of a row that is held; None when it is not traced."""
        spans = self._open.get(row)
        return None if spans is None else spans.task.get_span_context()

    def close(self) -> None:
        """Ends the open spans."""
        for spans in self._open.values():
            spans.inner.end()
            spans.task.end()
        self._open.clear()


def _links_to(tasks: Iterable[Span]) -> list[Link]:
    """To the spans that sent ``tasks``, each once."""
    senders = [task.parent for task in tasks if isinstance(task, ReadableSpan)]
    return [Link(one) for one in {one.span_id: one for one in senders if one}.values()]


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


def _batch_attributes(batch: Batch[Row], row: Row) -> dict[str, str | int | float]:
    return {
        names.BATCH_ID: batch.batch_id,
        names.BATCH_ROWS: len(batch.rows),
        names.BATCH_CAUSE: batch.cause,
        names.BATCH_LIMIT: batch.limit,
        names.BATCH_PADDING_SHARE: batch.padding_share,
        names.BATCH_LONGEST_WAIT_MS: batch.longest_wait.waited_s * 1e3,
        names.BATCH_LONGEST_WAIT_REQUEST: batch.longest_wait.request_id,
        names.WORKER_ID: batch.worker_id,
        names.ATTEMPT: row.attempt,
    }


def _is_lost(row: Row) -> bool:
    """Whether its worker could not go on with a row."""
    return row.final is not None and row.final.return_cause != frame_pb2.RETURN_CAUSE_UNSPECIFIED


def _end_batch(span: Span, row: Row) -> None:
    if _is_lost(row):
        span.set_attribute(names.END, "lost")
        span.set_attribute(names.OUTPUT_TOKENS, len(row.produced))
        span.set_status(StatusCode.ERROR, "the worker was lost, or did not go on with the row")
    else:
        end = end_word(row)
        span.set_attribute(names.END, "answered" if end in _ANSWERED else end)
    span.end()


_ANSWERED: Final = frozenset({"stop", "length"})


def end_word(row: Row) -> str:
    """How a row ended; "superseded": its gateway has gone, or has sent it again with a higher attempt."""
    return "superseded" if row.final is None else _END_WORDS.get(row.final.end, "unspecified")


def _end_task(span: Span, row: Row) -> None:
    span.set_attribute(names.OUTPUT_TOKENS, len(row.produced))
    if row.final is not None:
        span.set_attribute(names.GEN_AI_FINISH_REASONS, (end_word(row),))
        if row.final.HasField("error"):
            span.set_attribute(names.ERROR_REASON, row.final.error.reason)
            span.set_status(StatusCode.ERROR, row.final.error.message)
    else:
        span.set_attribute(names.END, end_word(row))
        span.set_status(StatusCode.ERROR, "sent again by its gateway, or its gateway has gone")
    span.end()
