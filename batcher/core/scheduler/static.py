"""Static batches: requests wait for others until a batch is full or a window closes, and may be grouped by length.

1. A batch begins with the first task in order. It goes at once when that task presses: it was returned, is close to its
   deadline, or its class is overdue.
2. It goes when a window has closed (`windows`), when as many tasks wait as fill a batch by the policy's own size, or
   when the worker would idle and the policy says so.
3. It has what the worker grants, never more. Where that is less than the batch that was due, the rest goes with the
   next grants, without another window.
4. Where padding is limited, tasks are grouped in buckets of similar length: a batch is filled from the bucket of its
   first task, then from the neighbouring ones. While the first task in order may still wait, a full bucket of the same
   class goes before it.
5. ``batches_running_max`` holds back all but interactive and returned tasks. These go alone past the others.
"""

import math
from collections.abc import Iterator, Sequence
from heapq import nsmallest
from typing import Final, NamedTuple

from typing_extensions import override

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.order import Order, is_unlimited
from batcher.core.scheduler.placement import Placement
from batcher.core.scheduler.policy import BatchPolicy
from batcher.core.scheduler.task import Batch, BatchCause, BatchLimit, Decision, QueuedTask
from batcher.core.scheduler.windows import Windows
from sluice.settings.batching import Policy
from sluice.wire.subjects import CLASSES

WELL_WITHIN: Final = 0.8
"""Batches grow while their first tokens come within this share of the latency target."""
BEYOND: Final = 1.2
"""Batches shrink while their first tokens take longer than this share of it."""
CUT_BY_WORKER: Final = frozenset(
    {BatchLimit.WORKER_ROWS, BatchLimit.WORKER_CACHE, BatchLimit.WORKER_PREFILL}
)
"""Limits that are the worker's: the rest of a batch goes with its next grant."""
COMPLETE: Final = frozenset({BatchCause.FULL, BatchCause.WINDOW_OVER})
"""Causes that make a batch of all the tasks that it has room for by the policy."""

Bucket = tuple[str, int]
"""A class and a number of a length; one bucket for all where lengths or classes make no difference."""


class Rest(NamedTuple):
    """Tasks of a batch that its worker had no room for."""

    tasks: int
    cause: BatchCause


