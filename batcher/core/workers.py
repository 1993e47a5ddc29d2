"""The state of workers: their reports, the rows sent since, and this batcher's share of their capacity."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from batcher.core.row import Row
from batcher.core.scheduler.capacity import Capacity, Usage
from sluice.internal.v1 import worker_pb2
from sluice.internal.v1.control_pb2 import BatcherReport
from sluice.wire.subjects import RANKS

MEAN_SHARE: Final = 0.1
"""What one observation weighs in running means."""
FAILURES_MAX: Final = 2
"""Failures in succession after which a worker is tried with single rows."""
BREAK_S: Final = 0.5
BREAK_S_MAX: Final = 10.0
"""The pause before the first try, and the longest; seconds."""
EXPIRY_S: Final = 3.5
"""A batcher that was silent for this long is forgotten, seconds."""


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """This batcher's share of a worker."""

    batchers: int = 1
    """All that send to it, this one included."""
    demanding: int = 0
    """Others in which tasks wait."""

    def of(self, slots: int, free: int, used: int, unanswered: int) -> int:
        """The rows that may be sent to a worker now.

        The slots that were free in its last report are divided among all batchers, rounded up, so together they send at
        most ``batchers - 1`` rows too many per report; these wait in the worker. A batcher with an older report may add
        its part of what was free then. While others have waiting tasks, no batcher takes more than an equal part of the
        slots: the others learn of a free slot later than the one whose row left it.

        Args:
            slots: of the worker.
            free: of these, by its last report.
            used: this batcher's rows in it, or in flight to it.
            unanswered: of these, rows in flight, which that report does not count.
        """
        room = -(-free // self.batchers) - unanswered
        if self.demanding:
            room = min(room, -(-slots // (1 + self.demanding)) - used)
        return max(0, room)


@dataclass(frozen=True, slots=True)
class _Peer:
    queued: dict[str, int]
    """Tasks that wait, by each model that it has a worker for; empty when it leaves."""
    sequence: int
    """Of its newest report."""
    expires_at: float


class Peers:
    """The other batchers with recent reports; time is an argument, monotonic seconds."""

    def __init__(self, batcher: str) -> None:
        self._batcher = batcher
        self._peers: dict[str, _Peer] = {}

    def take(self, report: BatcherReport, now: float) -> None:
        """Takes a batcher's report; this batcher's own come too."""
        known = self._peers.get(report.batcher)
        if report.batcher == self._batcher or (known and report.sequence < known.sequence):
            return
        models = () if report.leaving else report.models
        queued = {model.model: model.queued for model in models if model.workers}
        self._peers[report.batcher] = _Peer(queued, report.sequence, now + EXPIRY_S)

    def share(self, model: str, now: float) -> WorkerShare:
        """This batcher's share of each worker of ``model``."""
        for batcher in [b for b, peer in self._peers.items() if peer.expires_at <= now]:
            del self._peers[batcher]
        queued = [peer.queued[model] for peer in self._peers.values() if model in peer.queued]
        return WorkerShare(1 + len(queued), sum(count > 0 for count in queued))


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
        self._ours = [0] * len(RANKS)
        """How many of `rows`, by class, the most urgent first."""
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
        if report.HasField("counts"):
            self.counts = report.counts
        self._times.note(report.load, now)
        for admission in report.admissions:
            self._uncounted.pop(admission.batch_id, None)
        # After a refusal nothing is sent until the worker's next report: it would be refused again.
        refusals = (refusal for admission in report.admissions for refusal in admission.refused)
        self._refused = any(refusal.retryable for refusal in refusals)

    def queued(self, batch_id: str) -> Sequence[Row]:
        """The worker has queued a batch; returns its rows, once."""
        return self._unqueued.pop(batch_id, ())

    # Rows sent to it.

    def sent(self, batch_id: str, rows: Sequence[Row]) -> None:
        """A batch was sent."""
        self._unqueued[batch_id] = self._uncounted[batch_id] = rows
        for row in rows:
            if row.request_id not in self.rows:
                self._ours[RANKS[row.priority_class]] += 1
            self.rows[row.request_id] = row

    def landed(self, row: Row) -> None:
        """The row has left the worker."""
        if self.rows.pop(row.request_id, None) is not None:
            self._ours[RANKS[row.priority_class]] -= 1

    # Capacity.

    def capacity(self, name: str, share: WorkerShare, rows_max: float = math.inf) -> Capacity:
        """This batcher's share of the worker's free capacity; ``name`` is the worker's.

        Args:
            rows_max: rows of this batcher that may be in it.
        """
        load = self.load
        in_flight = self._in_flight()
        flying = sum(usage.rows for usage in in_flight)
        capacity = Capacity(
            worker=name,
            free_rows=self._free_rows(flying, share),
            free_tokens=self._free_tokens(in_flight),
            waiting_tokens=load.waiting_tokens + sum(usage.waiting_tokens for usage in in_flight),
            running_rows=load.running + load.waiting,
            batches_in_flight=len(self._uncounted),
            step_s=self._times.step_s,
            # An engine without a cache has no rows that long prompts would keep from decoding.
            prefill_token_s=self._times.prefill_token_s if load.block_tokens else 0.0,
        )
        if rows_max < math.inf:
            free_rows = min(capacity.free_rows, max(0, int(rows_max) - len(self.rows)))
            return replace(capacity, free_rows=free_rows)
        if self.worker_id and not self._refused and len(load.ranks) == len(RANKS):
            usages = self._usages(in_flight)
            capacity = capacity.with_preemption(usages, load.slots, load.places)
        return self._shared(capacity, in_flight, share)

    def _in_flight(self) -> list[Usage]:
        """By class, rows that the worker's reports may not count yet."""
        found = [Usage()] * len(RANKS)
        for batch in self._uncounted.values():
            for row in batch:
                rank = RANKS[row.priority_class]
                rows, prefill, cache = found[rank]
                found[rank] = Usage(
                    rows + 1, prefill + row.prefill_tokens, cache + row.cache_tokens
                )
        return found

    def _usages(self, in_flight: Sequence[Usage]) -> list[Usage]:
        """By class, the use of the worker by rows of all batchers."""
        found = []
        for load, flying, ours in zip(self.load.ranks, in_flight, self._ours, strict=True):
            # The worker's count may be older than this batcher's, so the larger one is used.
            rows = max(ours - flying.rows, load.running + load.waiting)
            found.append(
                Usage(
                    rows + flying.rows,
                    load.waiting_tokens + flying.waiting_tokens,
                    load.running_tokens + load.waiting_tokens + flying.cache_tokens,
                )
            )
        return found

    def _free_rows(self, flying: int, share: WorkerShare) -> int:
        if not self.worker_id or self._refused:
            return 0
        load, ours = self.load, len(self.rows)
        # As above, the larger count is used.
        free = max(0, load.slots - max(ours - flying, load.running + load.waiting))
        return share.of(load.slots, free, ours, flying)

    def _free_tokens(self, in_flight: Sequence[Usage]) -> float:
        load = self.load
        if not load.block_tokens:
            return math.inf
        # Rows that wait inside the worker have no blocks yet.
        reserved = load.waiting_tokens + sum(usage.cache_tokens for usage in in_flight)
        return load.free_blocks * load.block_tokens - reserved

    def _shared(
        self, capacity: Capacity, in_flight: Sequence[Usage], share: WorkerShare
    ) -> Capacity:
        ours = accumulate(self._ours)
        flying = accumulate(usage.rows for usage in in_flight)
        slots = self.load.slots
        preemptible = tuple(
            replace(
                each,
                free_rows=share.of(slots, each.free_rows + unanswered, used, unanswered),
                free_tokens=each.free_tokens / share.batchers,
            )
            for each, used, unanswered in zip(capacity.preemptible, ours, flying, strict=False)
        )
        free_tokens = capacity.free_tokens / share.batchers
        return replace(capacity, free_tokens=free_tokens, preemptible=preemptible)
