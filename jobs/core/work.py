"""Work that a job's items took of workers: computing time of each worker, and padding of its batches.

The gateway reports for each item which worker computed it, for how long, its tokens, and its share of
the batch's positions, padding included ("cells").

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
    """Work of the items of one job.

    Attributes:
        use: the sums so far, those of earlier processes included.
    """

    def __init__(self, before: MeshUse) -> None:
        self.use = MeshUse()
        self.use.CopyFrom(before)
        self._spans: dict[str, deque[tuple[float, float]]] = {}
        """Disjoint intervals in which each worker computed items, by time."""
        self._first: dict[str, float] = {}
        """Start of the first item of each worker."""

    def add(self, work: Iterable[ItemWork], now: float) -> None:
        """Count the work of an item that ended at `now`."""
        for part in work:
            self.use.batch_tokens += part.tokens
            self.use.padding_tokens += max(0, part.cells - part.tokens)
            self._add_time(part.worker, now - part.computing_ms / 1e3, now)

    def _add_time(self, worker: str, begin: float, end: float) -> None:
        """Add an interval to the times of a worker (rules 1 and 2); calls come in the order of `end`."""
        spans = self._spans.setdefault(worker, deque(maxlen=SPANS_MAX))
        # The oldest interval is about to be dropped: cut what could overlap with it or with older ones.
        if len(spans) == SPANS_MAX:
            begin = max(begin, spans[0][1])
        first, last = self._first.get(worker, begin), spans[-1][1] if spans else begin
        self._first[worker] = min(first, begin)
        # Rule 2: the time grows at its end, and at its start where this item began before all others.
        self.use.worker_s += end - last + first - self._first[worker]
        self.use.busy_s += end - begin
        # Merge with earlier intervals that overlap, so that no second counts twice.
        while spans and spans[-1][1] >= begin:
            earlier, until = spans.pop()
            self.use.busy_s -= until - max(begin, earlier)
            begin = min(begin, earlier)
        spans.append((begin, end))
