"""The spans of held rows: task, queue, batch, as sluice/telemetry/names.py describes them.

They follow the state changes of rows: a row that is sent twice has two queue and two batch spans under one task span.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    Tracer,
    get_current_span,
)

from batcher.core.effects import FormedBatch, Move
from batcher.core.row import Row, RowState
from sluice.internal.v1 import frame_pb2, task_pb2
from sluice.telemetry import names
from sluice.telemetry.tracing import (
    TRACEPARENT,
    context_of,
    is_unsampled,
    send_in_place,
    traceparent_of,
)
from sluice.wire import subjects
from sluice.wire.attempts import ATTEMPTS_PER_TASK

_FINISH_REASONS: Mapping[int, str] = {
    frame_pb2.ROW_END_STOP: "stop",
    frame_pb2.ROW_END_LENGTH: "length",
    frame_pb2.ROW_END_CANCELLED: "cancelled",
    frame_pb2.ROW_END_DEADLINE: "deadline",
    frame_pb2.ROW_END_FAILED: "failed",
    frame_pb2.ROW_END_REFUSED: "refused",
    frame_pb2.ROW_END_RETURNED: "returned",
}


ENDED_MAX: Final = 20_000
"""Rows that are kept in case their gateway is lost."""


@dataclass(slots=True)
class _Spans:
    task: Span
    context: Context
    queue: Span | None = None
    batch: Span | None = field(default=None)


@dataclass(frozen=True, slots=True)
class EndedRow:
    """A row that has ended, in case its gateway was lost with the spans above.

    Attributes:
        ended_at: monotonic seconds.
        times_ns: of its task span, Unix nanoseconds.
    """

    gateway: str
    headers: Mapping[str, str]
    ended_at: float
    times_ns: tuple[int, int]
    attributes: Mapping[str, str | int]


class RowSpans:
    """Open spans by row."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[Row, _Spans] = {}
        self._ended: deque[EndedRow] = deque(maxlen=ENDED_MAX)

    def moved(self, move: Move) -> None:
        """Opens and closes the spans of a row's states; its task span hangs under the context in its headers."""
        if move.before is None and not is_unsampled(move.row.headers):
            self._open[move.row] = self._start_task(move.row)
        spans = self._open.get(move.row)
        if spans is None:
            return
        if spans.queue is not None and move.before is RowState.WAITING:
            spans.queue.end()
            spans.queue = None
        if spans.batch is not None and move.after is not RowState.RUNNING:
            _end_batch(spans.batch, move)
            spans.batch = None
        if move.after is RowState.WAITING:
            spans.queue = self._start_queue(move.row, spans.context)
        elif move.after in (RowState.ENDED, RowState.CLOSED):
            _end_task(spans.task, move.row)
            self._keep(spans.task, move.row)
            del self._open[move.row]

    def formed(self, formed: FormedBatch) -> list[str]:
        """Opens the batch spans; returns the traceparent for Triton, then one for the engine spans of each row.

        The batch span of the first row that is traced stands for the batch. Triton's spans hang under its
        sender, which outlives a batcher that is killed, and so links lead there; without a traced row there are none.
        """
        members = {row: self._open[row] for row in formed.rows if row in self._open}
        links = _links_to(members)
        own = ""
        for row, spans in members.items():
            spans.batch = self._start_batch(spans.context, links, _batch_attributes(formed, row))
            if not own and spans.batch.is_recording():
                own = row.headers.get(TRACEPARENT, "") or traceparent_of(spans.batch)
                links = _links_to([row])
        return [own, *(_engine_parent(row, members.get(row)) for row in formed.rows)]

    def of_row(self, row: Row) -> SpanContext | None:
        """The task span of a row that is held; None when it is not traced."""
        spans = self._open.get(row)
        return None if spans is None else spans.task.get_span_context()

    @property
    def recording(self) -> bool:
        """Whether spans are open."""
        return bool(self._open)

    def _keep(self, span: Span, row: Row) -> None:
        if isinstance(span, ReadableSpan) and span.start_time and span.end_time:
            times, attributes = (span.start_time, span.end_time), _attempt_attributes(row.task)
            ended_at = time.monotonic()
            self._ended.append(EndedRow(row.task.gateway, row.headers, ended_at, times, attributes))

    def ended(self, before: float) -> list[EndedRow]:
        """Rows that ended before a moment, each once."""
        found = []
        while self._ended and self._ended[0].ended_at < before:
            found.append(self._ended.popleft())
        return found

    def stand_in(self, rows: Iterable[EndedRow]) -> None:
        """The gateways of ``rows`` were lost, and their attempt spans with them: sends others in their place."""
        for row in rows:
            send_in_place(
                self._tracer, row.headers, names.SPAN_ATTEMPT, row.times_ns, row.attributes
            )

    def close(self) -> None:
        """Ends the open spans."""
        for spans in self._open.values():
            for span in (spans.queue, spans.batch, spans.task):
                if span is not None:
                    span.end()
        self._open.clear()

    def _start_task(self, row: Row) -> _Spans:
        context, attributes = context_of(row.headers), _task_attributes(row.task)
        span = self._tracer.start_span(names.SPAN_TASK, context, SpanKind.CONSUMER, attributes)
        return _Spans(span, trace.set_span_in_context(span, Context()))

    def _start_queue(self, row: Row, context: Context) -> Span:
        attributes: dict[str, str | int] = {
            names.PRIORITY_CLASS: row.task.priority_class,
            names.ATTEMPT: row.attempt % ATTEMPTS_PER_TASK,
        }
        return self._tracer.start_span(names.SPAN_QUEUE, context, attributes=attributes)

    def _start_batch(
        self, context: Context, links: Sequence[Link], attributes: Mapping[str, str | int | float]
    ) -> Span:
        return self._tracer.start_span(
            names.SPAN_BATCH, context, attributes=attributes, links=links
        )


