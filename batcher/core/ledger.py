"""All rows of one model that this batcher holds: every event of the wires is a call, every consequence an effect.

The owner calls `advance` after events and when `wake_at` comes, and then `take`s the effects. The rules are those of
docs/wire.md:

- A row is settled in JetStream when its end is confirmed, when it is cancelled, or when nobody waits for it.
- When the worker is lost, its rows go back to the head of the queue with their tokens and a higher attempt.
- A row that came back `BARREN_SENDS_MAX` times in a row without a new token ends as failed: it may be what kills the
  worker.
- An end that is not confirmed is sent again, see `Finals`; then the gateway is asked.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Final

from batcher.core.batches import Batch
from batcher.core.effects import Effects, Formed, FormedRow, Move, Settlement
from batcher.core.finals import Finals
from batcher.core.frames import Merge, classify, final_frame, merge, resend
from batcher.core.queue import Queue
from batcher.core.replicas import Replica
from batcher.core.rows import IN_FLIGHT, Row, RowState
from batcher.core.tasks import QueuedTask
from sluice.batching import Policy
from sluice.errors import EngineFailed
from sluice.internal.v1 import control_pb2, frame_pb2, worker_pb2

BARREN_SENDS_MAX: Final = 5
DEPARTED_MAX: Final = 8192
"""Cancelled requests that are remembered, in case the cancel overtook its task."""


class Ledger:
    """Rows of one model and their queue."""

    def __init__(self, batcher: str, *, policy: Policy, final_retry_s: float) -> None:
        self._batcher = batcher
        self._queue = Queue(policy)
        self._rows: dict[str, Row] = {}
        self._states: Counter[RowState] = Counter()
        self._deadlines: list[tuple[float, str]] = []
        self._unanswered: dict[str, dict[str, int]] = {}
        self._finals = Finals(final_retry_s)
        self._resends: dict[str, int] = {}
        self._departed: OrderedDict[str, None] = OrderedDict()
        self._effects = Effects()
        self._batches = 0
        self._draining = False

    def __len__(self) -> int:
        """Rows held."""
        return len(self._rows)

    def __contains__(self, request_id: str) -> bool:
        """Whether the row is held."""
        return request_id in self._rows

    @property
    def queued(self) -> int:
        """Rows that wait."""
        return len(self._queue)

    def waiting(self, priority_class: str) -> int:
        """Rows of one class that wait."""
        return self._queue.waiting(priority_class)

    @property
    def in_flight(self) -> int:
        """Rows that a worker has or is about to get."""
        return self._states[RowState.SENT] + self._states[RowState.RUNNING]

    @property
    def unanswered(self) -> int:
        """Rows in batches that the worker has not answered."""
        return self._states[RowState.SENT]

    def take(self) -> Effects:
        """What is to be done since the last call."""
        self._answer_resends()
        effects, self._effects = self._effects, Effects()
        return effects

    # Tasks, from JetStream.

    def add(self, row: Row, now: float) -> None:
        """Takes a row that is not held."""
        self._enter(row)
        if row.id in self._departed:
            self._close(row, Settlement.ACK, now)
        elif self._draining:
            self._close(row, Settlement.NAK, now)
        else:
            self._queue.add(_queued(row), now)

    def drop(self, request_id: str) -> None:
        """Forgets a task that is not held, because nobody waits for it."""
        self._effects.settled.append((request_id, Settlement.ACK))

    def bury(self, row: Row, error: frame_pb2.RowError, now: float) -> None:
        """Ends a row that is not held as failed, and makes its task a dead letter."""
        self._enter(row)
        self._fail(row, error, now)

    # Control messages, from gateways.

    def cancel(self, request_ids: Iterable[str], now: float) -> None:
        """Stops rows; they need no confirmation."""
        for request_id in request_ids:
            self._remember_departed(request_id)
            row = self._rows.get(request_id)
            if row is None:
                continue
            if row.state is not RowState.ENDED:
                row.final = frame_pb2.Final(end=frame_pb2.ROW_END_CANCELLED)
                self._publish(row, final_frame(row))
            self._close(row, Settlement.ACK, now)

    def confirm(self, request_ids: Iterable[str], now: float) -> None:
        """The gateway has the end of these rows."""
        for request_id in request_ids:
            row = self._rows.get(request_id)
            if row is not None:
                self._close(row, Settlement.ACK, now)

    def resend(self, request_id: str, from_index: int) -> None:
        """The gateway misses frames."""
        if request_id in self._rows:
            known = self._resends.get(request_id, from_index)
            self._resends[request_id] = min(known, from_index)

    def held(
        self, request_id: str, answer: control_pb2.HeldTokensResponse | None, now: float
    ) -> None:
        """The gateway's answer about an end it never confirmed; None: no answer came in time."""
        row = self._rows.get(request_id)
        if row is None or row.state is not RowState.ENDED:
            return
        if answer is None:
            self._finals.unanswered(row.id, now)
        elif not answer.waiting:
            self._close(row, Settlement.ACK, now)
        elif answer.attempt > row.attempt:
            self._close(row, Settlement.LEAVE, now)
        else:
            self._send_final(row, now, tries=1)

    # Workers.

    def admitted(self, batch_id: str, admission: worker_pb2.Admission, now: float) -> None:
        """The worker answered a batch."""
        members = self._unanswered.pop(batch_id, {})
        for request_id in admission.accepted:
            self._accept(request_id, members.pop(request_id, None), now)
        for refusal in admission.refused:
            if members.pop(refusal.request_id, None) is not None:
                self._refuse(refusal, now)
        # A row that the answer does not mention was not taken.
        for request_id in members:
            self._refuse(worker_pb2.Refusal(request_id=request_id, retryable=True), now)

    def step(self, frames: Iterable[frame_pb2.Frame], now: float) -> bool:
        """Takes what a step produced; False when frames before it are missing, and the channel must be opened anew."""
        for frame in frames:
            row = self._rows.get(frame.request_id)
            if row is None or row.state not in IN_FLIGHT:
                continue
            kind = classify(row, frame)
            if kind is Merge.GAP:
                return False
            if kind is Merge.NEW:
                self._take_frame(row, frame, now)
        return True

    def lost(self, now: float) -> list[str]:
        """The worker is lost: its rows wait again. Returns them: should it live after all, it must drop them."""
        self._unanswered.clear()
        rows = [row for row in self._rows.values() if row.state in IN_FLIGHT]
        for row in rows:
            row.next_attempt()
            if row.barren >= BARREN_SENDS_MAX:
                self._fail(row, _barren(row), now)
            else:
                self._wait_again(row, now)
        return [row.id for row in rows]

    # Time.

    def advance(self, now: float, capacity: int) -> None:
        """Ends what is too late, repeats what was not confirmed, and forms batches of at most ``capacity`` rows."""
        self._expire(now)
        self._repeat_finals(now)
        while True:
            decision = self._queue.next_batch(now, [Replica("", capacity)])
            for request_id in decision.expired:
                self._end(self._rows[request_id], _deadline(), now)
            if decision.batch is None:
                return
            capacity -= len(decision.batch.rows)
            self._send(decision.batch, now)

    def wake_at(self) -> float | None:
        """When `advance` must be called if nothing happens before; None: never."""
        while self._deadlines and self._deadlines[0][1] not in self._rows:
            heappop(self._deadlines)
        deadline = self._deadlines[0][0] if self._deadlines else None
        return min(
            (at for at in (deadline, self._finals.next_at()) if at is not None), default=None
        )

    # The end of the batcher.

    def drain(self, now: float) -> None:
        """Gives back what waits, now and from now on."""
        self._draining = True
        for row in [row for row in self._rows.values() if row.state is RowState.WAITING]:
            self._close(row, Settlement.NAK, now)

    def release(self, now: float) -> None:
        """Gives back everything."""
        for row in list(self._rows.values()):
            self._close(row, Settlement.NAK, now)

    # Steps in the life of a row.

    def _enter(self, row: Row) -> None:
        assert row.id not in self._rows, row.id
        self._rows[row.id] = row
        self._states[row.state] += 1
        self._effects.moves.append(Move(row, None, row.state))
        if not math.isinf(row.deadline):
            heappush(self._deadlines, (row.deadline, row.id))

    def _move(self, row: Row, state: RowState, now: float) -> None:
        before = row.state
        row.move(state, now)
        self._states[before] -= 1
        self._states[state] += 1
        self._effects.moves.append(Move(row, before, state))

    def _wait_again(self, row: Row, now: float) -> None:
        if self._draining:
            self._close(row, Settlement.NAK, now)
        else:
            self._move(row, RowState.WAITING, now)
            self._queue.requeue(row.id, len(row.produced), now)

    def _send(self, batch: Batch, now: float) -> None:
        self._batches += 1
        batch_id = f"{self._batcher}-{self._batches}"
        formed = tuple(FormedRow(self._rows[r.request_id], r.waited_s) for r in batch.rows)
        for member in formed:
            member.row.batch_id = batch_id
            self._move(member.row, RowState.SENT, now)
        self._unanswered[batch_id] = {member.row.id: member.row.attempt for member in formed}
        self._effects.batches.append(Formed(batch_id, batch.cause, formed))

    def _accept(self, request_id: str, attempt: int | None, now: float) -> None:
        if attempt is None:
            return  # Its first frame came before the answer.
        row = self._rows.get(request_id)
        if row is None or row.state is not RowState.SENT:
            # It ended on its way: cancelled, or too late.
            self._effects.cancels.append(request_id)
        elif row.attempt == attempt:
            self._move(row, RowState.RUNNING, now)

    def _refuse(self, refusal: worker_pb2.Refusal, now: float) -> None:
        row = self._rows.get(refusal.request_id)
        if row is None or row.state is not RowState.SENT:
            return
        if refusal.retryable:
            self._wait_again(row, now)
        else:
            end = frame_pb2.Final(end=frame_pb2.ROW_END_REFUSED, error=refusal.error)
            self._end(row, end, now)

    def _take_frame(self, row: Row, frame: frame_pb2.Frame, now: float) -> None:
        if row.state is RowState.SENT:
            self._unanswered[row.batch_id].pop(row.id)
            self._move(row, RowState.RUNNING, now)
        frame = merge(row, frame)
        if frame.HasField("final"):
            self._end(row, frame.final, now, frame)
        else:
            self._publish(row, frame)

    def _end(
        self,
        row: Row,
        final: frame_pb2.Final,
        now: float,
        frame: frame_pb2.Frame | None = None,
    ) -> None:
        """Ends ``row``; ``frame`` is the worker's last one, when it is the worker that says so."""
        running = row.state is RowState.RUNNING and frame is None
        self._leave_queue(row, now)
        self._move(row, RowState.ENDED, now)
        row.final = frame_pb2.Final(end=final.end, timings=row.timings(final.timings))
        if final.HasField("error"):
            row.final.error.CopyFrom(final.error)
        if running:
            self._effects.cancels.append(row.id)
        self._send_final(row, now, tries=1, frame=frame)

    def _fail(self, row: Row, error: frame_pb2.RowError, now: float) -> None:
        self._end(row, frame_pb2.Final(end=frame_pb2.ROW_END_FAILED, error=error), now)
        self._effects.dead.append(row)

    def _close(self, row: Row, how: Settlement, now: float) -> None:
        if row.state is RowState.RUNNING:
            self._effects.cancels.append(row.id)
        self._leave_queue(row, now)
        self._move(row, RowState.CLOSED, now)
        self._states[RowState.CLOSED] -= 1
        self._finals.forget(row.id)
        del self._rows[row.id]
        self._effects.settled.append((row.id, how))

    def _leave_queue(self, row: Row, now: float) -> None:
        if row.state in IN_FLIGHT:
            self._queue.finish(row.id, len(row.produced), now)
        else:
            self._queue.cancel(row.id)

    # Frames and finals.

    def _publish(self, row: Row, frame: frame_pb2.Frame) -> None:
        self._effects.frames.append((row.task.gateway, frame))

    def _send_final(
        self, row: Row, now: float, *, tries: int, frame: frame_pb2.Frame | None = None
    ) -> None:
        if frame is None:
            frame = final_frame(row)
        else:
            assert row.final is not None
            frame.final.CopyFrom(row.final)
        self._publish(row, frame)
        self._finals.sent(row.id, now, tries)

    def _answer_resends(self) -> None:
        # Once for all questions that came: an answer may be long, and a gateway that lost much asks often.
        for request_id, from_index in self._resends.items():
            row = self._rows.get(request_id)
            if row is not None:
                for frame in resend(row, from_index):
                    self._publish(row, frame)
        self._resends.clear()

    def _repeat_finals(self, now: float) -> None:
        for request_id, tries in self._finals.due(now):
            row = self._rows[request_id]
            if tries is None:
                self._effects.questions.append(row)
            else:
                self._send_final(row, now, tries=tries)

    def _expire(self, now: float) -> None:
        """Ends rows in flight; those that wait come out of the queue."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heappop(self._deadlines)
            row = self._rows.get(request_id)
            if row is not None and row.state in IN_FLIGHT:
                self._end(row, _deadline(), now)

    def _remember_departed(self, request_id: str) -> None:
        self._departed[request_id] = None
        if len(self._departed) > DEPARTED_MAX:
            self._departed.popitem(last=False)


def _queued(row: Row) -> QueuedTask:
    return QueuedTask(row.id, row.task.priority_class, row.deadline, produced=len(row.produced))


def _deadline() -> frame_pb2.Final:
    return frame_pb2.Final(end=frame_pb2.ROW_END_DEADLINE)


def _barren(row: Row) -> frame_pb2.RowError:
    return frame_pb2.RowError(
        reason=EngineFailed.reason,
        message=f"the worker was lost {row.barren} times while it computed this request",
    )
