"""All rows of one model that this batcher holds: every event of the wires is a call, every consequence an effect.

The owner calls `advance` after events and when `wake_at` comes, and then `take`s the effects. The rules are those of
docs/wire.md:

- A row is settled in JetStream when its end is confirmed, when it is cancelled, or when nobody waits for it.
- When a worker is lost, its rows go back to the head of the queue with their tokens and a higher attempt; another
  worker may get them.
- A row that came back `BARREN_SENDS_MAX` times in a row without a new token ends as failed: it may be what kills the
  workers.
- An end that is not confirmed is sent again, see `Answers`; then the gateway is asked.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from batcher.core.answers import Answers
from batcher.core.book import Book
from batcher.core.departed import Departed
from batcher.core.effects import Effects, Formed, Settlement, batch_info
from batcher.core.filing import Filing
from batcher.core.frames import Merge, classify, merge
from batcher.core.rows import IN_FLIGHT, Row, RowState
from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.queue import Queue
from batcher.core.scheduler.task import Batch
from batcher.core.transit import Sent, Transit
from sluice.errors import EngineFailed
from sluice.internal.v1 import control_pb2, frame_pb2, worker_pb2
from sluice.settings.batching import Policy

BARREN_SENDS_MAX: Final = 5
_WHOLE: Final = frozenset({frame_pb2.ROW_END_STOP, frame_pb2.ROW_END_LENGTH})


class Ledger:
    """Rows of one model and their queue. Workers are known by names that stay when a worker is started anew."""

    def __init__(
        self,
        batcher: str,
        *,
        policy: Policy,
        final_retry_s: float,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._batcher = batcher
        self._filing = Filing(policy, weights or {})
        self._book = Book()
        self._transit = Transit()
        self._answers = Answers(self._book, final_retry_s)
        self._departed = Departed()
        self._effects = Effects()
        self._batches = 0
        self._wake_at: float | None = None
        self._draining = False

    def __len__(self) -> int:
        """Rows held."""
        return len(self._book)

    def __contains__(self, request_id: str) -> bool:
        """Whether the row is held."""
        return request_id in self._book

    @property
    def queue(self) -> Queue:
        """The queue in force, to be asked; only the ledger changes it."""
        return self._filing.queue

    def sent(self, worker: str) -> Sent:
        """What a worker has or is about to get."""
        return self._transit.sent(worker)

    def change_policy(self, policy: Policy, weights: Mapping[str, float]) -> None:
        """Puts another policy into force: what waits keeps its time, what is with a worker goes on."""
        self.queue.reconfigure(policy, weights)

    def take(self) -> Effects:
        """What is to be done since the last call."""
        effects, self._effects = self._effects, Effects()
        effects.moves = self._book.take_moves()
        effects.frames = self._answers.take()
        return effects

    # Tasks, from JetStream.

    def add(self, row: Row, now: float) -> None:
        """Takes a row that is not held."""
        self._book.enter(row)
        if row.id in self._departed:
            self._close(row, Settlement.ACK, now)
        elif self._draining:
            self._close(row, Settlement.NAK, now)
        else:
            self._filing.add(row, now)

    def drop(self, request_id: str) -> None:
        """Forgets a task that is not held, because nobody waits for it."""
        self._effects.settled.append((request_id, Settlement.ACK))

    def bury(self, row: Row, error: frame_pb2.RowError, now: float) -> None:
        """Ends a row that is not held as failed, and makes its task a dead letter."""
        self._book.enter(row)
        self._fail(row, error, now)

    # Control messages, from gateways.

    def cancel(self, request_ids: Iterable[str], now: float) -> None:
        """Stops rows; they need no confirmation."""
        for request_id in request_ids:
            self._departed.add(request_id)
            row = self._book.get(request_id)
            if row is None:
                continue
            if row.state is not RowState.ENDED:
                row.final = frame_pb2.Final(end=frame_pb2.ROW_END_CANCELLED)
                self._answers.cut(row)
            self._close(row, Settlement.ACK, now)

    def confirm(self, request_ids: Iterable[str], now: float) -> None:
        """The gateway has the end of these rows."""
        for request_id in request_ids:
            row = self._book.get(request_id)
            if row is not None:
                self._close(row, Settlement.ACK, now)

    def resend(self, request_id: str, from_index: int) -> None:
        """The gateway misses frames."""
        if request_id in self._book:
            self._answers.resend(request_id, from_index)

    def held(
        self, request_id: str, answer: control_pb2.HeldTokensResponse | None, now: float
    ) -> None:
        """The gateway's answer about an end it never confirmed; None: no answer came in time."""
        row = self._book.get(request_id)
        if row is None or row.state is not RowState.ENDED:
            return
        if answer is None:
            self._answers.unanswered(row, now)
        elif not answer.waiting:
            self._close(row, Settlement.ACK, now)
        elif answer.attempt > row.attempt:
            self._close(row, Settlement.LEAVE, now)
        else:
            self._answers.end(row, now)

    # Workers.

    def live(self, worker: str, worker_id: str) -> None:
        """A worker can be sent to; ``worker_id`` is what it calls itself."""
        self._transit.live(worker, worker_id)

    def admitted(
        self, worker: str, batch_id: str, admission: worker_pb2.Admission, now: float
    ) -> None:
        """A worker answered a batch."""
        members = self._transit.answered(worker, batch_id)
        for request_id in admission.accepted:
            self._accept(worker, request_id, members.pop(request_id, None), now)
        for refusal in admission.refused:
            if members.pop(refusal.request_id, None) is not None:
                self._refuse(worker, refusal, now)
        # A row that the answer does not mention was not taken.
        for request_id in members:
            refusal = worker_pb2.Refusal(request_id=request_id, retryable=True)
            self._refuse(worker, refusal, now)

    def step(self, worker: str, frames: Iterable[frame_pb2.Frame], now: float) -> bool:
        """Takes what a step produced; False when frames before it are missing, and the channel must be opened anew."""
        for frame in frames:
            row = self._book.get(frame.request_id)
            if row is None or not _has(worker, row):
                continue
            kind = classify(row, frame)
            if kind is Merge.GAP:
                return False
            if kind is Merge.NEW:
                self._take_frame(row, frame, now)
        return True

    def lost(self, worker: str, now: float) -> list[str]:
        """A worker is lost: its rows wait again. Returns them: should it live after all, it must drop them."""
        rows = self._transit.lose(worker)
        for row in rows:
            row.next_attempt()
            if row.barren >= BARREN_SENDS_MAX:
                self._fail(row, _barren(row), now)
            else:
                self._wait_again(row, now)
        return [row.id for row in rows]

    # Time.

    def advance(self, now: float, capacities: Sequence[Capacity]) -> None:
        """Ends what is too late, repeats what was not confirmed, forms batches for the live workers."""
        self._expire(now)
        self._effects.questions.extend(self._answers.repeat(now))
        while True:
            decision = self.queue.next_batch(now, capacities)
            for request_id in decision.expired:
                self._end(self._book[request_id], _deadline(), now)
            if decision.batch is None:
                self._wake_at = decision.wake_at
                return
            self._send(decision.batch, now)
            capacities = [capacity.after(decision.batch) for capacity in capacities]

    def wake_at(self) -> float | None:
        """When `advance` must be called if nothing happens before; None: never."""
        moments = (self._book.next_deadline(), self._answers.next_at(), self._wake_at)
        return min((at for at in moments if at is not None), default=None)

    # The end of the batcher.

    def drain(self, now: float) -> None:
        """Gives back what waits, now and from now on."""
        self._draining = True
        for row in self._book:
            if row.state is RowState.WAITING:
                self._close(row, Settlement.NAK, now)

    def release(self, now: float) -> None:
        """Gives back everything."""
        for row in self._book:
            self._close(row, Settlement.NAK, now)

    # Steps in the life of a row.

    def _send(self, batch: Batch, now: float) -> None:
        self._batches += 1
        batch_id = f"{self._batcher}-{self._batches}"
        worker_id = self._transit.id_of(batch.worker)
        rows = [self._book[member.request_id] for member in batch.rows]
        for row, member in zip(rows, batch.rows, strict=True):
            row.worker = batch.worker
            row.batch = batch_info(batch_id, worker_id, batch, member)
            self._book.move(row, RowState.SENT, now)
        self._transit.start(batch_id, batch, rows)
        self._effects.batches.append(Formed(batch_id, batch, tuple(rows), worker_id))

    def _accept(self, worker: str, request_id: str, attempt: int | None, now: float) -> None:
        if attempt is None:
            return  # Its first frame came before the answer.
        row = self._book.get(request_id)
        if row is None or row.state is not RowState.SENT or row.worker != worker:
            # It ended on its way: cancelled, or too late.
            self._effects.cancels.append((worker, request_id))
        elif row.attempt == attempt:
            self._book.move(row, RowState.RUNNING, now)

    def _refuse(self, worker: str, refusal: worker_pb2.Refusal, now: float) -> None:
        row = self._book.get(refusal.request_id)
        if row is None or row.state is not RowState.SENT or row.worker != worker:
            return
        if refusal.retryable:
            self._wait_again(row, now)
        else:
            end = frame_pb2.Final(end=frame_pb2.ROW_END_REFUSED, error=refusal.error)
            self._end(row, end, now)

    def _wait_again(self, row: Row, now: float) -> None:
        if self._draining:
            self._close(row, Settlement.NAK, now)
        else:
            self._transit.land(row)
            self._book.move(row, RowState.WAITING, now)
            self._filing.put_back(row, now)

    def _take_frame(self, row: Row, frame: frame_pb2.Frame, now: float) -> None:
        if row.state is RowState.SENT:
            self._transit.heard(row)
            self._book.move(row, RowState.RUNNING, now)
        frame = merge(row, frame)
        if frame.HasField("final"):
            self._end(row, frame.final, now, frame)
        else:
            self._answers.publish(row, frame)

    def _end(
        self,
        row: Row,
        final: frame_pb2.Final,
        now: float,
        frame: frame_pb2.Frame | None = None,
    ) -> None:
        """Ends ``row``; ``frame`` is the worker's last one, when it is the worker that says so."""
        self._leave(row, now, stop=frame is None, whole=final.end in _WHOLE)
        self._book.move(row, RowState.ENDED, now)
        row.final = frame_pb2.Final(
            end=final.end,
            timings=row.timings(final.timings),
            cached_prompt_tokens=final.cached_prompt_tokens,
        )
        if final.HasField("error"):
            row.final.error.CopyFrom(final.error)
        if row.worker:
            row.final.batch.CopyFrom(row.batch)
        self._answers.end(row, now, frame)

    def _fail(self, row: Row, error: frame_pb2.RowError, now: float) -> None:
        self._end(row, frame_pb2.Final(end=frame_pb2.ROW_END_FAILED, error=error), now)
        self._effects.dead.append(row)

    def _close(self, row: Row, how: Settlement, now: float) -> None:
        self._leave(row, now, stop=True)
        self._book.move(row, RowState.CLOSED, now)
        self._answers.forget(row)
        self._effects.settled.append((row.id, how))

    def _leave(self, row: Row, now: float, *, stop: bool, whole: bool = False) -> None:
        """Takes a row out of queue and flight; with ``stop`` the worker that computes it is told."""
        if stop and row.state is RowState.RUNNING:
            self._effects.cancels.append((row.worker, row.id))
        self._filing.leave(row, now, whole=whole)
        self._transit.land(row)

    def _expire(self, now: float) -> None:
        """Ends rows in flight; those that wait come out of the queue."""
        for row in self._book.late(now):
            if row.state in IN_FLIGHT:
                self._end(row, _deadline(), now)


def _has(worker: str, row: Row) -> bool:
    return row.state in IN_FLIGHT and row.worker == worker


def _deadline() -> frame_pb2.Final:
    return frame_pb2.Final(end=frame_pb2.ROW_END_DEADLINE)


def _barren(row: Row) -> frame_pb2.RowError:
    return frame_pb2.RowError(
        reason=EngineFailed.reason,
        message=f"its worker was lost {row.barren} times while it computed this request",
    )
