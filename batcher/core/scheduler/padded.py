"""Batches for engines that compute a batch as a whole, such as encoders: its rows start and end together.

The first row is the first in order. A batch of it is sent at once when it is urgent or its wait is over; before, when
there are enough rows for a full batch, or when the worker would idle and the policy says so. Where padding is limited
rows are grouped in length buckets: a batch is filled from the first row's bucket, then from its neighbours; and while
the first row may still wait, a bucket that is full goes before it, the most urgent class first.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import nsmallest
from typing import Final

from typing_extensions import override

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.feed import Placement
from batcher.core.scheduler.order import Order
from batcher.core.scheduler.task import Batch, BatchCause, BatchLimit, Decision, QueuedTask
from sluice.settings.batching import Policy
from sluice.wire.subjects import CLASSES, RANKS

WELL_WITHIN: Final = 0.8
BEYOND: Final = 1.2
"""Below the one share of the latency target batches may grow, above the other they shrink."""


class PaddedBatches(Order):
    """Waiting tasks of a model whose engine computes batches whole; `sluice.settings.batching.PRESETS` configures it.

    Attributes:
        max_rows: most rows of a batch now.
    """

    def __init__(
        self,
        policy: Policy,
        weights: Mapping[str, float],
        estimate: Callable[[QueuedTask], None],
    ) -> None:
        super().__init__(policy, weights, estimate)
        self.max_rows = policy.max_rows if policy.latency_target_s is None else 1
        self._width = math.log(policy.bucket_ratio)
        self._buckets: dict[tuple[str, int], dict[str, QueuedTask]] = {}
        """Where padding is limited: by class and length, in order of arrival; none is empty."""
        self._placement = Placement(policy, self)
        self._running: dict[Batch[QueuedTask], int] = {}
        """Batches of which a worker still computes rows, so many."""

    @override
    def add(self, task: QueuedTask, now: float) -> None:
        super().add(task, now)
        if self._policy.pads:
            self._buckets.setdefault(self._bucket_of(task), {})[task.request_id] = task

    @override
    def cancel(self, task: QueuedTask) -> None:
        super().cancel(task)
        self._leave_bucket(task)

    @override
    def take(self, task: QueuedTask, now: float) -> None:
        super().take(task, now)
        self._leave_bucket(task)

    def form(self, now: float, capacities: Sequence[Capacity]) -> Decision:
        """A batch for one worker."""
        most = self._policy.batches_running_max
        if most is not None:
            running = Counter(batch.worker for batch in self._running)
            capacities = [each for each in capacities if running[each.worker] < most]
        first = self.first(now)
        room = None if first is None else self._placement.choose(first, capacities, now)
        if first is None or room is None:
            return Decision(None)
        cause, first = self._cause(first, room, now)
        if cause is None:
            return Decision(None, first.waiting_since + self._policy.wait_s)
        batch: Batch[QueuedTask] = Batch(room.worker, cause)
        self._fill(batch, first, room, now)
        self._running[batch] = len(batch.rows)
        return Decision(batch)

    def landed(self, batch: Batch[QueuedTask], now: float | None) -> None:
        """A row of ``batch`` has left its worker; without ``now`` no latency is learned from it."""
        left = self._running.pop(batch, 0) - 1
        if left > 0:
            self._running[batch] = left
        target_s = self._policy.latency_target_s
        if left or target_s is None or now is None:
            return
        took_s = now - batch.rows[0].sent_at
        if took_s < WELL_WITHIN * target_s:
            self.max_rows = min(self.max_rows + 1, self._policy.max_rows)
        elif took_s > BEYOND * target_s:
            self.max_rows = max(self.max_rows - 1, 1)

    # When.

    def _cause(
        self, first: QueuedTask, room: Capacity, now: float
    ) -> tuple[BatchCause | None, QueuedTask]:
        """Why a batch is sent now, and its first row; None: it waits."""
        if self.classes[first.priority_class].is_pressing(first, now):
            return BatchCause.URGENT, first
        if first.waiting_since + self._policy.wait_s <= now:
            return BatchCause.WINDOW_OVER, first
        full = self._first_of_full(first, room, now)
        if full is not None:
            return BatchCause.FULL, full
        if self._policy.sends_to_idle and room.idle:
            return BatchCause.WORKER_IDLE, first
        return None, first

    def _first_of_full(self, first: QueuedTask, room: Capacity, now: float) -> QueuedTask | None:
        """The first row of what fills a batch."""
        rows, tokens = self.max_rows, self._policy.batch_tokens_max
        if not self._policy.pads:
            waiting = sum(members.prefill_tokens for members in self.classes.values())
            enough = min(rows, self._placement.room(room, first, now).free_rows)
            return first if self.waiting >= enough or waiting >= tokens else None
        for key in sorted(self._buckets, key=lambda key: RANKS[key[0]]):
            bucket = self._buckets[key]
            found = min(bucket.values(), key=_turn)
            enough = min(rows, self._placement.room(room, found, now).free_rows)
            is_full = len(bucket) >= enough or len(bucket) * found.prefill_tokens >= tokens
            if is_full and self._placement.choose(found, [room], now) is not None:
                return found
        return None

    # With which rows.

    def _fill(
        self, batch: Batch[QueuedTask], first: QueuedTask, room: Capacity, now: float
    ) -> None:
        """Takes ``first`` and what goes with it."""
        self._placement.send(first, batch, now)
        closed = set[tuple[str, bool]]()
        """By class the sides of ``first``, longer and shorter, on which others would be padded too much."""
        for task in self._companions(first, now):
            side = task.priority_class, task.prefill_tokens > first.prefill_tokens
            if side in closed:
                continue
            limit = self._placement.limit(batch, task, room, self.max_rows, now)
            if limit is None:
                self._placement.send(task, batch, now)
                continue
            batch.limit = limit
            closed.add(side)
            if limit is not BatchLimit.PADDING:
                return

    def _companions(self, first: QueuedTask, now: float) -> Iterator[QueuedTask]:
        """Tasks that may join ``first``, in order."""
        if not self._policy.pads:
            while (task := self.first(now)) is not None:
                yield task
            return
        own = self._bucket_of(first)[1]
        for name in CLASSES:
            near = sorted((abs(n - own), n) for one, n in self._buckets if one == name)
            for _, number in near:
                bucket = self._buckets[name, number].values()
                yield from nsmallest(self.max_rows, bucket, key=_turn)

    def _bucket_of(self, task: QueuedTask) -> tuple[str, int]:
        return task.priority_class, int(math.log(max(task.prefill_tokens, 1)) / self._width)

    def _leave_bucket(self, task: QueuedTask) -> None:
        if not self._policy.pads:
            return
        key = self._bucket_of(task)
        bucket = self._buckets[key]
        del bucket[task.request_id]
        if not bucket:
            del self._buckets[key]


def _turn(task: QueuedTask) -> tuple[bool, float, float, int]:
    return not task.returned, task.share.time, task.due, task.number
