"""Feeds workers: while a worker has room for the first row in order, the row goes there.

No row is skipped: while the first one fits no worker, nothing is sent, or small tasks would starve a large one. Rows
that go to a worker at one time travel in one batch.
"""

from collections.abc import Sequence
from typing import Final

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.order import Order
from batcher.core.scheduler.task import Batch, BatchCause, BatchLimit, Decision, QueuedTask
from sluice.settings.batching import Policy
from sluice.wire.subjects import RANKS

PREFIXES_MAX: Final = 8192
"""Prompt beginnings that are remembered; the oldest is forgotten first."""


class Placement:
    """Chooses workers: the one with the soonest first token, or one with the prompt in its prefix cache.

    Only workers with room for the row count. A worker that
    computed a prompt with the same beginning is preferred to the soonest one while the difference is at most the time
    to compute the prompt, which its prefix cache may save.
    """

    def __init__(self, policy: Policy, order: Order) -> None:
        self._policy = policy
        self._order = order
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
            if capacity.worker == known and _is_close(capacity, soonest, task):
                return capacity
        return soonest

    def free_rows(self, capacity: Capacity, task: QueuedTask, now: float) -> int:
        """Rows of the worker that the task's class may use.

        Where its rows do not give way to more urgent ones it leaves some free while such are seen, at most a quarter
        of the worker, so that small workers are not blocked.
        """
        free, name = capacity.free_rows, task.priority_class
        members = self._order.classes[name]
        spare = members.policy.spare_rows
        if not spare or (self._policy.takes_slots and capacity.preempts):
            return free
        if self._order.modest_until(name) <= now or members.is_overdue(now):
            return free
        return free - min(spare, (free + capacity.running_rows) // 4)

    def sent(self, task: QueuedTask, worker: str) -> None:
        """``task`` goes to ``worker``: remembers its prompt."""
        if task.prefix:
            self._workers.pop(task.prefix, None)
            self._workers[task.prefix] = worker
            if len(self._workers) > PREFIXES_MAX:
                del self._workers[next(iter(self._workers))]

    def _fits(self, capacity: Capacity, task: QueuedTask, now: float) -> bool:
        policy = self._policy
        if capacity.free_rows <= 0 or self.free_rows(capacity, task, now) <= 0:
            return False
        if capacity.batches_in_flight >= policy.batches_in_flight_max:
            return False
        if capacity.idle:
            return True  # The worker itself refuses a row that can never fit.
        waiting = capacity.waiting_tokens
        if waiting and waiting + task.prefill_tokens > policy.waiting_tokens_max:
            return False
        return task.cache_tokens <= capacity.free_tokens


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
        name = first.priority_class
        room, only = self._placement.choose(first, capacities, now), ""
        if room is None:
            room, only = self._preempt(first, capacities, now), name
        if room is None:
            is_spared = self._order.classes[name].policy.spare_rows > 0
            until = self._order.modest_until(name)
            return Decision(None, until if is_spared and until > now else None)
        cause = self._cause(first, room, now)
        rows, limit = self._fill(first, room, only, now)
        return Decision(Batch.of(rows, room.worker, cause, limit))

    def _preempt(
        self, first: QueuedTask, capacities: Sequence[Capacity], now: float
    ) -> Capacity | None:
        """A worker with room for ``first`` when less urgent rows are preempted, as it is then."""
        rank = RANKS[first.priority_class]
        if not self._policy.takes_slots or self._policy.order == "arrival":
            return None
        seen = [each.preemptible[rank] for each in capacities if rank < len(each.preemptible)]
        return self._placement.choose(first, seen, now)

    def _cause(self, first: QueuedTask, room: Capacity, now: float) -> BatchCause:
        if self._order.classes[first.priority_class].is_pressing(first, now):
            return BatchCause.URGENT
        if room.idle:
            return BatchCause.WORKER_IDLE
        rows = min(self._policy.max_rows, room.free_rows)
        return BatchCause.FULL if self._order.waiting >= rows else BatchCause.SLOT_FREE

    def _fill(
        self, task: QueuedTask, room: Capacity, only: str, now: float
    ) -> tuple[list[QueuedTask], BatchLimit]:
        """Takes ``task`` and what follows it in order while there is room; ``only`` of a class, unless empty."""
        order, placement, rows_max = self._order, self._placement, self._policy.max_rows
        tokens_max = self._policy.waiting_tokens_max - room.waiting_tokens
        rows: list[QueuedTask] = []
        tokens = cache = 0
        while True:
            placement.sent(task, room.worker)
            order.take(task, now)
            rows.append(task)
            tokens, cache = tokens + task.prefill_tokens, cache + task.cache_tokens
            following = order.first(now)
            if following is None:
                return rows, BatchLimit.ALL_WAITING
            if (only and following.priority_class != only) or (
                len(rows) >= placement.free_rows(room, following, now)
            ):
                return rows, BatchLimit.WORKER_ROWS
            if len(rows) >= rows_max:
                return rows, BatchLimit.ROWS
            if tokens + following.prefill_tokens > tokens_max:
                return rows, BatchLimit.WORKER_PREFILL
            if cache + following.cache_tokens > room.free_tokens:
                return rows, BatchLimit.WORKER_CACHE
            task = following


def _wait(capacity: Capacity, task: QueuedTask) -> tuple[float, int, float]:
    rows = capacity.running_rows / (capacity.running_rows + capacity.free_rows)
    return capacity.first_token_s(task.prefill_tokens), capacity.waiting_tokens, rows


def _is_close(capacity: Capacity, soonest: Capacity, task: QueuedTask) -> bool:
    prefill = task.prefill_tokens
    more_s = capacity.first_token_s(prefill) - soonest.first_token_s(prefill)
    more_tokens = capacity.waiting_tokens - soonest.waiting_tokens
    saved_s = prefill * capacity.prefill_token_s + capacity.step_s
    return more_s <= saved_s and more_tokens <= prefill
