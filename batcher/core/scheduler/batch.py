"""Forms batches: when to send one, to which worker, and with which rows.

The first row is the first in order (`batcher.core.scheduler.order`). No row is skipped: while it fits no worker,
nothing is sent, or small tasks would starve a large one. It is sent at once when it is urgent, when the worker would
idle, or when the batch is full; otherwise it waits for more rows, at most `wait_s`.

Where padding is limited the batch is filled from the first row's length bucket and then from its neighbours; and
while the first row may still wait, a bucket that is full goes before it.
"""

from collections.abc import Sequence

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.order import ClassQuota, Waiting, WaitingClass
from batcher.core.scheduler.placement import OpenBatches, Placement
from batcher.core.scheduler.task import Batch, BatchCause, BatchLimit, OpenBatch, QueuedTask
from sluice.settings.batching import Policy


class BatchFormer:
    """Forms batches of waiting tasks."""

    def __init__(self, policy: Policy, waiting: Waiting) -> None:
        self._policy = policy
        self._waiting = waiting
        self._open_batches = OpenBatches(policy)
        self._placement = Placement(policy, self._open_batches)

    def reconfigure(self, policy: Policy, waiting: Waiting) -> None:
        """Continues under another policy, with the tasks that wait now."""
        self._policy = self._placement.policy = policy
        self._waiting = waiting
        self._open_batches.reconfigure(policy)

    def form(self, now: float, capacities: Sequence[Capacity]) -> Batch | float | None:
        """A batch, or when to call again; None: not before something has changed."""
        quotas = self._waiting.quotas(now)
        if not quotas:
            return None
        quota = quotas[0]
        first = _head(quota.members, now)
        capacity = self._placement.choose(first, capacities, quota)
        if capacity is None:
            capacity = self._preempt(first, capacities, quota)
            quotas = quotas[:1]  # Less urgent classes have no room in it.
        if capacity is None:
            return self._waiting.modest_until(quota.members) if quota.is_modest else None
        by_length = self._policy.pads
        choose = self._choose_by_length if by_length else self._cause
        cause, first = choose(now, quotas, first, capacity)
        if not isinstance(cause, BatchCause):
            return cause
        filling = Filling(self._policy, capacity, self._open_batches.open(capacity.worker, now))
        (self._fill_around if by_length else self._fill)(filling, first, quotas, now)
        return filling.batch(cause)

    def landed(self, batch: OpenBatch, now: float | None) -> None:
        """A row of ``batch`` has left its worker; without ``now`` no latency is learned from it."""
        self._open_batches.row_ended(batch, now)

    def _preempt(
        self, first: QueuedTask, capacities: Sequence[Capacity], quota: ClassQuota
    ) -> Capacity | None:
        """A worker with room for ``first`` when less urgent rows are preempted, as it is then."""
        if not (self._policy.takes_slots and self._policy.by_class):
            return None
        rank = quota.members.rank
        seen = [each.preemptible[rank] for each in capacities if rank < len(each.preemptible)]
        return self._placement.choose(first, seen, quota)

    # When.

    def _cause(
        self, now: float, quotas: Sequence[ClassQuota], first: QueuedTask, capacity: Capacity
    ) -> tuple[BatchCause | float, QueuedTask]:
        """Why a batch that begins with ``first`` is sent now, or when it will be."""
        quota = quotas[0]
        if quota.overdue or quota.members.is_pressing(first, now):
            return BatchCause.URGENT, first
        if self._policy.sends_to_idle and capacity.idle:
            return BatchCause.WORKER_IDLE, first
        waiting, tokens_max = self._waiting, self._policy.batch_tokens_max
        if waiting.count >= self._rows_max(capacity, quota) or waiting.prefill_tokens >= tokens_max:
            return BatchCause.FULL, first
        if not self._policy.wait_s:
            return BatchCause.SLOT_FREE, first
        passed_since = min(members.passed_since for members in waiting.classes if members.waiting)
        due_at = passed_since + self._policy.wait_s
        return (BatchCause.WINDOW_OVER if due_at <= now else due_at), first

    def _choose_by_length(
        self, now: float, quotas: Sequence[ClassQuota], first: QueuedTask, capacity: Capacity
    ) -> tuple[BatchCause | float, QueuedTask]:
        """The same where lengths matter: a full bucket is sent before a first row that may still wait."""
        members = quotas[0].members
        if quotas[0].overdue or members.is_pressing(first, now):
            return BatchCause.URGENT, first
        due_at = first.waiting_since + self._policy.wait_s
        if due_at <= now:
            return BatchCause.WINDOW_OVER, first
        full = self._first_of_full(quotas, capacity)
        if full is not None:
            return BatchCause.FULL, full
        if self._policy.sends_to_idle and capacity.idle:
            return BatchCause.WORKER_IDLE, first
        return due_at, first

    def _first_of_full(self, quotas: Sequence[ClassQuota], capacity: Capacity) -> QueuedTask | None:
        """The first row of the first bucket that fills a batch."""
        for quota in quotas:
            rows = self._rows_max(capacity, quota)
            for bucket in quota.members.buckets.values():
                task = bucket.head()
                if task is None:
                    continue
                cells = bucket.waiting * task.prefill_tokens
                is_full = bucket.waiting >= rows or cells >= self._policy.batch_tokens_max
                if is_full and self._placement.choose(task, [capacity], quota) is not None:
                    return task
        return None

    def _rows_max(self, capacity: Capacity, quota: ClassQuota) -> int:
        return min(self._open_batches.max_rows, self._placement.free_rows(capacity, quota))

    # With which rows.

    def _fill(
        self, filling: "Filling", first: QueuedTask, quotas: Sequence[ClassQuota], now: float
    ) -> None:
        """With ``first`` and what follows it, class by class."""
        quotas[0].members.start_turn(first, now)
        self._narrow(filling, quotas[0])
        self._take(filling, first, now)
        taken = 1
        for quota in quotas:
            self._narrow(filling, quota)
            members, rows = quota.members, quota.rows - taken
            taken = 0
            while rows > 0 and members.waiting:
                if not filling.has_row():
                    return
                task = _head(members, now)
                if not filling.fits(task):
                    return
                members.start_turn(task, now)
                self._take(filling, task, now)
                rows -= 1

    def _fill_around(
        self, filling: "Filling", first: QueuedTask, quotas: Sequence[ClassQuota], now: float
    ) -> None:
        """With ``first`` and what is in buckets around its own, class by class."""
        members = quotas[0].members
        members.start_turn(_head(members, now), now)  # ``first`` may be of a full bucket instead.
        self._narrow(filling, quotas[0])
        self._take(filling, first, now)
        for quota in quotas:
            self._narrow(filling, quota)
            rows = quota.rows
            closed = set[int]()
            for side, bucket in quota.members.buckets_around(first.prefill_tokens):
                while rows > 0 and side not in closed and (task := bucket.head()) is not None:
                    if filling.has_row() and filling.fits(task):
                        self._take(filling, task, now)
                        rows -= 1
                    elif filling.limit is BatchLimit.PADDING:
                        closed.add(side)
                    else:
                        return

    def _narrow(self, filling: "Filling", quota: ClassQuota) -> None:
        capacity = filling.capacity
        free_rows = self._placement.free_rows(capacity, quota)
        filling.narrow(self._open_batches.max_rows, free_rows)

    def _take(self, filling: "Filling", task: QueuedTask, now: float) -> None:
        self._waiting.take(task, now)
        if task.prefix:
            self._placement.sent(task, filling.capacity.worker)
        filling.put(task, now)


