"""Batch policies: when a batch is formed, and which requests join it. `Order` alone decides who is next."""

from collections.abc import Sequence

from typing_extensions import override

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.entry import Batch, BatchCause, Decision, QueueEntry
from batcher.core.scheduler.order import Order
from batcher.core.scheduler.placement import Placement
from sluice.settings.batching import Policy


class BatchPolicy:
    """Forms batches from an order. The queue reports every event of a request to it."""

    def __init__(self, policy: Policy, order: Order, placement: Placement) -> None:
        self._policy, self._order, self._placement = policy, order, placement

    def on_wait(self, entry: QueueEntry) -> None:
        """Handle a request that starts to wait."""

    def on_cancel(self, entry: QueueEntry) -> None:
        """Handle a waiting request that leaves the order."""

    def on_answered(self, batch: Batch[QueueEntry], now: float) -> None:
        """Handle a batch of which every request has its first token, or has ended."""

    def form(self, now: float, capacities: Sequence[Capacity]) -> Decision:
        """Form a batch for one worker, or decide when to try again."""
        raise NotImplementedError

    def window_s(self, priority_class: str, now: float) -> float:
        """Return how long, at most, a new request of the class waits for others, in seconds."""
        return 0.0


class ContinuousPolicy(BatchPolicy):
    """Sends the first request in order as soon as a worker has capacity for it.

    No request is skipped: while the first one fits no worker nothing is sent, or small requests
    would starve a large one. Requests that go to a worker at the same time travel in one batch.
    """

    @override
    def form(self, now: float, capacities: Sequence[Capacity]) -> Decision:
        first = self._order.first(now)
        worker = None if first is None else self._placement.choose(first, capacities, now)
        if first is None or worker is None:
            return Decision(None)
        batch: Batch[QueueEntry] = Batch(worker.worker, self._cause(first, worker, now))
        entry: QueueEntry | None = first
        while entry is not None:
            self._placement.send(entry, batch, now)
            entry = self._order.first(now)
            if entry is None:
                break
            limit = self._placement.limit(batch, entry, worker, self._policy.max_rows, now)
            if limit is not None:
                batch.limit = limit
                break
        return Decision(batch)

    def _cause(self, first: QueueEntry, worker: Capacity, now: float) -> BatchCause:
        if self._order.classes[first.priority_class].is_pressing(first, now):
            return BatchCause.URGENT
        if worker.idle:
            return BatchCause.WORKER_IDLE
        is_full = self._order.waiting >= self._policy.max_rows
        return BatchCause.FULL if is_full else BatchCause.SLOT_FREE
