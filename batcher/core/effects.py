"""What the ledger wants done. It collects here; the shell takes it and does the I/O."""

from dataclasses import dataclass, field
from enum import Enum

from batcher.core.rows import Row, RowState
from batcher.core.scheduler.task import Batch, QueuedTask
from sluice.internal.v1 import frame_pb2


class Settlement(Enum):
    """What JetStream is told about a task."""

    ACK = "ack"
    """Done: it leaves the work queue."""
    NAK = "nak"
    """Another batcher shall have it, at once."""
    LEAVE = "leave"
    """Nothing: another batcher has it already."""


@dataclass(frozen=True, slots=True)
class Formed:
    """A batch that is to be sent now."""

    batch_id: str
    batch: Batch
    rows: tuple[Row, ...]
    """Its members, in its order."""
    worker_id: str
    """What the worker calls itself."""


def batch_info(
    batch_id: str, worker_id: str, batch: Batch, member: QueuedTask
) -> frame_pb2.BatchInfo:
    """What the gateway is told about the batch of one of its members."""
    return frame_pb2.BatchInfo(
        batch_id=batch_id,
        cause=batch.cause.value,
        rows=len(batch.rows),
        padding_share=batch.padding_share,
        waited_ms=member.waited_s * 1e3,
        longest_waited_ms=batch.longest_wait.waited_s * 1e3,
        worker=worker_id,
    )


@dataclass(frozen=True, slots=True)
class Move:
    """A step in the life of a row; ``before`` is None for a row that just came."""

    row: Row
    before: RowState | None
    after: RowState


@dataclass(slots=True)
class Effects:
    """Everything that is to be done, each list in order."""

    moves: list[Move] = field(default_factory=list)
    frames: list[tuple[str, frame_pb2.Frame]] = field(default_factory=list)
    """Gateway and frame."""
    batches: list[Formed] = field(default_factory=list)
    cancels: list[tuple[str, str]] = field(default_factory=list)
    """Worker and request: rows that workers shall drop."""
    settled: list[tuple[str, Settlement]] = field(default_factory=list)
    questions: list[Row] = field(default_factory=list)
    """Rows whose gateway is to be asked whether it still waits."""
    dead: list[Row] = field(default_factory=list)
    """Tasks that become dead letters; `Row.final` says why."""
