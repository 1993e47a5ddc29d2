"""The request table: all rows of one model that this batcher holds. Every event is a method call, every consequence an
effect.

The owner calls `advance` after events and when `wake_at` comes, and then `take`s the effects. The rules are those of
docs/internals/wire.md:

- The gateway of a row leads its recovery: it asks about rows that are silent, and sends what is lost again, with the
  tokens it has and a higher attempt. So a row that this table forgets is never lost, and nothing here is durable.
- When a worker is lost, its rows go back to the head of the queue with their tokens and a higher attempt; another
  worker may get them.
- A worker that returns rows, or is lost with rows in it, several times in succession gets one row at a time, after
  growing pauses, until a row brings a token: see `Breaker`.
- A row that returned `NO_PROGRESS_MAX` times in succession without a new token ends as failed: it may be the cause of
  the workers' failures. Its last try is made alone, or rows that always went with it would fail with it: one such row
  is out at a time, in a batch of its own, and its worker gets no other before it has brought a token.
- A row that has ended is kept for `ENDED_S`, in case its gateway lacks frames.
- A batcher that drains returns its rows to their gateways.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Final, cast

from batcher.core.effects import Cancelled, Effects, FormedBatch, Move
from batcher.core.frames import Merge, Outbox, classify, final_frame, merge
from batcher.core.row import IN_FLIGHT, Row, RowState
from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.queue import Queue
from batcher.core.scheduler.task import Batch
from batcher.core.workers import (
    Breaker,
    ChannelBroken,
    WorkerState,
    without_standby,
)
from sluice.errors import EngineFailed
from sluice.internal.v1 import control_pb2, frame_pb2, worker_pb2
from sluice.settings.batching import Policy

NO_PROGRESS_MAX: Final = 5
ENDED_S: Final = 3.0
ENDED_MAX: Final = 2048
"""How long rows that have ended are kept, and how many."""
ENDED_LATE_S: Final = 1.0
"""They may be kept this much longer."""
_OVER: Final = frozenset({RowState.ENDED, RowState.CLOSED})
_WHOLE: Final = frozenset({frame_pb2.ROW_END_STOP, frame_pb2.ROW_END_LENGTH})


class Requests:
    """Rows of one model and their queue. A worker has a name that stays the same when it restarts.

    Attributes:
        queue: read-only for others; only the table changes it.
        active: rows that have not ended.
        size: of their tasks, bytes.
        drained: workers that get no new rows.
    """

    def __init__(
        self,
        batcher: str,
        *,
        policy: Policy,
        weights: Mapping[str, float] | None = None,
        ranked: Sequence[str] = (),
        standby: int = 0,
    ) -> None:
        """``ranked``: all workers, those in front first; only needed with ``standby``, see `without_standby`."""
        self._ranked, self._standby = ranked, standby
        self.queue = Queue(policy, weights)
        self._policy = policy
        self.active = 0
        self.size = 0
        self._batcher = batcher
        self._rows: dict[str, Row] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._workers: dict[str, WorkerState] = {}
        self._breakers: dict[str, Breaker] = {}
        self._last_tries: deque[Row] = deque()
        """Rows that wait, outside of the queue, for their last try."""
        self._last_try: Row | None = None
        """The row that was in the queue for it last."""
        self._outbox = Outbox()
        self._ended: deque[tuple[float, Row]] = deque()
        """With the time at which each is forgotten, the oldest first."""
        self._effects = Effects()
        self._batches = 0
        self._wake_at: float | None = None
        self._demanding = False
        """Whether a worker was told that rows wait for it."""
        self._probe_at: float | None = None
        self._draining = False
        self.drained: frozenset[str] = frozenset()

    def __len__(self) -> int:
        """Rows held."""
        return len(self._rows)

    def __contains__(self, request_id: str) -> bool:
        """Whether the row is held."""
        return request_id in self._rows

    @property
    def waiting(self) -> int:
        """Rows that wait."""
        return self.queue.order.waiting + len(self._last_tries)

    def change_policy(self, policy: Policy, weights: Mapping[str, float]) -> None:
        """Activates another policy: waiting rows keep their waiting time, rows in workers continue."""
        self._policy = policy
        self.queue.reconfigure(policy, weights)

    def take(self) -> Effects:
        """The effects since the last call."""
        effects, self._effects = self._effects, Effects()
        effects.frames = self._outbox.take()
        return effects

    # Tasks and questions, from gateways.

    def add(self, row: Row, now: float) -> None:
        """Takes a row. It replaces one of an earlier task of the request; of the same task it is a duplicate."""
        held = self._rows.get(row.request_id)
        if held is not None and held.task.attempt >= row.task.attempt:
            self._tell_held(held)
            return
        if held is not None:
            self._close(held, now)
        self._enter(row)
        if self._draining:
            self._return(row, now)
        else:
            self.queue.add(row, now)
            self._tell_held(row)

    def refuse(self, row: Row, error: frame_pb2.RowError) -> None:
        """Returns a row to its gateway that was not taken."""
        row.final = frame_pb2.Final(end=frame_pb2.ROW_END_RETURNED, error=error)
        self._outbox.publish(row, final_frame(row))

    def cancel(self, rows: Iterable[frame_pb2.RowRef], now: float) -> bool:
        """Nobody waits for these rows any more; whether one of them was held."""
        held = {row.request_id: row for ref in rows if (row := self._up_to(ref)) is not None}
        for row in held.values():
            if row.state is not RowState.ENDED:
                row.final = frame_pb2.Final(end=frame_pb2.ROW_END_CANCELLED)
            self._close(row, now)
        return bool(held)

    def drop_gateway(self, gateway: str, now: float, *, waiting_only: bool = False) -> None:
        """A gateway is gone: nobody waits for its rows. ``waiting_only``: those that no worker has."""
        for row in [row for row in self._rows.values() if row.task.gateway == gateway]:
            if row.state is RowState.WAITING or not waiting_only:
                self._close(row, now)

    def answer(self, asked: control_pb2.AskedRow) -> bool:
        """Tells the gateway what it lacks of a row; False when the row is not held."""
        row = self._rows.get(asked.request_id)
        if row is None or row.task.attempt < asked.attempt:
            return False
        self._outbox.resend(row, asked.next_index)
        if row.state is not RowState.ENDED:
            self._tell_held(row)
        return True

    def _up_to(self, ref: frame_pb2.RowRef) -> Row | None:
        """The row, unless it is one of a later task of the request."""
        row = self._rows.get(ref.request_id)
        return row if row is not None and row.task.attempt <= ref.attempt else None

    def _tell_held(self, row: Row) -> None:
        ref = frame_pb2.RowRef(request_id=row.request_id, attempt=row.task.attempt)
        self._effects.held.append((row.task.gateway, ref))

    # Workers.

    def worker(self, worker: str) -> WorkerState:
        """The state of a worker since its channel was opened."""
        state = self._workers.get(worker)
        if state is None:
            state = self._workers[worker] = WorkerState()
        return state

    def active_workers(self) -> dict[str, WorkerState]:
        """Workers that batches may be sent to, by name."""
        live = {
            name: state
            for name, state in self._workers.items()
            if state.live and name not in self.drained
        }
        if not self._standby:
            return live
        # One that fails is replaced too, and tried again beside the standby.
        failing = {name for name in live if self._breaker(name).open_until}
        chosen = without_standby(live.keys() - failing, self._ranked, self._standby)
        return {name: live[name] for name in live if name in failing or name in chosen}

    def known_workers(self) -> dict[str, WorkerState]:
        """All workers with a channel, by name."""
        return dict(self._workers)

    def capacities(self, now: float) -> list[Capacity]:
        """What fits in each worker that gets rows."""
        return [
            state.capacity(name, self._rows_max(name, now))
            for name, state in self.active_workers().items()
        ]

    def step(self, worker: str, report: worker_pb2.StepReport, now: float) -> None:
        """Takes a report.

        Raises:
            ChannelBroken: a report or a frame before it is missing: the channel must be opened again.
        """
        self.worker(worker).report(report, now)
        for admission in report.admissions:
            self._admitted(worker, admission, now)
        returned = False
        for frame in report.frames:
            row = self._rows.get(frame.request_id)
            if row is None or row.state not in IN_FLIGHT or row.worker != worker:
                continue
            kind = classify(row, frame)
            if kind is Merge.GAP:
                raise ChannelBroken("frames are missing")
            if kind is Merge.NEW:
                returned |= frame.final.end == frame_pb2.ROW_END_RETURNED
                self._take_frame(row, frame, now)
        if returned:
            self._breaker(worker).failed(now)

    def queued(self, worker: str, batch_id: str, now: float) -> bool:
        """A worker has queued a batch, to be taken before its next step; whether effects cannot wait."""
        for row in self.worker(worker).queued(batch_id):
            if self._has(row, batch_id):
                if row.state is RowState.SENT:
                    self._move(row, RowState.RUNNING, now)
            else:  # It ended on its way: cancelled, or too late.
                self._cancel(worker, row)
        return bool(self._effects.cancels)

    def lost(self, worker: str, now: float) -> None:
        """A worker is lost: its rows wait again."""
        rows = list(self._workers.pop(worker, WorkerState()).rows.values())
        if rows:
            self._breaker(worker).failed(now)
        for row in rows:
            self._send_again(row, "the worker was lost", now)

    # Time.

    def advance(self, now: float, capacities: Sequence[Capacity]) -> None:
        """Ends late rows, forgets those that ended long ago, and forms batches for the live workers.

        ``capacities`` of them may be left out while no row waits.
        """
        if self._deadlines and self._deadlines[0][0] <= now:
            self._end_late(now)
        if self._last_tries:
            self._start_last_try(now)
        while self._ended and (self._ended[0][0] <= now or len(self._ended) > ENDED_MAX):
            row = self._ended.popleft()[1]
            if row.state is RowState.ENDED:
                self._close(row, now)
        self._wake_at = self._probe_at = None
        if self.waiting:
            self._feed(now, capacities)
            pauses = [breaker.open_until for breaker in self._breakers.values()]
            self._probe_at = min([until for until in pauses if until > now], default=None)
        if self.waiting or self._demanding:
            self._tell_waiting()

    def _tell_waiting(self) -> None:
        """Says to workers when rows of a class begin or cease to wait for them."""
        waiting, active = self.queue.waiting_by_class(), self.active_workers()
        formed = {batch.batch.worker for batch in self._effects.batches}
        for name, state in self._workers.items():
            told = waiting if name in active else (0,) * len(waiting)
            if state.live and state.tell(told) and name not in formed:
                self._effects.demands.append((name, told))
        self._effects.waiting = waiting
        self._demanding = any(waiting)

    def wake_at(self) -> float | None:
        """When `advance` must be called if no event comes before; None: never."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][1] not in self._rows:
            heappop(deadlines)
        moments = [deadlines[0][0]] if deadlines else []
        if self._ended:
            # Later than needed, so that rows which ended one after the other are forgotten together.
            moments.append(self._ended[0][0] + ENDED_LATE_S)
        if self._wake_at is not None:
            moments.append(self._wake_at)
        if self._probe_at is not None:
            moments.append(self._probe_at)
        return min(moments, default=None)

    def _feed(self, now: float, capacities: Sequence[Capacity]) -> None:
        order = self.queue.order
        while order.waiting:
            batch, self._wake_at = self.queue.next_batch(now, capacities)
            if batch is None:
                return
            self._send(batch, now)
            capacities = [capacity.after(batch) for capacity in capacities]

    # The end of the batcher.

    def drain(self, now: float) -> None:
        """Returns waiting rows to their gateways, now and from now on."""
        self._draining = True
        for row in list(self._rows.values()):
            if row.state is RowState.WAITING:
                self._return(row, now)

    def release(self, now: float) -> None:
        """Returns all rows to their gateways."""
        for row in list(self._rows.values()):
            if row.state is not RowState.ENDED:
                self._return(row, now)

    # State changes of rows.

    def _enter(self, row: Row) -> None:
        assert row.request_id not in self._rows, row.request_id
        self._rows[row.request_id] = row
        self.active += 1
        self.size += row.size
        self._effects.moves.append(Move(row, None, row.state))
        if not math.isinf(row.deadline):
            heappush(self._deadlines, (row.deadline, row.request_id))

    def _move(self, row: Row, state: RowState, now: float) -> None:
        before = row.state
        self._effects.moves.append(Move(row, before, state))
        row.move(state, now)
        if state in _OVER and before not in _OVER:
            self.active -= 1
            self.size -= row.size
        if state is RowState.CLOSED:
            del self._rows[row.request_id]

    def _end_late(self, now: float) -> None:
        """Ends rows whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            row = self._rows.get(heappop(self._deadlines)[1])
            if row is not None and row.deadline <= now and row.state not in _OVER:
                self._end(row, frame_pb2.Final(end=frame_pb2.ROW_END_DEADLINE), now)

    def _send(self, batch: Batch, now: float) -> None:
        self._batches += 1
        rows = cast(tuple[Row, ...], batch.rows)
        worker = self.worker(batch.worker)
        formed = FormedBatch(f"{self._batcher}-{self._batches}", batch, rows, worker.worker_id)
        for row in rows:
            row.worker = batch.worker
            row.gather_ms = self._gather_ms(row)
            row.batch = formed.info(row)
            self._move(row, RowState.SENT, now)
        worker.sent(formed.batch_id, rows)
        self._effects.batches.append(formed)

    def _gather_ms(self, row: Row) -> int:
        if row.no_progress:
            return 0  # The next token shows that the row is not to blame.
        if row.task.HasField("gather_ms"):
            return row.task.gather_ms
        return round(1000 * self._policy.of_class(row.priority_class).gather_s)

    def _breaker(self, worker: str) -> Breaker:
        breaker = self._breakers.get(worker)
        if breaker is None:
            breaker = self._breakers[worker] = Breaker()
        return breaker

    def _rows_max(self, worker: str, now: float) -> float:
        """Rows that the worker may have."""
        row = self._last_try
        if row is not None and row.alone and row.state in IN_FLIGHT and row.worker == worker:
            return 0
        return self._breaker(worker).rows_max(now)

    def _start_last_try(self, now: float) -> None:
        """The next row that has one left goes into the queue, once what became of the last one is known."""
        before = self._last_try
        if before is not None and before.alone and before.state not in _OVER:
            return
        self._last_try = row = self._last_tries.popleft()
        self.queue.requeue(row.request_id, len(row.produced), now)

    def _has(self, row: Row, batch_id: str) -> bool:
        """Whether the worker of a batch still has a row of it."""
        held = self._rows.get(row.request_id) is row and row.state in IN_FLIGHT
        return held and row.batch.batch_id == batch_id

    def _admitted(self, worker: str, admission: worker_pb2.Admission, now: float) -> None:
        self.queued(worker, admission.batch_id, now)
        for refusal in admission.refused:
            row = self._rows.get(refusal.request_id)
            if row is None or not self._has(row, admission.batch_id):
                continue
            if refusal.retryable:
                self._wait_again(row, now)
            else:
                end = frame_pb2.Final(end=frame_pb2.ROW_END_REFUSED, error=refusal.error)
                self._end(row, end, now)

    def _cancel(self, worker: str, row: Row) -> None:
        self._effects.cancels.append(Cancelled(worker, row.request_id, row.attempt))

    def _send_again(self, row: Row, why: str, now: float) -> None:
        """Its worker could not go on with it."""
        row.next_attempt()
        row.avoid = row.worker
        if row.no_progress >= NO_PROGRESS_MAX:
            self._fail(row, _no_progress(row, why), now)
        else:
            self._wait_again(row, now)

    def _wait_again(self, row: Row, now: float) -> None:
        if self._draining:
            self._return(row, now)
        else:
            self._landed(row)
            self._move(row, RowState.WAITING, now)
            row.alone = row.no_progress == NO_PROGRESS_MAX - 1
            if row.alone and row is not self._last_try:
                self._last_tries.append(row)
            else:
                self.queue.requeue(row.request_id, len(row.produced), now)

    def _take_frame(self, row: Row, frame: frame_pb2.Frame, now: float) -> None:
        if row.state is RowState.SENT:
            self._move(row, RowState.RUNNING, now)
        frame = merge(row, frame)
        if frame.token_ids or frame.final.values:
            self._breaker(row.worker).succeeded()
        if frame.final.end == frame_pb2.ROW_END_RETURNED:
            self._send_again(row, frame.final.error.message, now)
        elif frame.HasField("final"):
            self._end(row, frame.final, now, frame)
        else:
            self._outbox.publish(row, frame)

    def _end(
        self,
        row: Row,
        final: frame_pb2.Final,
        now: float,
        frame: frame_pb2.Frame | None = None,
    ) -> None:
        """Ends ``row``; ``frame`` is the worker's final frame, if the worker ended it."""
        self._leave(row, now, stop=frame is None, whole=final.end in _WHOLE)
        self._move(row, RowState.ENDED, now)
        row.final = frame_pb2.Final(
            end=final.end,
            timings=row.timings(final.timings),
            cached_prompt_tokens=final.cached_prompt_tokens,
            values=final.values,
            server_tokens=final.server_tokens if final.HasField("server_tokens") else None,
        )
        if final.HasField("error"):
            row.final.error.CopyFrom(final.error)
        if row.worker:
            row.final.batch.CopyFrom(row.batch)
        self._outbox.end(row, frame)
        self._ended.append((now + ENDED_S, row))

    def _fail(self, row: Row, error: frame_pb2.RowError, now: float) -> None:
        self._end(row, frame_pb2.Final(end=frame_pb2.ROW_END_FAILED, error=error), now)
        self._effects.dead.append(row)

    def _return(self, row: Row, now: float) -> None:
        row.final = frame_pb2.Final(end=frame_pb2.ROW_END_RETURNED)
        self._outbox.end(row)
        self._close(row, now)

    def _close(self, row: Row, now: float) -> None:
        if row.state is not RowState.ENDED:
            self._leave(row, now, stop=True)
        self._move(row, RowState.CLOSED, now)
        self._outbox.forget(row)

    def _leave(self, row: Row, now: float, *, stop: bool, whole: bool = False) -> None:
        """Removes a row from queue and worker; with ``stop`` the worker that computes it must drop it."""
        if stop and row.state is RowState.RUNNING:
            self._cancel(row.worker, row)
        if row.state in IN_FLIGHT:
            self.queue.finish(row.request_id, len(row.produced), now, whole=whole)
        else:
            self.queue.cancel(row.request_id)
            if row in self._last_tries:
                self._last_tries.remove(row)
        self._landed(row)

    def _landed(self, row: Row) -> None:
        worker = self._workers.get(row.worker)
        if worker is not None:
            worker.landed(row)


def _no_progress(row: Row, why: str) -> frame_pb2.RowError:
    return frame_pb2.RowError(
        reason=EngineFailed.reason,
        message=f"{row.no_progress} times in succession no worker got on with this request: {why}",
    )