class StaticBatchPolicy(BatchPolicy):
    """See the module; `sluice.settings.batching.PRESETS` configures it.

    Attributes:
        size: most requests of a batch now; it moves with ``latency_target_s``.
    """

    def __init__(
        self,
        policy: Policy,
        order: Order,
        placement: Placement,
        before: BatchPolicy | None = None,
    ) -> None:
        """``before``: the policy that this one replaces."""
        super().__init__(policy, order, placement)
        self.size = policy.max_rows if policy.latency_target_s is None else 1
        if isinstance(before, StaticBatchPolicy) and policy.latency_target_s is not None:
            self.size = min(before.size, policy.max_rows)
        self._width = math.log(policy.bucket_ratio)
        self._buckets: dict[Bucket, dict[str, QueuedTask]] = {}
        """Where padding is limited: tasks in order of arrival; none is empty."""
        self._windows = Windows(policy, order)
        self._rests: dict[Bucket, Rest] = {}

    # Events.

    @override
    def on_wait(self, task: QueuedTask) -> None:
        self._windows.open(task)
        self._cap_rests(joined=0 if self._policy.pads else 1)
        if self._policy.pads:
            self._buckets.setdefault(self._bucket_of(task), {})[task.request_id] = task

    @override
    def on_cancel(self, task: QueuedTask) -> None:
        bucket = self._bucket_of(task)
        if self._policy.pads:
            del self._buckets[bucket][task.request_id]
            if not self._buckets[bucket]:
                del self._buckets[bucket]

    @override
    def on_answered(self, batch: Batch[QueuedTask], now: float) -> None:
        target_s = self._policy.latency_target_s
        if target_s is None:
            return
        took_s = now - batch.rows[0].sent_at
        if took_s < WELL_WITHIN * target_s:
            self.size = min(self.size + 1, self._policy.max_rows)
        elif took_s > BEYOND * target_s:
            self.size = max(self.size - 1, 1)

    @override
    def window_s(self, priority_class: str, now: float) -> float:
        own = self._windows.length_s(priority_class)
        if not self._order.waiting:
            return 0.0 if self._policy.sends_to_idle else own
        return max(0.0, min(own, self._windows.closes_at() - now))

    # Whether a batch goes, and to which worker.

    @override
    def form(self, now: float, capacities: Sequence[Capacity]) -> Decision:
        first = self._order.first(now)
        if first is None:
            return Decision(None)
        free = self._below_limit(capacities)
        worker = self._placement.choose(first, free, now)
        if worker is not None:
            return self._form_in_order(first, worker, now)
        if len(free) == len(capacities) or not self._placement.choose(first, capacities, now):
            return Decision(None)
        return self._form_unlimited(capacities, now)

    def _below_limit(self, capacities: Sequence[Capacity]) -> Sequence[Capacity]:
        """Return the workers that ``batches_running_max`` lets have another batch."""
        most = self._policy.batches_running_max
        if most is None:
            return capacities
        return [capacity for capacity in capacities if capacity.batches_running < most]

    def _form_in_order(self, first: QueuedTask, worker: Capacity, now: float) -> Decision:
        cause, first = self._cause(first, worker, now)
        if cause is None:
            return Decision(None, self._wake_at(first))
        batch: Batch[QueuedTask] = Batch(worker.worker, cause)
        bucket = self._bucket_of(first)
        self._send(first, batch, now)
        self._fill(batch, self._companions(first, now), worker, now)
        self._note_rest(batch, bucket)
        return Decision(batch)

    def _form_unlimited(self, capacities: Sequence[Capacity], now: float) -> Decision:
        """Form a batch of tasks that ``batches_running_max`` does not hold back."""
        first = self._order.first_unlimited(now)
        worker = None if first is None else self._placement.choose(first, capacities, now)
        if first is None or worker is None:
            return Decision(None)
        members = self._order.classes[first.priority_class]
        closes_at = self._windows.task_closes_at(first)
        if members.is_pressing(first, now):
            cause = BatchCause.URGENT
        elif closes_at <= now:
            cause = BatchCause.WINDOW_OVER
        else:
            return Decision(None, min(closes_at, members.pressing_at(first)))
        batch: Batch[QueuedTask] = Batch(worker.worker, cause)
        self._send(first, batch, now)
        others = filter(is_unlimited, self._companions(first, now, unlimited=True))
        self._fill(batch, others, worker, now)
        if batch.limit is BatchLimit.ALL_WAITING and self._order.waiting:
            batch.limit = BatchLimit.WORKER_BATCHES
        return Decision(batch)

    # Why it goes.

    def _cause(
        self, first: QueuedTask, worker: Capacity, now: float
    ) -> tuple[BatchCause | None, QueuedTask]:
        """Return why a batch goes now, None if it waits, and its first task."""
        if self._order.classes[first.priority_class].is_pressing(first, now):
            return BatchCause.URGENT, first
        if self._windows.closes_at() <= now:
            return BatchCause.WINDOW_OVER, first
        for bucket, cause in self._complete(first).items():
            head = self._head(bucket, first, now)
            if self._placement.choose(head, [worker], now) is not None:
                return cause, head
        if self._policy.sends_to_idle and worker.idle:
            return BatchCause.WORKER_IDLE, first
        return None, first

    def _complete(self, first: QueuedTask) -> dict[Bucket, BatchCause]:
        """Return the buckets of which a batch goes without a window, those of ``first`` first."""
        own = self._bucket_of(first)
        found: dict[Bucket, BatchCause] = {}
        for bucket in (own, *sorted(self._buckets.keys() - {own})):
            if bucket[0] != own[0]:
                continue
            if rest := self._rests.get(bucket):
                found[bucket] = rest.cause
            elif self._is_full(bucket):
                found[bucket] = BatchCause.FULL
        return found

    def _is_full(self, bucket: Bucket) -> bool:
        """Return whether as many tasks or tokens wait as a batch may have."""
        tokens_max = self._policy.batch_tokens_max
        if not self._policy.pads:
            tokens = sum(members.prefill_tokens for members in self._order.classes.values())
            return self._order.waiting >= self.size or tokens >= tokens_max
        tasks = self._buckets[bucket]
        shortest = math.exp(bucket[1] * self._width)
        return len(tasks) >= self.size or len(tasks) * shortest >= tokens_max

    def _head(self, bucket: Bucket, first: QueuedTask, now: float) -> QueuedTask:
        """Return the first task in order of a bucket."""
        if not self._policy.pads or bucket == self._bucket_of(first):
            return first
        return min(self._buckets[bucket].values(), key=lambda task: self._order.key(task, now))

    def _wake_at(self, first: QueuedTask) -> float:
        """Return when a batch that waits goes at the latest."""
        classes = self._order.classes
        times = [self._windows.closes_at(), classes[first.priority_class].pressing_at(first)]
        if self._order.by_class:
            times += [members.overdue_at for members in classes.values() if members.waiting]
        return min(times)

    # With which tasks.

    def _fill(
        self,
        batch: Batch[QueuedTask],
        companions: Iterator[QueuedTask],
        worker: Capacity,
        now: float,
    ) -> None:
        """Add what may go along with the first task of a batch."""
        first = batch.rows[0]
        closed = set[tuple[str, bool]]()
        """By class the sides of ``first``, longer and shorter, on which others would be padded too much."""
        for task in companions:
            side = task.priority_class, task.prefill_tokens > first.prefill_tokens
            if side in closed:
                continue
            limit = self._placement.limit(batch, task, worker, self.size, now)
            limit = limit or self._own_limit(batch, task)
            if limit is None:
                self._send(task, batch, now)
                continue
            batch.limit = limit
            closed.add(side)
            if limit is not BatchLimit.PADDING:
                return

    def _own_limit(self, batch: Batch[QueuedTask], task: QueuedTask) -> BatchLimit | None:
        """Return which budget of the policy ``task`` exceeds."""
        policy, tokens = self._policy, batch.tokens + task.prefill_tokens
        longest = max(batch.longest, task.prefill_tokens)
        cells = (len(batch.rows) + 1) * longest if policy.pads else tokens
        if cells > policy.batch_tokens_max:
            return BatchLimit.TOKENS
        return BatchLimit.PADDING if cells - tokens > policy.padding_max * cells else None

    def _companions(
        self, first: QueuedTask, now: float, *, unlimited: bool = False
    ) -> Iterator[QueuedTask]:
        """Yield tasks that may join ``first``, in order."""
        if not self._policy.pads:
            next_task = self._order.first_unlimited if unlimited else self._order.first
            while (task := next_task(now)) is not None:
                yield task
            return
        own = self._bucket_of(first)[1]
        for name in CLASSES if self._order.by_class else ("",):
            near = sorted((abs(n - own), n) for one, n in self._buckets if one == name)
            for _, number in near:
                bucket = self._buckets[name, number].values()
                yield from nsmallest(self.size, bucket, key=lambda t: self._order.key(t, now))

    def _send(self, task: QueuedTask, batch: Batch[QueuedTask], now: float) -> None:
        self.on_cancel(task)
        self._placement.send(task, batch, now)

    def _note_rest(self, batch: Batch[QueuedTask], bucket: Bucket) -> None:
        """Note how much of a batch that was due its worker had no room for."""
        before = self._rests.pop(bucket, None)
        is_cut = batch.cause in COMPLETE and batch.limit in CUT_BY_WORKER
        due = before or (Rest(self.size, batch.cause) if is_cut else None)
        if due is not None:
            tasks = min(due.tasks - len(batch.rows), self._waiting(bucket))
            if tasks > 0:
                self._rests[bucket] = due._replace(tasks=tasks)

    def _cap_rests(self, joined: int) -> None:
        """Let rests have no more tasks than wait, but for those that have just ``joined``."""
        capped = {
            bucket: rest._replace(tasks=min(rest.tasks, self._waiting(bucket) - joined))
            for bucket, rest in self._rests.items()
        }
        self._rests = {bucket: rest for bucket, rest in capped.items() if rest.tasks > 0}

    def _waiting(self, bucket: Bucket) -> int:
        """Return how many tasks of a bucket wait."""
        return len(self._buckets.get(bucket, ())) if self._policy.pads else self._order.waiting

    def _bucket_of(self, task: QueuedTask) -> Bucket:
        if not self._policy.pads:
            return "", 0
        name = task.priority_class if self._order.by_class else ""
        return name, int(math.log(max(task.prefill_tokens, 1)) / self._width)