def _head(members: WaitingClass, now: float) -> QueuedTask:
    members.pass_over(now)
    task = members.head(now)
    assert task is not None
    return task


class Filling:
    """A batch for one worker while it is being filled: its rows, and whether one more may join.

    Attributes:
        limit: why no more rows joined.
    """

    def __init__(self, policy: Policy, capacity: Capacity, batch: OpenBatch) -> None:
        self.capacity = capacity
        self.limit = BatchLimit.ALL_WAITING
        self._batch = batch
        self._rows: list[QueuedTask] = []
        self._rows_max = 1
        self._rows_limit = BatchLimit.ROWS
        self._pads = policy.pads
        self._padding_max = policy.padding_max
        self._tokens_max = policy.batch_tokens_max
        self._prefill_max = policy.waiting_tokens_max - capacity.waiting_tokens
        self._tokens = self._longest = self._cache = 0

    def narrow(self, batch_rows: int, free_rows: int) -> None:
        """Rows that follow may join up to so many rows."""
        self._rows_max = min(batch_rows, free_rows)
        self._rows_limit = BatchLimit.ROWS if batch_rows < free_rows else BatchLimit.WORKER_ROWS

    def has_row(self) -> bool:
        """Whether there may be one more row; else `limit` says why not."""
        if len(self._rows) < self._rows_max:
            return True
        self.limit = self._rows_limit
        return False

    def fits(self, task: QueuedTask) -> bool:
        """Whether ``task`` may join as one more row; else `limit` says why not."""
        tokens = self._tokens + task.prefill_tokens
        cells = tokens
        if self._pads:
            cells = (len(self._rows) + 1) * max(self._longest, task.prefill_tokens)
        if task.alone or self._rows[0].alone:
            self.limit = BatchLimit.ALONE
        elif tokens > self._prefill_max:
            self.limit = BatchLimit.WORKER_PREFILL
        elif self._cache + task.cache_tokens > self.capacity.free_tokens:
            self.limit = BatchLimit.WORKER_CACHE
        elif cells > self._tokens_max:
            self.limit = BatchLimit.TOKENS
        elif cells - tokens > self._padding_max * cells:
            self.limit = BatchLimit.PADDING
        else:
            return True
        return False

    def put(self, task: QueuedTask, now: float) -> None:
        """``task`` joins."""
        prefill_tokens = task.prefill_tokens
        task.open_batch = self._batch
        task.waited_s = now - task.waiting_since
        self._tokens += prefill_tokens
        self._cache += task.cache_tokens
        if prefill_tokens > self._longest:
            self._longest = prefill_tokens
        self._rows.append(task)

    def batch(self, cause: BatchCause) -> Batch:
        """The batch; at least one row."""
        rows = tuple(self._rows)
        self._batch.rows = len(rows)
        return Batch(
            rows=rows,
            worker=self.capacity.worker,
            cause=cause,
            limit=self.limit,
            tokens=self._tokens,
            cache_tokens=self._cache,
            padding_share=1 - self._tokens / max(1, len(rows) * self._longest),
            longest_wait=min(rows, key=lambda row: row.waiting_since),
        )
