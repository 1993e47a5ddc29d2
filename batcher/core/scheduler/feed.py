"""Feeds workers: while a worker has room for the first row in order, the row goes there.

No row is skipped: while the first one fits no worker, nothing is sent, or small tasks would starve a large one. Rows
that go to a worker at one time travel in one batch.
"""

import math
from collections.abc import Sequence
from typing import Final

from batcher.core.scheduler.capacity import Capacity, Room
from batcher.core.scheduler.order import Order
from batcher.core.scheduler.task import Batch, BatchCause, BatchLimit, Decision, QueuedTask
from sluice.settings.batching import Policy
from sluice.wire.subjects import RANKS

PREFIXES_MAX: Final = 8192
"""Prompt beginnings that are remembered; the oldest is forgotten first."""


class Placement:
    """Chooses workers, of those with room for a row.

    First those where no other row gives way to it, then the one with the fewest prompt tokens before it, then the
    emptiest one. A worker that was sent a prompt with the same beginning is preferred while no more tokens than those
    of the prompt, which its prefix cache may save, are before it.
    """

    def __init__(self, policy: Policy, order: Order) -> None:
        self._policy = policy
        self._order = order
        self._by_class = policy.order != "arrival" and not policy.computes_whole
        self._workers: dict[bytes, str] = {}

    def choose(
        self, task: QueuedTask, capacities: Sequence[Capacity], now: float
    ) -> Capacity | None:
        """The worker for ``task``; None: none has room."""
        able = [each for each in capacities if self._fits(each, task, now)]
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
        """What the task's class may take of the worker.

        Where its rows do not give way to more urgent ones it leaves some rows free while such are seen, at most a
        quarter of the worker, so that small workers are not blocked.
        """
        urgent, name = capacity.urgent, task.priority_class
        if self._policy.takes_slots and urgent:
            rank = RANKS[name] if self._by_class else len(urgent)
            return urgent[rank] if rank < len(urgent) else capacity
        members = self._order.classes[name]
        spare = members.policy.spare_rows
        if not spare or self._order.modest_until(name) <= now or members.is_overdue(now):
            return capacity
        free = capacity.free_rows
        free -= min(spare, (free + capacity.running_rows) // 4)
        return Room(free, capacity.free_tokens, capacity.waiting_tokens)

    def sent(self, task: QueuedTask, worker: str) -> None:
        """``task`` goes to ``worker``: remembers its prompt."""
        if task.prefix:
            self._workers.pop(task.prefix, None)
            self._workers[task.prefix] = worker
            if len(self._workers) > PREFIXES_MAX:
                del self._workers[next(iter(self._workers))]

    def _fits(self, capacity: Capacity, task: QueuedTask, now: float) -> bool:
        room, policy = self.room(capacity, task, now), self._policy
        if room.free_rows <= 0 or capacity.batches_in_flight >= policy.batches_in_flight_max:
            return False
        if capacity.idle:
            return True  # The worker itself refuses a row that can never fit.
        waiting = room.waiting_tokens
        if waiting and waiting + task.prefill_tokens > policy.waiting_tokens_max:
            return False
        return task.cache_tokens <= room.free_tokens


class Feeder:
    """Feeds workers whose engines take rows at every step, see the module."""

    def __init__(self, policy: Policy, order: Order) -> None:
        self._policy = policy
        self._order = order
        self._placement = Placement(policy, order)

    def form(self, now: float, capacities: Sequence[Capacity]) -> Decision:
        """Rows for one worker, in order."""
        first = self._order.first(now)
        if first is None:
            return Decision(None)
        worker = self._placement.choose(first, capacities, now)
        if worker is None:
            is_spared = self._order.classes[first.priority_class].policy.spare_rows > 0
            until = self._order.modest_until(first.priority_class)
            return Decision(None, until if is_spared and until > now else None)
        cause = self._cause(first, worker, now)
        rows, limit = self._fill(first, worker, now)
        return Decision(Batch.of(rows, worker.worker, cause, limit))

    def _cause(self, first: QueuedTask, worker: Capacity, now: float) -> BatchCause:
        if self._order.classes[first.priority_class].is_pressing(first, now):
            return BatchCause.URGENT
        if worker.idle:
            return BatchCause.WORKER_IDLE
        rows = min(self._policy.max_rows, self._placement.room(worker, first, now).free_rows)
        return BatchCause.FULL if self._order.waiting >= rows else BatchCause.SLOT_FREE

    def _fill(
        self, task: QueuedTask, worker: Capacity, now: float
    ) -> tuple[list[QueuedTask], BatchLimit]:
        """Takes ``task`` and what follows it in order while there is room."""
        order, placement, policy = self._order, self._placement, self._policy
        rows: list[QueuedTask] = []
        tokens = cache = 0
        while True:
            placement.sent(task, worker.worker)
            order.take(task, now)
            rows.append(task)
            tokens, cache = tokens + task.prefill_tokens, cache + task.cache_tokens
            following = order.first(now)
            if following is None:
                return rows, BatchLimit.ALL_WAITING
            room = placement.room(worker, following, now)
            if len(rows) >= room.free_rows:
                return rows, BatchLimit.WORKER_ROWS
            if len(rows) >= policy.max_rows:
                return rows, BatchLimit.ROWS
            if room.waiting_tokens + tokens + following.prefill_tokens > policy.waiting_tokens_max:
                return rows, BatchLimit.WORKER_PREFILL
            if cache + following.cache_tokens > room.free_tokens:
                return rows, BatchLimit.WORKER_CACHE
            task = following


def _wait(capacity: Capacity, task: QueuedTask) -> tuple[bool, int, float]:
    free = capacity.free_rows
    gives_way = free <= 0 or task.cache_tokens > capacity.free_tokens
    share = capacity.running_rows / (capacity.running_rows + free) if free > 0 else math.inf
    return gives_way, capacity.waiting_tokens, share
