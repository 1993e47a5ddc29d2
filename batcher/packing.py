"""Between the wires and rows: a task that arrived becomes a row, and a formed batch a message to a worker."""

from collections.abc import Sequence
from typing import Final

from batcher.core.effects import Formed
from batcher.core.rows import Row
from batcher.intake import Arrival
from sluice.internal.v1 import worker_pb2
from sluice.wire import clock

TIMEOUT_MS_MAX: Final = 2**32 - 1


def row_of(arrival: Arrival, now: float) -> Row:
    """The row of a task; its deadline moves from the wall clock to the monotonic one, ``now``."""
    due_ms = arrival.task.deadline_unix_ms
    left_s = (due_ms - clock.unix_ms()) / 1e3 if due_ms else float("inf")
    return Row(
        arrival.task,
        deliveries=arrival.deliveries,
        produced=arrival.produced,
        deadline=now + left_s,
        now=now,
    )


def wire_batch(
    formed: Formed, batcher: str, traceparents: Sequence[str], now: float
) -> worker_pb2.Batch:
    """What is sent; ``traceparents`` are those of the rows."""
    rows = zip(formed.rows, traceparents, strict=True)
    return worker_pb2.Batch(
        batch_id=formed.batch_id,
        batcher=batcher,
        rows=[_wire_row(row, traceparent, now) for row, traceparent in rows],
    )


def _wire_row(row: Row, traceparent: str, now: float) -> worker_pb2.Row:
    wire = worker_pb2.Row(attempt=row.attempt, traceparent=traceparent)
    wire.task.CopyFrom(row.task)
    del wire.task.produced_token_ids[:]
    wire.task.produced_token_ids.extend(row.produced)
    left_ms = (row.deadline - now) * 1e3
    if left_ms < TIMEOUT_MS_MAX:
        wire.timeout_ms = max(1, int(left_ms))
    return wire
