"""The request table: all rows of one model that this batcher holds. Every event is a method call, every consequence an
effect.

The owner calls `advance` after events and when that has said, and then `take`s the effects. The rules are those of
docs/internals/wire.md:

- The gateway of a row leads its recovery: it asks about rows that are silent, and sends what is lost again, with the
  tokens it has and a higher attempt. So a row that this table forgets is never lost, and nothing here is durable.
- A row that its worker cannot go on with returns to its gateway at once, and is forgotten: the worker was lost, gave
  the row back, or did not take it.
- A worker that gives rows back, or is lost with rows in it, several times in succession gets one row at a time, after
  growing pauses, until a row brings a token: see `Breaker`.
- A row that has ended is kept for `ENDED_S`, in case its gateway lacks frames.
- A batcher that drains returns its rows to their gateways.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Final, cast

from batcher.core.frames import Outbox, final_frame, merge, without_final
from batcher.core.row import Row, RowState
from batcher.core.scheduler.queue import Queue
from batcher.core.scheduler.task import Batch
from batcher.core.workers import Workers, WorkerState
from sluice.errors import EngineFailed
from sluice.internal.v1 import control_pb2, frame_pb2, worker_pb2
from sluice.settings.batching import Policy

ENDED_S: Final = 3.0
ENDED_MAX: Final = 2048
"""How long rows that have ended are kept, and how many."""
ENDED_LATE_S: Final = 1.0
"""They may be kept this much longer."""
_WHOLE: Final = frozenset({frame_pb2.TASK_END_STOP, frame_pb2.TASK_END_LENGTH})
_NOT_TAKEN: Final = frame_pb2.RETURN_CAUSE_NOT_ACCEPTED
_LOST: Final = frame_pb2.TaskError(reason=EngineFailed.reason, message="the worker was lost")


class Effects:
    """What the table wants done: the event loop takes it and does the I/O, each list in order."""

    def __init__(self) -> None:
        self.added: list[Row] = []
        """Rows that have come."""
        self.batches: list[Batch[Row]] = []
        """To send now."""
        self.ended: list[Row] = []
        """Rows that have ended here, or return to their gateways."""
        self.bundles: list[tuple[str, frame_pb2.FrameBundle]] = []
        """Gateway, and what it is told."""
        self.cancels: dict[str, list[frame_pb2.TaskRef]] = {}
        """By worker, the rows that it shall drop, up to an attempt: a later one goes on."""
        self.demands: list[tuple[str, Sequence[int]]] = []
        """Worker, and the rows that wait for it, by class."""
        self.waiting: Sequence[int] = ()
        """Rows that still wait, by class."""


class Requests:
    """Rows of one model and their queue.

    Attributes:
        queue: read-only for others; only the table changes it.
        workers: the workers of the model; a worker has a name that stays the same when it restarts.
        active: rows that have not ended.
        size: of their tasks, bytes.
    """

    def __init__(
        self,
        batcher: str,
        *,
        policy: Policy,
        weights: Mapping[str, float] | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.queue = Queue(policy, weights)
        self.workers = workers or Workers()
        self._policy = policy
        self.active = 0
        self.size = 0
        self._batcher = batcher
        self._rows: dict[str, Row] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._outbox = Outbox(batcher)
        self._ended: deque[tuple[float, Row]] = deque()
        """With the time at which each is forgotten, the oldest first."""
        self._effects = Effects()
        self._batches = 0
        self._demanding = False
        """Whether a worker was told that rows wait for it."""
        self._draining = False

    def change_policy(self, policy: Policy, weights: Mapping[str, float]) -> None:
        """Activates another policy: waiting rows keep their waiting time, rows in workers continue."""
        self._policy = policy
        self.queue.reconfigure(policy, weights)

    @property
    def pending(self) -> bool:
        """Whether gateways are to be told something, or rows may go to a worker."""
        return bool(self.queue.order.waiting or self._outbox)

    def take(self) -> Effects:
        """The effects since the last call."""
        effects, self._effects = self._effects, Effects()
        effects.bundles = self._outbox.take()
        return effects

    # Tasks and questions, from gateways.

    def add(self, row: Row, now: float) -> None:
        """Takes a row. It replaces one of an earlier task of the request; of the same task it is a duplicate."""
        held = self._rows.get(row.request_id)
        if held is not None:
            if held.attempt >= row.attempt:
                self._outbox.hold(held)
                return
            self._close(held, now)
        self._rows[row.request_id] = row
        self.active += 1
        self.size += row.size
        self._effects.added.append(row)
        if not math.isinf(row.deadline):
            heappush(self._deadlines, (row.deadline, row.request_id))
        if self._draining:
            self._return(row, now)
        else:
            self.queue.add(row, now)

    def refuse(self, row: Row, error: frame_pb2.TaskError) -> None:
        """Returns a row to its gateway that was not taken."""
        row.final = frame_pb2.Final(end=frame_pb2.TASK_END_RETURNED, error=error)
        self._outbox.publish(row, final_frame(row))

    def cancel(self, rows: Iterable[frame_pb2.TaskRef], now: float) -> None:
        """Nobody waits for these rows any more, up to the attempts that are named."""
        for ref in rows:
            row = self._rows.get(ref.request_id)
            if row is not None and row.attempt <= ref.attempt:
                if row.state < RowState.ENDED:
                    row.final = frame_pb2.Final(end=frame_pb2.TASK_END_CANCELLED)
                self._close(row, now)

    def drop_gateway(self, gateway: str, now: float, *, waiting_only: bool = False) -> None:
        """A gateway is gone: nobody waits for its rows. ``waiting_only``: those that no worker has."""
        for row in [row for row in self._rows.values() if row.task.gateway == gateway]:
            if row.state is RowState.WAITING or not waiting_only:
                self._close(row, now)

    def answer(self, asked: control_pb2.TaskProgress) -> bool:
        """Tells the gateway what it lacks of a row; False when the row is not held."""
        row = self._rows.get(asked.request_id)
        if row is None or row.attempt < asked.attempt:
            return False
        self._outbox.resend(row, asked.next_index)
        self._outbox.hold(row)
        return True

    # Workers.

    def step(self, worker: str, report: worker_pb2.StepReport, now: float) -> None:
        """Takes a report.

        Raises:
            ChannelBroken: a report or a frame before it is missing: the channel must be opened again.
        """
        state = self.workers.of(worker)
        state.take(report)
        for admission in report.admissions:
            for taken in state.admitted(admission.batch_id):
                taken.taken = True
                if not taken.told:
                    self._outbox.hold(taken)
            self._refused(state, admission, now)
        succeeded = failed = False
        for frame in report.frames:
            row = state.rows.get(frame.request_id)
            if row is None or row.attempt != frame.attempt or (new := merge(row, frame)) is None:
                continue
            if not new.HasField("final"):
                succeeded = True
                if new.token_ids and not row.answered:
                    self.queue.first_token(row.request_id, now)
                self._outbox.publish(row, new)
            elif new.final.end == frame_pb2.TASK_END_RETURNED:
                failed |= new.final.return_cause != _NOT_TAKEN
                self._given_back(row, new, now)
            else:
                succeeded |= bool(new.token_ids or new.final.values)
                self._end(row, new.final, now, new)
        if succeeded or failed:
            self.workers.tried(worker, now, succeeded=succeeded, failed=failed)

    def lost(self, worker: str, now: float) -> None:
        """A worker is lost: its rows return to their gateways."""
        state = self.workers.lost(worker)
        if state is None or not state.rows:
            return
        self.workers.tried(worker, now, succeeded=False, failed=True)
        for row in list(state.rows.values()):
            # Before the worker has said so nobody knows that a last try was made alone.
            blamed = not row.task.last_try or row.taken
            cause = frame_pb2.RETURN_CAUSE_WORKER_LOST if blamed else _NOT_TAKEN
            self._return(row, now, cause, _LOST)

    def _refused(self, state: WorkerState, admission: worker_pb2.Admission, now: float) -> None:
        for refusal in admission.refused:
            state.refuses |= refusal.retryable
            row = state.rows.get(refusal.request_id)
            if row is None or row.batch is None or row.batch.batch_id != admission.batch_id:
                continue
            if refusal.retryable:
                self._return(row, now, _NOT_TAKEN, refusal.error)
            else:
                end = frame_pb2.Final(end=frame_pb2.TASK_END_REFUSED, error=refusal.error)
                self._end(row, end, now)

    def _given_back(self, row: Row, frame: frame_pb2.Frame, now: float) -> None:
        """Its worker cannot go on with a row."""
        if frame.token_ids:
            self._outbox.publish(row, without_final(frame))
        cause = frame.final.return_cause or frame_pb2.RETURN_CAUSE_WORKER_LOST
        self._return(row, now, cause, frame.final.error, stop=False)

    # Time.

    def advance(self, now: float) -> float:
        """Ends late rows, forgets those that ended long ago, and forms batches for the live workers.

        Returns when it must be called again if no event comes before.
        """
        wake_at = math.inf
        self._end_late(now)
        while self._ended and (self._ended[0][0] <= now or len(self._ended) > ENDED_MAX):
            row = self._ended.popleft()[1]
            row.batch = None  # which holds it
            if row.state is RowState.ENDED:
                self._close(row, now)
        active = self.workers.active()
        if self.queue.order.waiting or self._demanding:
            wake_at = self._feed(active, now)
            for row in self._effects.added:
                if row.state is RowState.WAITING:
                    row.told = True
                    self._outbox.hold(row)
            waiting = self._effects.waiting = self.queue.waiting_by_class()
            formed = {batch.worker for batch in self._effects.batches}
            self._effects.demands += self.workers.tell(waiting, active, formed, now)
            self._demanding = any(waiting)
        has_room = any(state.has_room for state in active.values())
        self.queue.waits.watch(now, has_room=has_room)
        if self._deadlines:
            wake_at = min(wake_at, self._deadlines[0][0])
        if self._ended:
            # Later than needed, so that rows which ended one after the other are forgotten together.
            wake_at = min(wake_at, self._ended[0][0] + ENDED_LATE_S)
        return wake_at

    def _end_late(self, now: float) -> None:
        """Ends rows whose deadline has passed; the first deadline is then that of a row that is held."""
        deadlines, rows = self._deadlines, self._rows
        while deadlines and (deadlines[0][0] <= now or deadlines[0][1] not in rows):
            row = rows.get(heappop(deadlines)[1])
            if row is not None and row.deadline <= now and row.state < RowState.ENDED:
                self._end(row, frame_pb2.Final(end=frame_pb2.TASK_END_DEADLINE), now)

    def _feed(self, active: Mapping[str, WorkerState], now: float) -> float:
        """Sends rows to workers with room; returns when there may be room for more if no event comes before."""
        while self.queue.order.waiting:
            batch, wake_at = self.queue.next_batch(now, self.workers.capacities(active, now))
            if batch is None:
                return min(math.inf if wake_at is None else wake_at, self.workers.probe_at(now))
            self._send(cast("Batch[Row]", batch))
        return math.inf

    # The end of the batcher.

    def drain(self, now: float, *, running: bool = False) -> None:
        """Returns waiting rows to their gateways, now and from now on; with ``running`` those of workers too."""
        self._draining = True
        for row in list(self._rows.values()):
            if row.state is RowState.WAITING or (running and row.state is RowState.SENT):
                self._return(row, now)

    # State changes of rows.

    def _send(self, batch: Batch[Row]) -> None:
        self._batches += 1
        worker = self.workers.of(batch.worker)
        batch.batch_id, batch.worker_id = f"{self._batcher}-{self._batches}", worker.worker_id
        for row in batch.rows:
            row.worker, row.state = batch.worker, RowState.SENT
            if not row.task.HasField("coalesce_ms"):
                gather_s = self._policy.of_class(row.priority_class).gather_s
                row.task.coalesce_ms = round(1000 * gather_s)
        worker.sent(batch.batch_id, batch.rows)
        self._effects.batches.append(batch)

    def _end(
        self,
        row: Row,
        final: frame_pb2.Final,
        now: float,
        frame: frame_pb2.Frame | None = None,
    ) -> None:
        """Ends ``row``; ``frame`` is the worker's final frame, if the worker ended it."""
        decode_s = final.timings.decode_ms / 1e3
        self._leave(row, now, stop=frame is None, whole=final.end in _WHOLE, decode_s=decode_s)
        row.state = RowState.ENDED
        row.end(final, now)
        self._outbox.publish(row, frame or final_frame(row))
        self._ended.append((now + ENDED_S, row))

    def _return(
        self,
        row: Row,
        now: float,
        cause: "frame_pb2.ReturnCause.ValueType" = frame_pb2.RETURN_CAUSE_UNSPECIFIED,
        error: frame_pb2.TaskError | None = None,
        *,
        stop: bool = True,
    ) -> None:
        """Gives a row back to its gateway, which sends it again."""
        end = frame_pb2.TASK_END_RETURNED
        row.final = frame_pb2.Final(end=end, return_cause=cause, error=error)
        self._outbox.publish(row, final_frame(row))
        self._close(row, now, stop=stop)

    def _close(self, row: Row, now: float, *, stop: bool = True) -> None:
        if row.state < RowState.ENDED:
            self._leave(row, now, stop=stop)
        row.state = RowState.CLOSED
        del self._rows[row.request_id]
        self._outbox.forget(row)

    def _leave(
        self, row: Row, now: float, *, stop: bool, whole: bool = False, decode_s: float = 0.0
    ) -> None:
        """Removes a row from queue and worker; with ``stop`` a worker that has it must drop it."""
        self.active -= 1
        self.size -= row.size
        self._effects.ended.append(row)
        if row.state is RowState.WAITING:
            self.queue.cancel(row.request_id)
            return
        if self.workers.landed(row) and stop:
            self._effects.cancels.setdefault(row.worker, []).append(row.ref)
        tokens = len(row.produced)
        self.queue.finish(row.request_id, tokens, now, whole=whole, decode_s=decode_s)
