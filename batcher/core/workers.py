"""The state of workers: their reports, the rows sent to them, and what they grant this batcher."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

from batcher.core.row import Row
from batcher.core.scheduler.capacity import Capacity
from sluice.internal.v1 import worker_pb2
from sluice.wire.subjects import RANKS

MEAN_SHARE: Final = 0.1
"""What one observation weighs in running means."""
FAILURES_MAX: Final = 2
"""Failures in succession after which a worker is tried with single rows."""
BREAK_S: Final = 0.5
BREAK_S_MAX: Final = 10.0
"""The pause before the first try, and the longest; seconds."""


def without_standby(live: Collection[str], ranked: Sequence[str], standby: int) -> list[str]:
    """The workers that get rows, of those that are ``live``.

    The last ``standby`` ones of ``ranked``, all workers of the model, only replace others that are lost. All batchers
    rank alike, so they leave the same ones out.
    """
    return [worker for worker in ranked if worker in live][: len(ranked) - standby]


class StepTimes:
    """Running means of a worker's step time and of the time that a prompt token adds; 0 while not known."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.prefill_token_s = 0.0
        self._load: worker_pb2.WorkerLoad | None = None
        self._at = 0.0

    def note(self, load: worker_pb2.WorkerLoad, now: float) -> None:
        """Takes a report. Only intervals in which the worker stepped without a pause are measured."""
        before, passed_s = self._load, now - self._at
        self._load, self._at = load, now
        if before is None or not before.running or not load.running:
            return
        steps = load.steps - before.steps
        if steps <= 0:
            return
        computed = before.waiting_tokens - load.waiting_tokens
        if computed > 0 and self.step_s:
            extra_s = max(0.0, passed_s - steps * self.step_s)
            self.prefill_token_s = _mean(self.prefill_token_s, extra_s / computed)
        elif computed == 0:
            self.step_s = _mean(self.step_s, passed_s / steps)


def _mean(known: float, seen: float) -> float:
    return known + MEAN_SHARE * (seen - known) if known else seen


class Breaker:
    """Keeps rows from a worker that fails again and again: one that fails fast looks idle.

    Attributes:
        open_until: no row is sent before; 0: nothing is known against the worker.
    """

    def __init__(self) -> None:
        self.open_until = 0.0
        self._failures = 0

    def failed(self, now: float) -> None:
        """The worker returned rows, or was lost with some."""
        self._failures += 1
        if self._failures >= FAILURES_MAX:
            pause_s = min(BREAK_S * 2 ** (self._failures - FAILURES_MAX), BREAK_S_MAX)
            self.open_until = now + pause_s

    def succeeded(self) -> None:
        """A row got a token."""
        self.open_until, self._failures = 0.0, 0

    def rows_max(self, now: float) -> float:
        """Rows that may be in the worker: after a pause one, to try."""
        if not self.open_until:
            return math.inf
        return 1 if self.open_until <= now else 0


class ChannelBroken(Exception):
    """Responses are missing, or come from another process: rows of this channel must be sent again."""


