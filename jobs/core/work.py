"""What a job's items took of workers: how long each worker computed items of the job, and the padding of its batches.

The gateway says of each item which worker computed it, for how long, and how many tokens and cells of a batch it had.

1. A worker is busy with the job while it computes at least one item of it. Items of one worker overlap, so their times
   are united, not added.
2. A worker counts from the beginning of its first item to the end of its last one, idle times between them included.
3. An item has its tokens' part of the cells of its batch. Where all rows of a batch are of one job, the cells of its
   items are those of the batch.

Times are monotonic seconds and come from the caller.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final

from sluice.internal.v1.items_pb2 import ItemWork
from sluice.internal.v1.job_pb2 import MeshUse

SPANS_MAX: Final = 64
"""Stretches of a worker that are kept apart; older ones can grow no more."""


class JobWork:
    """What the items of one job took, since it was made."""

    def __init__(self) -> None:
        self._workers: dict[str, _WorkerTime] = {}
        self._tokens = 0
        self._cells = 0

    def add(self, work: Iterable[ItemWork], now: float) -> None:
        """Count what one item took that ended ``now``."""
        for part in work:
            self._tokens += part.tokens
            self._cells += max(part.cells, part.tokens)
            worker = self._workers.setdefault(part.worker, _WorkerTime())
            worker.add(now - part.computing_ms / 1e3, now)

    def use(self, before: MeshUse) -> MeshUse:
        """Return the sums, together with those of ``before``."""
        return MeshUse(
            busy_s=before.busy_s + sum(worker.busy_s for worker in self._workers.values()),
            worker_s=before.worker_s + sum(worker.present_s for worker in self._workers.values()),
            batch_tokens=before.batch_tokens + self._tokens,
            padding_tokens=before.padding_tokens + self._cells - self._tokens,
        )


class _WorkerTime:
    """When one worker computed items of the job.

    Attributes:
        busy_s: how long it computed at least one.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._first: float | None = None
        self._last = 0.0
        self._spans: deque[tuple[float, float]] = deque(maxlen=SPANS_MAX)
        """Disjoint, by time."""

    @property
    def present_s(self) -> float:
        """From the beginning of its first item to the end of its last one."""
        return 0.0 if self._first is None else self._last - self._first

    def add(self, begin: float, end: float) -> None:
        """Unite the stretch from ``begin`` to ``end``, which is no earlier than those before, with what is known."""
        if len(self._spans) == SPANS_MAX:
            begin = max(begin, self._spans[0][1])
        self._first = begin if self._first is None else min(self._first, begin)
        self._last = max(self._last, end)
        self.busy_s += end - begin
        while self._spans and self._spans[-1][1] >= begin:
            earlier, until = self._spans.pop()
            self.busy_s -= until - max(begin, earlier)
            begin = min(begin, earlier)
        self._spans.append((begin, end))
