"""Batch policies: when a batch is formed, and which requests go along. Who is next is `Order`'s alone."""

from collections.abc import Sequence

from typing_extensions import override

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.order import Order
from batcher.core.scheduler.placement import Placement
from batcher.core.scheduler.task import Batch, BatchCause, Decision, QueuedTask
from sluice.settings.batching import Policy


class BatchPolicy:
    """Forms batches of the tasks in an order. The queue calls it for each event of a task."""

    def __init__(self, policy: Policy, order: Order, placement: Placement) -> None:
        self._policy, self._order, self._placement = policy, order, placement

    def on_wait(self, task: QueuedTask) -> None:
        """Take a task that has begun to wait."""

    def on_cancel(self, task: QueuedTask) -> None:
        """Forget a task that waits, and leaves the order."""

    def on_answered(self, batch: Batch[QueuedTask], now: float) -> None:
        """Learn that each request of a batch has its first token, or has ended."""

    def form(self, now: float, capacities: Sequence[Capacity]) -> Decision:
        """Form a batch for one worker, or decide when to look again."""
        raise NotImplementedError

    def window_s(self, priority_class: str, now: float) -> float:
        """Return how long a new request of the class waits for others before its batch may go, at most."""
        return 0.0


class ContinuousPolicy(BatchPolicy):
    """Sends the first task in order as soon as a worker has room for it.

    No task is skipped: while the first one fits no worker, nothing is sent, or small tasks would starve a large one.
    Tasks that go to a worker at one time travel in one batch.
    """

    @override
    def form(self, now: float, capacities: Sequence[Capacity]) -> Decision:
        first = self._order.first(now)
        worker = None if first is None else self._placement.choose(first, capacities, now)
        if first is None or worker is None:
            return Decision(None)
        batch: Batch[QueuedTask] = Batch(worker.worker, self._cause(first, worker, now))
        task: QueuedTask | None = first
        while task is not None:
            self._placement.send(task, batch, now)
            task = self._order.first(now)
            if task is None:
                break
            limit = self._placement.limit(batch, task, worker, self._policy.max_rows, now)
            if limit is not None:
                batch.limit = limit
                break
        return Decision(batch)

    def _cause(self, first: QueuedTask, worker: Capacity, now: float) -> BatchCause:
        if self._order.classes[first.priority_class].is_pressing(first, now):
            return BatchCause.URGENT
        if worker.idle:
            return BatchCause.WORKER_IDLE
        is_full = self._order.waiting >= self._policy.max_rows
        return BatchCause.FULL if is_full else BatchCause.SLOT_FREE
