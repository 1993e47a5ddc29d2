"""A task inside the queue, and its records.

A task may stop waiting in many ways, and its records are not looked for then: they stay until they surface. A record
counts while it carries the number that its entry has now; an entry gets a new one each time it begins to wait.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
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


class Records:
    """Records by their order.

    What comes in order, as most does, is kept in a run, whose ends cost nothing; the rest in a heap.
    """

    __slots__ = ("_heap", "_run")

    def __init__(self) -> None:
        self._run: deque[Record] = deque()
        self._heap: list[Record] = []

    def __len__(self) -> int:
        """Records, those that do not count included."""
        return len(self._run) + len(self._heap)

    def push(self, record: Record) -> None:
        """Adds one."""
        run = self._run
        if not run or run[-1] < record:
            run.append(record)
        else:
            heappush(self._heap, record)

    def first(self) -> Record | None:
        """The first that counts; drops those before it."""
        run, heap = self._run, self._heap
        while run and run[0][1] != run[0][2].number:
            run.popleft()
        while heap and heap[0][1] != heap[0][2].number:
            heappop(heap)
        if not heap:
            return run[0] if run else None
        return run[0] if run and run[0] < heap[0] else heap[0]

    def drop(self, record: Record) -> None:
        """Drops the one that is `first`."""
        if self._run and self._run[0] is record:
            self._run.popleft()
        else:
            heappop(self._heap)

    def clean(self) -> None:
        """Drops all that do not count. O(n): for when these are most."""
        self._run = deque(record for record in self._run if record[1] == record[2].number)
        self._heap = [record for record in self._heap if record[1] == record[2].number]
        heapify(self._heap)