class WorkerState:
    """One worker from the opening of its channel to its loss: its last report, and the rows sent since.

    Attributes:
        worker_id: as the worker reports it; empty: no report yet.
        live: whether the engine serves the channel: batches may be sent.
        load: as reported last.
        counts: what it has counted since it started; None: not reported yet.
        rows: in the worker, or in flight to it, by request.
        told: rows that wait for it, by class, as it heard last.
    """

    def __init__(self) -> None:
        self.worker_id = ""
        self.live = False
        self.rows: dict[str, Row] = {}
        self.load = worker_pb2.WorkerLoad()
        self.counts: worker_pb2.WorkerCounts | None = None
        self._times = StepTimes()
        self._next_sequence = 0
        self._refused = False
        self.told: Sequence[int] = (0,) * len(RANKS)
        self._rows_to: Sequence[int] = ()
        self._tokens_to: Sequence[int] = ()
        self._sent_rows = self._sent_tokens = 0
        self._unqueued: dict[str, Sequence[Row]] = {}
        """Batches that are on their way."""
        self._uncounted: dict[str, Sequence[Row]] = {}
        """Batches that the worker's reports do not count yet."""

    @property
    def slots(self) -> int:
        """Rows the worker computes at once; 0 before its first report."""
        return self.load.slots

    @property
    def running(self) -> int:
        """Rows in it, of all batchers."""
        return self.load.running

    # Messages from the worker.

    def report(self, report: worker_pb2.StepReport, now: float) -> None:
        """Takes a response of the channel.

        Raises:
            ChannelBroken: an earlier one is missing, or the worker has restarted.
        """
        if report.sequence != self._next_sequence:
            raise ChannelBroken(f"response {report.sequence} instead of {self._next_sequence}")
        if self.worker_id and report.worker != self.worker_id:
            raise ChannelBroken(f"worker {report.worker} instead of {self.worker_id}")
        self.worker_id = report.worker
        self._next_sequence += 1
        self.live = report.ready
        self.load = report.load
        # One that does not tell the classes apart is none.
        self._rows_to = report.rows_to if len(report.rows_to) == len(RANKS) else ()
        self._tokens_to = report.tokens_to if len(report.tokens_to) == len(RANKS) else ()
        if report.HasField("counts"):
            self.counts = report.counts
        self._times.note(report.load, now)
        # After a refusal nothing is sent until the worker's next report: it would be refused again.
        self._refused = False
        for admission in report.admissions:
            self._uncounted.pop(admission.batch_id, None)
            for refusal in admission.refused:
                self._refused |= refusal.retryable

    def queued(self, batch_id: str) -> Sequence[Row]:
        """The worker has queued a batch; returns its rows, once."""
        return self._unqueued.pop(batch_id, ())

    # Rows sent to it.

    def sent(self, batch_id: str, rows: Sequence[Row]) -> None:
        """A batch was sent."""
        self._unqueued[batch_id] = self._uncounted[batch_id] = rows
        self._sent_rows += len(rows)
        self._sent_tokens += sum(row.cache_tokens for row in rows)
        self.rows.update((row.request_id, row) for row in rows)

    def landed(self, row: Row) -> None:
        """The row has left the worker."""
        self.rows.pop(row.request_id, None)

    # Room.

    def capacity(self, name: str, rows_max: float = math.inf) -> Capacity:
        """What may be sent to the worker now; ``name`` is the worker's.

        Args:
            rows_max: rows of this batcher that may be in it.
        """
        load, last = self.load, len(RANKS) - 1
        prefill = sum(row.prefill_tokens for rows in self._uncounted.values() for row in rows)
        capacity = Capacity(
            worker=name,
            free_rows=self._free_rows(last),
            free_tokens=self._free_tokens(last),
            waiting_tokens=load.waiting_tokens + prefill,
            running_rows=load.running + load.waiting,
            batches_in_flight=len(self._uncounted),
            step_s=self._times.step_s,
            # An engine without a cache has no rows that long prompts would keep from decoding.
            prefill_token_s=self._times.prefill_token_s if load.block_tokens else 0.0,
            preempts=bool(load.ranks),
        )
        if rows_max < math.inf:
            left = max(0, int(rows_max) - len(self.rows))
            return replace(capacity, free_rows=min(capacity.free_rows, left))
        waiting = accumulate(rank.waiting_tokens for rank in load.ranks)
        preemptible = (
            replace(
                capacity,
                free_rows=self._free_rows(rank),
                free_tokens=self._free_tokens(rank),
                waiting_tokens=tokens + prefill,
            )
            for rank, tokens in enumerate(waiting)
            if rank < last
        )
        return replace(capacity, preemptible=tuple(preemptible))

    def tell(self, waiting: Sequence[int]) -> bool:
        """So many rows of each class wait for a worker; whether the worker is to hear of it."""
        changed = list(map(bool, waiting)) != list(map(bool, self.told))
        if changed:
            self.told = waiting
        return changed

    def _free_rows(self, rank: int) -> int:
        if not self.worker_id or self._refused:
            return 0
        if not self._rows_to:  # A worker of the release before this one grants nothing.
            flying = sum(map(len, self._uncounted.values()))
            counted = max(len(self.rows) - flying, self.load.running + self.load.waiting)
            return max(0, self.load.slots - counted - flying)
        return max(0, self._rows_to[rank] - self._sent_rows)

    def _free_tokens(self, rank: int) -> float:
        return self._tokens_to[rank] - self._sent_tokens if self._tokens_to else math.inf
