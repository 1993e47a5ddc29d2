"""Telemetry of a worker's rows: the batcher of each, its times and its spans."""

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from opentelemetry.trace import Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from model_workers.engine.protocol import RowEnd, RowSpec, RowStep
from sluice.internal.v1 import frame_pb2, worker_pb2
from sluice.telemetry import names
from sluice.telemetry.catalog import STEP_SECONDS
from sluice.telemetry.tracing import EXPORT_DELAY_MS, TRACEPARENT, context_of, is_unsampled_parent

REPLACED: Final = "replaced"
HOLD_S: Final = 2 * EXPORT_DELAY_MS / 1e3
"""How long the spans of a row that has ended are kept, in case its batcher is lost before it sends its own, seconds."""


class Parents(NamedTuple):
    """What a row's spans hang under, as traceparents; empty: nothing."""

    batch: str
    origin: str = ""
    """When the batcher is lost, and its spans with it."""


@dataclass
class RowTimes:
    """One row. Times are monotonic seconds."""

    spec: RowSpec
    parents: Parents
    accepted_at: float
    first_at: float | None = None
    tokens: int = 0
    ended_at: float = math.inf
    end: str = ""
    failed: bool = False

    def hang_higher(self) -> None:
        """Its spans hang under what outlives its batcher."""
        self.parents = Parents(self.parents.origin or self.parents.batch)

    def cancelled(self) -> RowStep:
        """Its end, when it is not computed any more."""
        return self.spec.ended(RowEnd.CANCELLED, tokens=self.tokens)


class StepCounts:
    """What the engine did since the start. The engine's thread counts, another one reads."""

    def __init__(self) -> None:
        self.tokens = self.prompt_tokens = self.cached_tokens = self.step_tasks = 0
        self._step_s = self._longest_s = 0.0
        self._shortest_s = math.inf
        self._buckets = [0] * (len(STEP_SECONDS) + 1)

    def add_step(self, lasted_s: float) -> None:
        """The engine did a step."""
        self._step_s += lasted_s
        self._shortest_s = min(self._shortest_s, lasted_s)
        self._longest_s = max(self._longest_s, lasted_s)
        self._buckets[bisect_left(STEP_SECONDS, lasted_s)] += 1

    def message(self) -> worker_pb2.WorkerCounts:
        """For batchers, which show it among their metrics."""
        return worker_pb2.WorkerCounts(
            step_buckets=self._buckets,
            step_s=self._step_s,
            shortest_step_s=self._shortest_s,
            longest_step_s=self._longest_s,
            step_tasks=self.step_tasks,
            tokens=self.tokens,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
        )


class RowTelemetry:
    """Telemetry of the rows in the engine, by request. Used by the engine's thread only.

    Attributes:
        counts: over all rows.
    """

    def __init__(self, tracer: Tracer, model: str, worker: str, hold_s: float = HOLD_S) -> None:
        self._tracer = tracer
        self._hold_s = hold_s
        self._ended: deque[RowTimes] = deque()
        self._common: dict[str, AttributeValue] = {
            names.WORKER_ID: worker,
            names.GEN_AI_RESPONSE_MODEL: model,
        }
        self._rows: dict[str, RowTimes] = {}
        self.counts = StepCounts()

    def accept(self, spec: RowSpec, parents: Parents, now: float) -> RowTimes | None:
        """The engine took a row; returns the one of a lower attempt that it replaces."""
        old = self._rows.get(spec.request_id)
        if old is not None:
            if old.spec.owner != spec.owner:
                self.abandon([old.spec])
            self._record(old, now, REPLACED)
        self._rows[spec.request_id] = RowTimes(spec, parents, now)
        return old

    def abandon(self, rows: Iterable[RowSpec]) -> None:
        """Their batcher is lost."""
        for spec in rows:
            self._rows[spec.request_id].hang_higher()

    def lost(self, owner: str) -> None:
        """A batcher is lost, with the spans of rows that have just ended."""
        for row in self._ended:
            if row.spec.owner == owner:
                row.hang_higher()

    @property
    def holds(self) -> bool:
        """Whether there is something to `flush`."""
        return bool(self._ended)

    def flush(self, now: float) -> None:
        """Makes the spans of rows that ended long enough ago."""
        while self._ended and self._ended[0].ended_at + self._hold_s <= now:
            self._make_spans(self._ended.popleft())

    def owned(self, owner: str, before: float = math.inf) -> list[RowSpec]:
        """Rows of one batcher that were accepted before a moment."""
        return [
            row.spec
            for row in self._rows.values()
            if row.spec.owner == owner and row.accepted_at < before
        ]

    def add_step(self, step: RowStep, now: float) -> frame_pb2.TaskTimings | None:
        """Adds a step of a row; returns its timings when the row has ended."""
        row = self._rows[step.request_id]
        counts = self.counts
        if step.token_ids:
            row.tokens += len(step.token_ids)
            counts.tokens += len(step.token_ids)
            counts.step_tasks += 1
            if row.first_at is None:
                row.first_at = now
        if step.end is None:
            return None
        counts.prompt_tokens += len(row.spec.prompt)
        counts.cached_tokens += step.cached_prompt_tokens
        del self._rows[step.request_id]
        self._record(
            row, now, step.end.name.lower(), failed=step.end in (RowEnd.FAILED, RowEnd.RETURNED)
        )
        first_at = now if row.first_at is None else row.first_at
        return frame_pb2.TaskTimings(
            prefill_ms=(first_at - row.accepted_at) * 1000, decode_ms=(now - first_at) * 1000
        )

    def _record(self, row: RowTimes, now: float, end: str, *, failed: bool = False) -> None:
        if is_unsampled_parent(row.parents.batch):
            return
        row.ended_at, row.end, row.failed = now, end, failed
        if row.parents.origin:
            self._ended.append(row)
            self.flush(now)
        else:
            self._make_spans(row)

    def _make_spans(self, row: RowTimes) -> None:
        now, failed = row.ended_at, row.failed
        prefill_end = now if row.first_at is None else row.first_at
        tokens_in = len(row.spec.prompt) + len(row.spec.produced)
        self._span(
            names.SPAN_PREFILL,
            row,
            (row.accepted_at, prefill_end),
            {names.INPUT_TOKENS: tokens_in},
            failed and row.first_at is None,
        )
        if row.first_at is not None:
            about: dict[str, AttributeValue] = {
                names.OUTPUT_TOKENS: row.tokens,
                names.GEN_AI_FINISH_REASONS: [row.end],
            }
            self._span(names.SPAN_DECODE, row, (row.first_at, now), about, failed)

    def _span(
        self,
        name: str,
        row: RowTimes,
        times: tuple[float, float],
        about: dict[str, AttributeValue],
        failed: bool,
    ) -> None:
        offset_ns = _wall_offset_ns()
        start_ns, end_ns = (offset_ns + int(at * 1e9) for at in times)
        span = self._tracer.start_span(
            name,
            context_of({TRACEPARENT: row.parents.batch}),
            attributes={
                **self._common,
                **about,
                names.REQUEST_ID: row.spec.request_id,
                names.ATTEMPT: row.spec.attempt,
            },
            start_time=start_ns,
        )
        if failed:
            span.set_attribute(names.ERROR_REASON, "ENGINE_FAILED")
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)


def _wall_offset_ns() -> int:
    """What the wall clock is ahead of the monotonic one, nanoseconds.

    A thread that has to wait between two readings finds too little, by 10 ms on a busy core: the largest of three is
    right.
    """
    return max(time.time_ns() - time.monotonic_ns() for _ in range(3))
