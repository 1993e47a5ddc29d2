"""Rows in the queue, and how they move to another one when the policy changes."""

import hashlib
from array import array
from collections.abc import Iterable, Mapping
from typing import Final

from batcher.core.queue import Queue
from batcher.core.rows import IN_FLIGHT, Row, RowState
from batcher.core.tasks import QueuedTask
from sluice.batching import Policy

PREFIX_TOKENS: Final = 64
"""Prompts that begin with the same this many tokens go to the same worker if nothing speaks against it."""


class Filing:
    """The queue of one model, for rows.

    Attributes:
        queue: the one in force; rows that an earlier one handed out are unknown to it.
    """

    def __init__(self, policy: Policy, weights: Mapping[str, float]) -> None:
        self.queue = Queue(policy, weights)
        self._elsewhere: set[str] = set()

    def add(self, row: Row, now: float) -> None:
        """Files a row that is new here."""
        self.queue.add(_queued(row), now)

    def put_back(self, row: Row, now: float) -> None:
        """Files a row again that was handed out."""
        if row.id in self._elsewhere:
            self._elsewhere.remove(row.id)
            self.queue.add(_queued(row), now)
        else:
            self.queue.requeue(row.id, len(row.produced), now)

    def leave(self, row: Row, now: float, *, whole: bool) -> None:
        """Forgets a row, waiting or handed out; ``whole``: it has all of its answer."""
        if row.id in self._elsewhere:
            self._elsewhere.remove(row.id)
        elif row.state in IN_FLIGHT:
            self.queue.finish(row.id, len(row.produced), now, whole=whole)
        else:
            self.queue.cancel(row.id)

    def change(self, policy: Policy, weights: Mapping[str, float], rows: Iterable[Row]) -> None:
        """Makes a queue with another policy. Of ``rows`` those that wait move there, and keep the time they came at."""
        self.queue = Queue(policy, weights)
        for row in sorted(rows, key=lambda row: row.since):
            if row.state is RowState.WAITING:
                self.queue.add(_queued(row), row.since)
            elif row.state in IN_FLIGHT:
                self._elsewhere.add(row.id)


def _queued(row: Row) -> QueuedTask:
    task = row.task
    return QueuedTask(
        row.id,
        task.priority_class,
        row.deadline,
        tenant=task.tenant or "default",
        workload=task.workload,
        prompt_tokens=len(task.prompt_token_ids),
        max_tokens=task.sampling.max_tokens,
        produced=len(row.produced),
        prefix=_prefix(row),
    )


def _prefix(row: Row) -> bytes:
    head = row.task.prompt_token_ids[:PREFIX_TOKENS]
    if len(head) < PREFIX_TOKENS:
        return b""
    return hashlib.blake2b(array("I", head).tobytes(), digest_size=8).digest()
