"""Chooses the worker of a batch: the one with the soonest first token, or one with the prompt in its prefix cache.

Only workers with room for the first row count; one that could not go on with it before is the last choice.
A worker that computed a prompt with the same beginning is preferred to
the soonest one while the difference is at most the time to compute the prompt, which its prefix cache may save.
"""

from collections.abc import Sequence
from typing import Final

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.order import ClassQuota
from batcher.core.scheduler.task import OpenBatch, QueuedTask
from sluice.settings.batching import Policy

PREFIXES_MAX: Final = 8192
"""Prompt beginnings that are remembered; the oldest is forgotten first."""
WELL_WITHIN: Final = 0.8
BEYOND: Final = 1.2
"""Below the one share of the latency target batches may grow, above the other they shrink."""


class OpenBatches:
    """Batches with rows that have not ended: how many each worker computes, and how large the next may be.

    Attributes:
        max_rows: most rows of a batch now.
    """

    def __init__(self, policy: Policy) -> None:
        self._running: dict[str, int] = {}
        self.reconfigure(policy)

    def reconfigure(self, policy: Policy) -> None:
        """Continues under another policy."""
        self._rows_most = policy.max_rows
        self._target_s = policy.latency_target_s
        self.max_rows = policy.max_rows if self._target_s is None else 1

    def open(self, worker: str, now: float) -> OpenBatch:
        """A batch is sent to ``worker``; the caller counts its rows."""
        self._running[worker] = self._running.get(worker, 0) + 1
        return OpenBatch(worker, now)

    def row_ended(self, batch: OpenBatch, now: float | None) -> None:
        """A row of ``batch`` has left its worker; without ``now`` no latency is learned from it."""
        batch.rows -= 1
        if batch.rows:
            return
        self._running[batch.worker] -= 1
        if not self._running[batch.worker]:
            del self._running[batch.worker]
        if self._target_s is None or now is None:
            return
        took_s = now - batch.sent_at
        if took_s < WELL_WITHIN * self._target_s:
            self.max_rows = min(self.max_rows + 1, self._rows_most)
        elif took_s > BEYOND * self._target_s:
            self.max_rows = max(self.max_rows - 1, 1)

    def running(self, worker: str) -> int:
        """Batches of which the worker still computes a row."""
        return self._running.get(worker, 0)


class Placement:
    """Chooses workers for batches, and remembers the prompts that they computed."""

    def __init__(self, policy: Policy, open_batches: OpenBatches) -> None:
        self.policy = policy
        self._open_batches = open_batches
        self._workers: dict[bytes, str] = {}

    def choose(
        self, task: QueuedTask, capacities: Sequence[Capacity], quota: ClassQuota
    ) -> Capacity | None:
        """The worker for a batch that begins with ``task``; None: none has the room that ``quota`` asks for."""
        able = [capacity for capacity in capacities if self._fits(capacity, task, quota)]
        able = [capacity for capacity in able if capacity.worker != task.avoid] or able
        if len(able) < 2:
            return able[0] if able else None
        soonest = min(able, key=lambda capacity: _wait(capacity, task))
        known = self._workers.get(task.prefix)
        for capacity in able:
            if capacity.worker == known and _is_close(capacity, soonest, task):
                return capacity
        return soonest

    def free_rows(self, capacity: Capacity, quota: ClassQuota) -> int:
        """Rows that the class may use: some stay free for more urgent ones where its rows are not preempted for them.

        At most a quarter of the worker stays free, so that small workers are not blocked.
        """
        free = capacity.free_rows
        if not quota.spare_rows or (self.policy.takes_slots and capacity.preempts):
            return free
        return free - min(quota.spare_rows, (free + capacity.running_rows) // 4)

    def sent(self, task: QueuedTask, worker: str) -> None:
        """``task``, whose prompt's prefix is known, was sent to ``worker``."""
        self._workers.pop(task.prefix, None)
        self._workers[task.prefix] = worker
        if len(self._workers) > PREFIXES_MAX:
            del self._workers[next(iter(self._workers))]

    def _fits(self, capacity: Capacity, task: QueuedTask, quota: ClassQuota) -> bool:
        policy = self.policy
        if self.free_rows(capacity, quota) <= 0:
            return False
        if capacity.batches_in_flight >= policy.batches_in_flight_max:
            return False
        running_max = policy.batches_running_max
        if running_max is not None and self._open_batches.running(capacity.worker) >= running_max:
            return False
        if capacity.idle:
            return True  # The worker itself refuses a row that can never fit.
        waiting_tokens = capacity.waiting_tokens
        if waiting_tokens and waiting_tokens + task.prefill_tokens > policy.waiting_tokens_max:
            return False
        return task.cache_tokens <= capacity.free_tokens


def _wait(capacity: Capacity, task: QueuedTask) -> tuple[float, int, float]:
    rows = capacity.running_rows / (capacity.running_rows + capacity.free_rows)
    return capacity.first_token_s(task.prefill_tokens), capacity.waiting_tokens, rows


def _is_close(capacity: Capacity, soonest: Capacity, task: QueuedTask) -> bool:
    prefill = task.prefill_tokens
    more_s = capacity.first_token_s(prefill) - soonest.first_token_s(prefill)
    more_tokens = capacity.waiting_tokens - soonest.waiting_tokens
    saved_s = prefill * capacity.prefill_token_s + capacity.step_s
    return more_s <= saved_s and more_tokens <= prefill
