"""A task inside the queue, and its records in heaps.

A task may stop waiting in many ways, and is taken out of no heap then: its records stay until they surface. A record
counts while it carries the number that its entry has now; an entry gets a new one each time it begins to wait.
"""

from __future__ import annotations

from heapq import heapify, heappop
from typing import TYPE_CHECKING, Final

from batcher.core.tasks import QueuedTask

if TYPE_CHECKING:
    from batcher.core.queue.accounts import Account
    from batcher.core.queue.concurrency import OpenBatch
    from batcher.core.queue.lanes import Lane

Record = tuple[float, int, "Entry"]
"""What orders it, the entry's number, the entry."""

STALE_MIN: Final = 1024
"""So many records that do not count are no reason to clean up."""


class Entry:
    """One task from `Queue.add` until it is forgotten; lengths in tokens.

    Attributes:
        number: of its valid records; 0 while it does not wait.
        order: its place among those of its tenant, ties by number.
        since: when it began to wait.
        sent_at: when it was handed out last.
        tokens: prompt and expected answer.
        prefill: prompt and answer so far.
        cache: what it may need of a worker's KV cache.
        guessed: whether these two are, because nothing was known of such answers.
        charged: what its tenant was charged for it.
        returned: whether it came back from a worker.
        batch: the batch it was handed out with, while it is out.
    """

    __slots__ = (
        "account",
        "batch",
        "cache",
        "charged",
        "guessed",
        "lane",
        "number",
        "order",
        "prefill",
        "returned",
        "sent_at",
        "since",
        "task",
        "tokens",
    )

    account: Account
    lane: Lane

    def __init__(self, task: QueuedTask) -> None:
        self.task = task
        self.number = 0
        self.order = self.since = self.sent_at = 0.0
        self.tokens = self.cache = self.charged = 0
        self.prefill = task.prompt_tokens + task.produced
        self.returned = self.guessed = False
        self.batch: OpenBatch | None = None


def surface(heap: list[Record]) -> Entry | None:
    """The entry of the first record that counts; drops those before it."""
    while heap:
        _, number, entry = heap[0]
        if number == entry.number:
            return entry
        heappop(heap)
    return None


def clean(heap: list[Record]) -> None:
    """Drops all records that do not count. O(n): call it when most do not."""
    heap[:] = [record for record in heap if record[1] == record[2].number]
    heapify(heap)
