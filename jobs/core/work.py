"""Work that a job's items took of workers: computing time of each worker, and padding of its batches.

The gateway reports for each item which worker computed it, for how long, and its tokens and padded
positions ("cells").

1. A worker is busy with the job while it computes at least one of its items. Items overlap, so their
   times are united, not added.
2. A worker counts from the start of its first item to the end of its last one, with idle times
   between them.
3. An item has the share of its batch's cells that its tokens have. If all of a batch is of one job,
   the cells of its items are those of the batch.

Times are monotonic seconds and come from the caller.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final

from sluice.internal.v1.items_pb2 import ItemWork
from sluice.internal.v1.job_pb2 import MeshUse

SPANS_MAX: Final = 64
"""Intervals of a worker that are kept apart; older ones can no longer grow."""


class JobWork:
    """Work of the items of one job, since it was created."""

    def __init__(self) -> None:
        self._workers: dict[str, _WorkerTime] = {}
        self._tokens = 0
        self._cells = 0

    def add(self, work: Iterable[ItemWork], now: float) -> None:
        """Count the work of an item that ended at `now`."""
        for part in work:
            self._tokens += part.tokens
            self._cells += max(part.cells, part.tokens)
            worker = self._workers.setdefault(part.worker, _WorkerTime())
            worker.add(now - part.computing_ms / 1e3, now)

    def use(self, before: MeshUse) -> MeshUse:
        """Return the sums, added to those of `before`."""
        return MeshUse(
            busy_s=before.busy_s + sum(worker.busy_s for worker in self._workers.values()),
            worker_s=before.worker_s + sum(worker.present_s for worker in self._workers.values()),
            batch_tokens=before.batch_tokens + self._tokens,
            padding_tokens=before.padding_tokens + self._cells - self._tokens,
        )


class _WorkerTime:
    """Intervals in which one worker computed items of the job.

    Attributes:
        busy_s: how long it computed at least one, in seconds.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._first: float | None = None
        self._last = 0.0
        self._spans: deque[tuple[float, float]] = deque(maxlen=SPANS_MAX)
        """Disjoint intervals, by time."""

    @property
    def present_s(self) -> float:
        """Seconds from the start of its first item to the end of its last one."""
        return 0.0 if self._first is None else self._last - self._first

    def add(self, begin: float, end: float) -> None:
        """Unite an interval, which ends no earlier than those before, with the others."""
        if len(self._spans) == SPANS_MAX:
            begin = max(begin, self._spans[0][1])
        self._first = begin if self._first is None else min(self._first, begin)
        self._last = max(self._last, end)
        self.busy_s += end - begin
        # Merge with earlier intervals that overlap, so that no second counts twice.
        while self._spans and self._spans[-1][1] >= begin:
            earlier, until = self._spans.pop()
            self.busy_s -= until - max(begin, earlier)
            begin = min(begin, earlier)
        self._spans.append((begin, end))
