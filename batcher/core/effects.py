"""Effects of the request table: it collects them, and the event loop takes them and does the I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from batcher.core.row import Row, RowState
from batcher.core.scheduler.task import Batch
from sluice.internal.v1 import frame_pb2, worker_pb2


@dataclass(frozen=True, slots=True)
class FormedBatch:
    """A batch to send now."""

    batch_id: str
    batch: Batch
    rows: tuple[Row, ...]
    """Its members, in its order."""
    worker_id: str
    """What the worker calls itself."""

    def info(self, row: Row) -> frame_pb2.BatchInfo:
        """The description of the batch in the final frame of one of its rows."""
        return frame_pb2.BatchInfo(
            batch_id=self.batch_id,
            cause=self.batch.cause.value,
            rows=len(self.rows),
            padding_share=self.batch.padding_share,
            waited_ms=row.waited_s * 1e3,
            longest_waited_ms=self.batch.longest_wait.waited_s * 1e3,
            worker=self.worker_id,
        )

    def message(
        self, batcher: str, traceparents: Sequence[str], now: float, waiting: Sequence[int] = ()
    ) -> worker_pb2.Batch:
        """The message to the worker; ``traceparents`` are those of the rows, ``waiting`` what still waits by class."""
        rows = zip(self.rows, traceparents, strict=True)
        return worker_pb2.Batch(
            batch_id=self.batch_id,
            batcher=batcher,
            rows=[row.message(traceparent, now) for row, traceparent in rows],
            waiting=waiting,
        )


@dataclass(slots=True)
class Effects:
    """All pending effects, each list in order."""

    moves: list[tuple[Row, RowState]] = field(default_factory=list)
    """Rows and the states that they came to."""
    ended: list[Row] = field(default_factory=list)
    """Rows that have ended here, or return to their gateways."""
    frames: list[tuple[str, frame_pb2.Frame]] = field(default_factory=list)
    """Gateway and frame."""
    held: list[tuple[str, frame_pb2.RowRef]] = field(default_factory=list)
    """Gateway and row: it is told that this batcher has the row."""
    batches: list[FormedBatch] = field(default_factory=list)
    cancels: dict[str, list[frame_pb2.RowRef]] = field(default_factory=dict)
    """By worker, the rows that it shall drop, up to an attempt: a later one goes on."""
    demands: list[tuple[str, Sequence[int]]] = field(default_factory=list)
    """Worker, and the rows that wait for it, by class."""
    waiting: Sequence[int] = ()
    """Rows that still wait, by class."""
