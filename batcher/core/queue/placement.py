"""Which worker a batch goes to: the one whose first token would come soonest, or the one that knows the prompt.

Only workers with room for the first row count. A worker that computed a prompt with the same beginning is taken before
the soonest one while the difference is no more than what computing the prompt would take: that is what its prefix cache
may save.
"""

from collections.abc import Sequence
from typing import Final

from batcher.core.queue.concurrency import Concurrency
from batcher.core.queue.entries import Entry
from batcher.core.queue.waiting import Turn
from batcher.core.replicas import Replica
from sluice.settings.batching import Policy

PREFIXES_MAX: Final = 8192
"""Prompt beginnings that are remembered; the oldest is forgotten first."""


class Placement:
    """Where batches went, and where the next one goes."""

    def __init__(self, policy: Policy, concurrency: Concurrency) -> None:
        self._policy = policy
        self._concurrency = concurrency
        self._workers: dict[bytes, str] = {}

    def reconfigure(self, policy: Policy) -> None:
        """Goes on under another policy."""
        self._policy = policy

    def choose(self, entry: Entry, replicas: Sequence[Replica], turn: Turn) -> Replica | None:
        """The worker for a batch that begins with ``entry``; None: none has the room that ``turn`` asks for."""
        able = [replica for replica in replicas if self._has_room(replica, entry, turn)]
        if len(able) < 2:
            return able[0] if able else None
        soonest = min(able, key=lambda replica: _wait(replica, entry))
        known = self._workers.get(entry.task.prefix)
        for replica in able:
            if replica.worker == known and _is_close(replica, soonest, entry):
                return replica
        return soonest

    def spared(self, replica: Replica, turn: Turn) -> int:
        """Rows that stay free for more urgent classes: at most a quarter, so that small workers do not stand still.

        None where rows of this class would give way to them.
        """
        if not turn.spare_rows or (self._policy.takes_slots and replica.rooms):
            return 0
        return min(turn.spare_rows, (replica.free_rows + replica.running_rows) // 4)

    def prefill_max(self, replica: Replica, turn: Turn) -> float:
        """Prompt tokens that may wait in a worker."""
        most = self._policy.waiting_tokens_max
        if replica.prefill_token_s:
            most = min(most, turn.prefill_s_max / replica.prefill_token_s)
        return most

    def sent(self, entry: Entry, worker: str) -> None:
        """``entry``, whose prompt's beginning is known, goes to ``worker``."""
        prefix = entry.task.prefix
        self._workers.pop(prefix, None)
        self._workers[prefix] = worker
        if len(self._workers) > PREFIXES_MAX:
            del self._workers[next(iter(self._workers))]

    def _has_room(self, replica: Replica, entry: Entry, turn: Turn) -> bool:
        policy = self._policy
        if replica.free_rows <= self.spared(replica, turn):
            return False
        if replica.batches_in_flight >= policy.batches_in_flight_max:
            return False
        running_max = policy.batches_running_max
        if running_max is not None and self._concurrency.running(replica.worker) >= running_max:
            return False
        if replica.idle:
            return True  # Whether the row fits at all is the worker's to say.
        waiting_tokens = replica.waiting_tokens
        if waiting_tokens and waiting_tokens + entry.prefill > self.prefill_max(replica, turn):
            return False
        return entry.cache <= replica.free_tokens


def _wait(replica: Replica, entry: Entry) -> tuple[float, int, float]:
    rows = replica.running_rows / (replica.running_rows + replica.free_rows)
    return replica.first_token_s(entry.prefill), replica.waiting_tokens, rows


def _is_close(replica: Replica, soonest: Replica, entry: Entry) -> bool:
    more_s = replica.first_token_s(entry.prefill) - soonest.first_token_s(entry.prefill)
    more_tokens = replica.waiting_tokens - soonest.waiting_tokens
    saved_s = entry.prefill * replica.prefill_token_s + replica.step_s
    return more_s <= saved_s and more_tokens <= entry.prefill
