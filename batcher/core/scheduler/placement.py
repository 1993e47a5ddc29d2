"""Placement: the worker of a request, and what else fits there."""

import math
from collections.abc import Sequence
from typing import Final

from batcher.core.scheduler.capacity import Capacity, UsableCapacity, capacity_of
from batcher.core.scheduler.entry import Batch, BatchLimit, QueueEntry
from batcher.core.scheduler.order import Order
from sluice.settings.batching import SPARE_SLOTS
from sluice.wire.subjects import RANKS, URGENT_CLASS

BATCHES_IN_FLIGHT_MAX: Final = 4
"""Unacknowledged batches of one batcher per worker. Grants change meanwhile if other batchers send
too, so more of them would be refused. Requests of the most urgent class are exempt."""
PREFIXES_MAX: Final = 8192
"""Prompt prefixes that are remembered; the oldest is forgotten first."""


class Placement:
    """Chooses among the workers with capacity for a request.

    Preferred are workers where nothing has to be preempted, then the one with the fewest prompt
    tokens to compute first, then the emptiest. A worker that got a prompt with the same prefix is
    preferred as long as it has at most as many more tokens to compute as its prefix cache may save.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._workers: dict[int, str] = {}

    def choose(
        self, entry: QueueEntry, capacities: Sequence[Capacity], now: float
    ) -> Capacity | None:
        """Return the worker for a request, or None if it fits none."""
        fitting = [worker for worker in capacities if self._fits(worker, entry, now)]
        # One worker or none: there is nothing to compare.
        if len(fitting) < 2:
            return fitting[0] if fitting else None
        soonest = min(fitting, key=lambda worker: _wait_key(worker, entry))
        cached_by = self._workers.get(entry.prefix)
        for worker in fitting:
            # The prefix cache may save the whole prompt, so waiting that much longer still pays.
            longer_tokens = worker.waiting_tokens - soonest.waiting_tokens
            if worker.worker == cached_by and longer_tokens <= entry.prefill_tokens:
                return worker
        return soonest

    def usable(self, worker: Capacity, entry: QueueEntry, now: float) -> UsableCapacity | Capacity:
        """Return what the class of a request may use of a worker.

        If the engine does not preempt, some slots stay free while more urgent requests arrive: at
        most a quarter of the worker, so that small workers are not blocked.
        """
        urgent, name = worker.urgent, entry.priority_class
        # The engine preempts: it says itself what each class may have.
        if urgent:
            return capacity_of(worker, RANKS[name] if self._order.by_class else len(urgent))
        members = self._order.classes[name]
        spare = SPARE_SLOTS[name]
        if not spare or self._order.reserve_until(name) <= now or members.overdue_at <= now:
            return worker
        # Keep slots free for more urgent requests, but never more than a quarter of the worker.
        free = worker.free_slots
        free -= min(spare, (free + worker.running) // 4)
        return UsableCapacity(free, worker.free_tokens, worker.waiting_tokens)

    def send(self, entry: QueueEntry, batch: Batch[QueueEntry], now: float) -> None:
        """Move a request from the order into a batch, and remember the worker of its prefix."""
        self._order.take(entry, now)
        batch.add(entry)
        if entry.prefix:
            self._workers.pop(entry.prefix, None)
            self._workers[entry.prefix] = batch.worker
            if len(self._workers) > PREFIXES_MAX:
                del self._workers[next(iter(self._workers))]

    def limit(
        self,
        batch: Batch[QueueEntry],
        entry: QueueEntry,
        worker: Capacity,
        size_max: int,
        now: float,
    ) -> BatchLimit | None:
        """Return why a request may not join a batch: a limit of the worker, or `size_max`; None if it may."""
        free = self.usable(worker, entry, now)
        size = len(batch.entries)
        if size >= free.free_slots:
            return BatchLimit.WORKER_ROWS
        if size >= size_max:
            return BatchLimit.ROWS
        # Prompts that the worker has not computed yet delay each other.
        waiting = free.waiting_tokens + batch.tokens + entry.prefill_tokens
        if waiting > self._order.policy.waiting_tokens_max:
            return BatchLimit.WORKER_PREFILL
        if batch.cache_tokens + entry.cache_tokens > free.free_tokens:
            return BatchLimit.WORKER_CACHE
        return None

    def _fits(self, worker: Capacity, entry: QueueEntry, now: float) -> bool:
        """Return whether a worker can take a request as the first of a batch; `limit` decides about the others."""
        free = self.usable(worker, entry, now)
        if free.free_slots <= 0:
            return False
        is_urgent = entry.priority_class == URGENT_CLASS
        if not is_urgent and worker.batches_in_flight >= BATCHES_IN_FLIGHT_MAX:
            return False
        if worker.idle:
            return True  # The worker itself refuses a request that can never fit.
        waiting = free.waiting_tokens
        # A prompt longer than the maximum goes to a worker in which no prompt waits.
        if waiting and waiting + entry.prefill_tokens > self._order.policy.waiting_tokens_max:
            return False
        return entry.cache_tokens <= free.free_tokens


def _wait_key(worker: Capacity, entry: QueueEntry) -> tuple[bool, int, float]:
    """Return the sort key of workers: preemption last, then the shortest wait, then the emptiest."""
    free = worker.free_slots
    preempts = free <= 0 or entry.cache_tokens > worker.free_tokens
    share = worker.running / (worker.running + free) if free > 0 else math.inf
    return preempts, worker.waiting_tokens, share
