"""Rows in the queue."""

import hashlib
from array import array
from collections.abc import Mapping
from typing import Final

from batcher.core.rows import IN_FLIGHT, Row
from batcher.core.scheduler.queue import Queue
from batcher.core.scheduler.task import QueuedTask
from sluice.settings.batching import Policy

PREFIX_TOKENS: Final = 64
"""Prompts that begin with the same this many tokens go to the same worker if nothing speaks against it."""


class Filing:
    """The queue of one model, for rows.

    Attributes:
        queue: to be asked.
    """

    def __init__(self, policy: Policy, weights: Mapping[str, float]) -> None:
        self.queue = Queue(policy, weights)

    def add(self, row: Row, now: float) -> None:
        """Files a row that is new here."""
        self.queue.add(_queued(row), now)

    def put_back(self, row: Row, now: float) -> None:
        """Files a row again that was handed out."""
        self.queue.requeue(row.id, len(row.produced), now)

    def leave(self, row: Row, now: float, *, whole: bool) -> None:
        """Forgets a row, waiting or handed out; ``whole``: it has all of its answer."""
        if row.state in IN_FLIGHT:
            self.queue.finish(row.id, len(row.produced), now, whole=whole)
        else:
            self.queue.cancel(row.id)


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
        produced_tokens=len(row.produced),
        prefix=_prefix(row),
    )


def _prefix(row: Row) -> bytes:
    head = row.task.prompt_token_ids[:PREFIX_TOKENS]
    if len(head) < PREFIX_TOKENS:
        return b""
    return hashlib.blake2b(array("I", head).tobytes(), digest_size=8).digest()
