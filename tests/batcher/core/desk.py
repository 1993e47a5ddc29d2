"""A request table with one worker, for tests of what it does."""

from collections.abc import Mapping
from typing import Any

from batcher.core.queued_request import QueuedRequest
from batcher.core.requests import Actions, RequestTable
from sluice.internal.v1 import control_pb2, frame_pb2, task_pb2, worker_pb2
from sluice.settings.batching import Policy
from sluice.wire.subjects import RANKS

WORKER = "w"
SLOTS = 8


class Desk:
    """The table, its worker and the clock."""

    def __init__(self) -> None:
        self.table = RequestTable("b", policy=Policy(max_rows=SLOTS))
        self.now = 100.0
        self.wake_at = 0.0

    # The gateway.

    def add(self, name: str = "r", headers: Mapping[str, str] | None = None, **fields: Any) -> None:
        """A task comes."""
        known: dict[str, Any] = {
            "gateway": "g",
            "model": "echo",
            "priority_class": "standard",
            "prompt_token_ids": (1, 2, 3),
            "sampling": task_pb2.Sampling(max_tokens=10),
        }
        task = task_pb2.Task(request_id=name, **{**known, **fields})
        self.table.add(QueuedRequest(task, self.now, headers, size=100), self.now)

    def cancel(self, *names: str, attempt: int = 0) -> None:
        refs = [frame_pb2.TaskRef(request_id=name, attempt=attempt) for name in names]
        self.table.cancel(refs, self.now)

    def query(self, name: str, next_index: int, attempt: int = 0) -> bool:
        progress = control_pb2.TaskProgress(request_id=name, attempt=attempt, next_index=next_index)
        return self.table.answer_query(progress)

    # The loop.

    def advance(self, room: int = 0, after_s: float = 0.0) -> Actions:
        """The actions since the last call; the worker gets up to ``room`` more requests."""
        self.now += after_s
        self.grant(WORKER, room)
        return self.decide()

    def grant(self, worker: str, room: int) -> None:
        """A worker, which is live from now on, may get this many more requests."""
        state = self.table.workers.states[worker]
        state.live |= room > 0
        granted = [state.sent_requests + room] * len(RANKS)
        state.report = worker_pb2.StepReport(task_grants=granted)

    def decide(self) -> Actions:
        """The actions since the last call."""
        self.wake_at = self.table.advance(self.now)
        return self.table.take()

    def send(self, room: int = SLOTS) -> str:
        """Send what waits; return the batch's id."""
        (batch,) = self.advance(room).batches
        return batch.batch_id

    def run(self, *names: str) -> None:
        """Add requests and have the worker admit them."""
        for name in names:
            self.add(name)
        self.admit(self.send())
        self.table.take()

    # The worker.

    def report(self, *frames: frame_pb2.Frame, worker: str = WORKER, **fields: Any) -> None:
        """A report of a worker, which grants the slots that are free."""
        state = self.table.workers.states[worker]
        known: dict[str, Any] = {
            "worker": state.worker_id or worker,
            "load": worker_pb2.WorkerLoad(slots=SLOTS),
        }
        report = worker_pb2.StepReport(
            sequence=state.next_sequence,
            frames=frames,
            ready=True,
            task_grants=[state.sent_requests + SLOTS - len(state.requests)] * len(RANKS),
            **{**known, **fields},
        )
        self.table.on_report(worker, report, self.now)

    def admit(self, batch_id: str, *refused: worker_pb2.Refusal) -> None:
        """The worker's engine has taken a batch."""
        self.report(admissions=[worker_pb2.Admission(batch_id=batch_id, refused=refused)])

    def step(
        self, name: str = "r", start: int = 0, count: int = 1, *, attempt: int = 0, end: int = 0
    ) -> None:
        """The worker has computed ``count`` tokens of a request."""
        self.report(frame(name, start, count, attempt=attempt, end=end))


def frame(
    name: str, start: int = 0, count: int = 0, *, attempt: int = 0, end: int = 0
) -> frame_pb2.Frame:
    """A frame with tokens 0, 1, ...; ``end`` makes it the last one."""
    made = frame_pb2.Frame(
        request_id=name, attempt=attempt, start_index=start, token_ids=range(count)
    )
    if end:
        made.final.end = frame_pb2.TaskEnd.ValueType(end)
        made.final.timings.prefill_ms = 3
    return made