def _attempt_attributes(task: task_pb2.Task) -> dict[str, str | int]:
    """Of a span in place of the gateway's."""
    return {
        names.END: names.GATEWAY_LOST,
        names.REQUEST_ID: task.request_id,
        names.TENANT: task.tenant,
        names.PRIORITY_CLASS: task.priority_class,
        names.GEN_AI_REQUEST_MODEL: task.model,
        names.TASK_ATTEMPT: task.attempt // ATTEMPTS_PER_TASK,
    }


def _links_to(rows: Iterable[Row]) -> list[Link]:
    """To the spans that sent ``rows``, each once."""
    senders = (get_current_span(context_of(row.headers)).get_span_context() for row in rows)
    return [Link(one) for one in {one.span_id: one for one in senders if one.is_valid}.values()]


def _engine_parent(row: Row, spans: _Spans | None) -> str:
    if spans is None or spans.batch is None:
        return row.headers[TRACEPARENT]
    return traceparent_of(spans.batch)


def _task_attributes(task: task_pb2.Task) -> dict[str, str | int]:
    return {
        names.REQUEST_ID: task.request_id,
        names.PRIORITY_CLASS: task.priority_class,
        names.TENANT: task.tenant,
        names.TASK_ATTEMPT: task.attempt // ATTEMPTS_PER_TASK,
        names.GEN_AI_REQUEST_MODEL: task.model,
        names.GEN_AI_MAX_TOKENS: task.sampling.max_tokens,
        names.GEN_AI_INPUT_TOKENS: len(task.prompt_token_ids),
        names.MESSAGING_SYSTEM: "nats",
        names.MESSAGING_DESTINATION: subjects.tasks(task.model, task.priority_class),
        names.MESSAGING_OPERATION: "process",
    }


def _batch_attributes(formed: FormedBatch, row: Row) -> dict[str, str | int | float]:
    batch = formed.batch
    return {
        names.BATCH_ID: formed.batch_id,
        names.BATCH_ROWS: len(batch.rows),
        names.BATCH_CAUSE: batch.cause.value,
        names.BATCH_LIMIT: batch.limit.value,
        names.BATCH_PADDING_SHARE: batch.padding_share,
        names.BATCH_LONGEST_WAIT_MS: batch.longest_wait.waited_s * 1e3,
        names.BATCH_LONGEST_WAIT_REQUEST: batch.longest_wait.request_id,
        names.WORKER_ID: formed.worker_id,
        names.ATTEMPT: row.attempt % ATTEMPTS_PER_TASK,
    }


def _end_batch(span: Span, move: Move) -> None:
    if move.after is RowState.WAITING:
        span.set_attribute(names.END, "lost")
        span.set_status(StatusCode.ERROR, "the worker was lost, or did not go on with the row")
    else:
        end = end_word(move.row)
        span.set_attribute(names.END, "answered" if end in _ANSWERED else end)
    span.end()


_ANSWERED: Final = frozenset({"stop", "length"})


def end_word(row: Row) -> str:
    """How a row ended; "superseded": its gateway has gone, or has sent it again with a higher attempt."""
    return "superseded" if row.final is None else _FINISH_REASONS.get(row.final.end, "unspecified")


def _end_task(span: Span, row: Row) -> None:
    span.set_attribute(names.GEN_AI_OUTPUT_TOKENS, len(row.produced))
    span.set_attribute(names.ATTEMPT, row.attempt % ATTEMPTS_PER_TASK)
    if row.final is not None:
        span.set_attribute(names.GEN_AI_FINISH_REASONS, (end_word(row),))
        if row.final.HasField("error"):
            span.set_attribute(names.ERROR_REASON, row.final.error.reason)
            span.set_status(StatusCode.ERROR, row.final.error.message)
    else:
        span.set_attribute(names.END, end_word(row))
        span.set_status(StatusCode.ERROR, "sent again by its gateway, or its gateway has gone")
    span.end()
