"""The spans of held rows: task, queue, batch, as sluice/telemetry/names.py describes them.

They follow the state changes of rows: a row that is sent twice has two queue and two batch spans under one task span.
"""

import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, StatusCode, Tracer

from batcher.core.effects import FormedBatch, Move
from batcher.core.row import Row, RowState
from sluice.internal.v1 import frame_pb2, task_pb2
from sluice.telemetry import names
from sluice.telemetry.lost_spans import RecentRows
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


ENDING_MAX: Final = 256
"""Gateways that have ended and are remembered; they may have rows here for a moment."""
ENDED_MAX: Final = 20_000
"""Attempts that are kept in case their gateway is lost."""


@dataclass(slots=True)
class _Spans:
    task: Span
    context: Context
    queue: Span | None = None
    batch: Span | None = field(default=None)


@dataclass(slots=True)
class EndedAttempt:
    """An attempt whose rows here have ended, in case its gateway is lost with the spans above.

    Attributes:
        headers: with its context.
        ended_at: monotonic seconds; once it was sent, when that was known.
        times_ns: of its task spans, Unix nanoseconds.
        sent: whether its gateway has sent it.
    """

    gateway: str
    headers: Mapping[str, str]
    ended_at: float
    times_ns: tuple[int, int]
    attributes: Mapping[str, str | int]
    sent: bool = False


def by_gateway(attempts: Mapping[int, EndedAttempt]) -> dict[str, list[int]]:
    """The ids of the attempts of each gateway."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for span_id, attempt in attempts.items():
        found[attempt.gateway].append(span_id)
    return found


class RowSpans:
    """Open spans by row."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[Row, _Spans] = {}
        self._recent = RecentRows(tracer, "worker")
        self._ended: dict[int, EndedAttempt] = {}
        """By the id of their span, the one that ended first before the others."""
        self._ending: deque[str] = deque(maxlen=ENDING_MAX)
        """Gateways that send their spans themselves, and end."""

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
            if move.after is not RowState.WAITING:
                self._recent.ended(move.row.worker, move.row.headers, time.monotonic())
        if move.after is RowState.WAITING:
            spans.queue = self._start_queue(move.row, spans.context)
        elif move.after in (RowState.ENDED, RowState.CLOSED):
            _end_task(spans.task, move.row)
            self._keep(spans.task, move.row)
            del self._open[move.row]

    def worker_lost(self, worker: str, now: float) -> None:
        """A worker was lost, maybe with spans of rows that had just ended there."""
        self._recent.lost(worker, now)

    def formed(self, formed: FormedBatch) -> list[str]:
        """Opens the batch spans; returns the traceparent for Triton, then one for the engine spans of each row.

        The batch span of the first row that is traced stands for the batch. Triton's spans hang under its
        sender, which outlives a batcher that is killed, and so links lead there; without a traced row there are none.
        """
        members = {row: self._open[row] for row in formed.rows if row in self._open}
        links = _links_to(spans.task for spans in members.values())
        own = ""
        for row, spans in members.items():
            spans.batch = self._start_batch(spans.context, links, _batch_attributes(formed, row))
            if not own and spans.batch.is_recording():
                own = row.headers.get(TRACEPARENT, "") or traceparent_of(spans.batch)
                links = _links_to([spans.task])
        return [own, *(_engine_parent(row, members.get(row)) for row in formed.rows)]

    def of_row(self, row: Row) -> SpanContext | None:
        """The task span of a row that is held; None when it is not traced."""
        spans = self._open.get(row)
        return None if spans is None else spans.task.get_span_context()

    def gateway_ends(self, gateway: str) -> None:
        """A gateway sends all of its spans, and ends."""
        self._ending.append(gateway)
        self._ended = {one: kept for one, kept in self._ended.items() if kept.gateway != gateway}

    def gateway_begins(self, gateway: str) -> None:
        """A gateway has started, maybe one that has ended before."""
        if gateway in self._ending:
            self._ending.remove(gateway)

    def _keep(self, span: Span, row: Row) -> None:
        if row.task.gateway in self._ending:
            return
        sender = _sender_of(span)
        if sender is None or not (isinstance(span, ReadableSpan) and span.end_time):
            return
        if row.final is not None and row.final.end == frame_pb2.ROW_END_RETURNED:
            return  # another batcher gets it
        earlier = self._ended.pop(sender.span_id, None)
        began = (span.start_time or 0) if earlier is None else earlier.times_ns[0]
        self._ended[sender.span_id] = EndedAttempt(
            gateway=row.task.gateway,
            headers=row.headers,
            ended_at=time.monotonic(),
            times_ns=(began, span.end_time),
            attributes=_attempt_attributes(row.task),
        )
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    def ended(self, before: float) -> dict[int, EndedAttempt]:
        """Attempts that ended before a moment, and are not settled."""
        return {one: ended for one, ended in self._ended.items() if ended.ended_at < before}

    def sent(self, span_ids: Iterable[int], now: float) -> None:
        """A gateway has sent these attempts."""
        for ended in filter(None, map(self._ended.get, span_ids)):
            if not ended.sent:
                ended.sent, ended.ended_at = True, now

    def settle(self, attempts: Mapping[int, EndedAttempt], gone: Collection[str]) -> None:
        """Forgets those of ``attempts`` that were sent; sends others in place of those of gateways that are gone."""
        running = self._running() if gone else ()
        for span_id, ended in attempts.items():
            lost = ended.gateway in gone and span_id not in running
            if (lost or ended.sent) and self._ended.get(span_id) is ended:
                del self._ended[span_id]
                if lost:
                    self._stand_in(ended)

    def _stand_in(self, ended: EndedAttempt) -> None:
        send_in_place(
            self._tracer, ended.headers, names.SPAN_ATTEMPT, ended.times_ns, ended.attributes
        )

    def _running(self) -> set[int]:
        """The ids of attempts that have rows here."""
        tasks = (spans.task for spans in self._open.values())
        return {sender.span_id for sender in map(_sender_of, tasks) if sender}

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


def _links_to(tasks: Iterable[Span]) -> list[Link]:
    """To the spans that sent ``tasks``, each once."""
    senders = {sender.span_id: sender for sender in map(_sender_of, tasks) if sender}
    return [Link(sender) for sender in senders.values()]


def _sender_of(task: Span) -> SpanContext | None:
    """The span that a task span hangs under."""
    return task.parent if isinstance(task, ReadableSpan) else None


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
        span.set_attribute(names.GEN_AI_OUTPUT_TOKENS, len(move.row.produced))
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
