"""The worker of a request, and how many more fit there."""

import math
from collections.abc import Sequence
from typing import Final

from batcher.core.scheduler.capacity import Capacity, Room
from batcher.core.scheduler.order import Order
from batcher.core.scheduler.task import Batch, BatchLimit, QueuedTask
from sluice.settings.batching import Policy
from sluice.wire.subjects import RANKS, URGENT_CLASS

BATCHES_IN_FLIGHT_MAX: Final = 4
"""Batches of one batcher that a worker has not answered: what it grants changes meanwhile, where there are others. Rows
of the most urgent class do not wait for that."""
PREFIXES_MAX: Final = 8192
"""Prompt beginnings that are remembered; the oldest is forgotten first."""


class Placement:
    """Chooses workers, of those with room for a request.

    First those where no other request gives way to it, then the one with the fewest prompt tokens before it, then the
    emptiest one. A worker that was sent a prompt with the same beginning is preferred while no more tokens than those
    of the prompt, which its prefix cache may save, are before it.
    """

    def __init__(self, policy: Policy, order: Order) -> None:
        self._policy = policy
        self._order = order
        self._workers: dict[int, str] = {}

    def change(self, policy: Policy) -> None:
        """Continue under another policy; prompt beginnings keep their workers."""
        self._policy = policy

    def choose(
        self, task: QueuedTask, capacities: Sequence[Capacity], now: float
    ) -> Capacity | None:
        """Return the worker for ``task``; None: none has room."""
        able = [capacity for capacity in capacities if self._fits(capacity, task, now)]
        if len(able) < 2:
            return able[0] if able else None
        soonest = min(able, key=lambda capacity: _wait(capacity, task))
        known = self._workers.get(task.prefix)
        for capacity in able:
            more_tokens = capacity.waiting_tokens - soonest.waiting_tokens
            if capacity.worker == known and more_tokens <= task.prefill_tokens:
                return capacity
        return soonest

    def room(self, capacity: Capacity, task: QueuedTask, now: float) -> Room | Capacity:
        """Return what the task's class may take of the worker.

        Where its sequences do not give way to more urgent ones it leaves some slots free while such are seen, at most
        a quarter of the worker, so that small workers are not blocked.
        """
        urgent, name = capacity.urgent, task.priority_class
        if self._policy.takes_slots and urgent:
            rank = RANKS[name] if self._order.by_class else len(urgent)
            return urgent[rank] if rank < len(urgent) else capacity
        members = self._order.classes[name]
        spare = members.policy.spare_rows
        if not spare or self._order.modest_until(name) <= now or members.is_overdue(now):
            return capacity
        free = capacity.free_rows
        free -= min(spare, (free + capacity.running_rows) // 4)
        return Room(free, capacity.free_tokens, capacity.waiting_tokens)

    def send(self, task: QueuedTask, batch: Batch[QueuedTask], now: float) -> None:
        """Move ``task`` from the order into ``batch``, and remember the worker of its prompt."""
        self._order.take(task, now)
        batch.add(task)
        if task.prefix:
            self._workers.pop(task.prefix, None)
            self._workers[task.prefix] = batch.worker
            if len(self._workers) > PREFIXES_MAX:
                del self._workers[next(iter(self._workers))]

    def limit(
        self,
        batch: Batch[QueuedTask],
        task: QueuedTask,
        capacity: Capacity,
        rows_max: int,
        now: float,
    ) -> BatchLimit | None:
        """Return why ``task`` may not go with ``batch``: what the worker grants, or ``rows_max``."""
        room = self.room(capacity, task, now)
        rows, tokens = len(batch.rows), batch.tokens + task.prefill_tokens
        if rows >= room.free_rows:
            return BatchLimit.WORKER_ROWS
        if rows >= rows_max:
            return BatchLimit.ROWS
        if room.waiting_tokens + tokens > self._policy.waiting_tokens_max:
            return BatchLimit.WORKER_PREFILL
        if batch.cache_tokens + task.cache_tokens > room.free_tokens:
            return BatchLimit.WORKER_CACHE
        return None

    def _fits(self, capacity: Capacity, task: QueuedTask, now: float) -> bool:
        room, policy = self.room(capacity, task, now), self._policy
        if room.free_rows <= 0 or (
            task.priority_class != URGENT_CLASS
            and capacity.batches_in_flight >= BATCHES_IN_FLIGHT_MAX
        ):
            return False
        if capacity.idle:
            return True  # The worker itself refuses a request that can never fit.
        waiting = room.waiting_tokens
        if waiting and waiting + task.prefill_tokens > policy.waiting_tokens_max:
            return False
        return task.cache_tokens <= room.free_tokens


def _wait(capacity: Capacity, task: QueuedTask) -> tuple[bool, int, float]:
    free = capacity.free_rows
    gives_way = free <= 0 or task.cache_tokens > capacity.free_tokens
    share = capacity.running_rows / (capacity.running_rows + free) if free > 0 else math.inf
    return gives_way, capacity.waiting_tokens, share
