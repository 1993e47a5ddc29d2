"""A task inside the queue, and records of it.

A task may stop waiting in many ways, and its records are not looked for then: they stay until they surface. An entry
waits once, what comes back gets a new one, so a record counts while its entry waits.
"""

from __future__ import annotations

import math
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
    """One task from the moment it begins to wait until it is forgotten or waits again; lengths in tokens.

    Attributes:
        prefill: prompt and answer so far.
        charged: what its tenant was charged for it.
        returned: whether it came back from a worker.
        number: of its arrival; 0: it does not wait any more.
        since: when it began to wait.
        tokens: prompt and expected answer.
        cache: what it may need of a worker's KV cache.
        guessed: whether these two are, because nothing was known of such answers.
        order: its place among those of its tenant, ties by number.
        batch: the batch it was handed out with.
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
        "since",
        "task",
        "tokens",
    )

    # Set when it begins to wait.
    number: int
    since: float
    tokens: int
    cache: int
    guessed: bool
    account: Account
    lane: Lane
    order: float
    # Set when it is handed out.
    batch: OpenBatch

    def __init__(self, task: QueuedTask) -> None:
        self.task = task
        self.prefill = task.prompt_tokens + task.produced
        self.charged = 0
        self.returned = False

    def again(self, produced: int) -> Entry:
        """The same task when it comes back from a worker; ``produced`` tokens of its answer exist."""
        entry = Entry(self.task)
        entry.prefill = self.task.prompt_tokens + produced
        entry.charged = self.charged
        entry.returned = True
        return entry


class Records:
    """Records by their order.

    What comes in order, as most does, is kept in a run, whose ends cost nothing; the rest in a heap.

    Attributes:
        earliest: no record that counts is before this; it may be too early, but not too late.
    """

    __slots__ = ("_heap", "_run", "earliest")

    def __init__(self) -> None:
        self.earliest = math.inf
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
        if record[0] < self.earliest:
            self.earliest = record[0]

    def first(self) -> Record | None:
        """The first that counts; drops those before it."""
        run, heap = self._run, self._heap
        while run and not run[0][2].number:
            run.popleft()
        while heap and not heap[0][2].number:
            heappop(heap)
        first = run[0] if run else None
        if heap and (first is None or heap[0] < first):
            first = heap[0]
        self.earliest = math.inf if first is None else first[0]
        return first

    def pop_until(self, moment: float) -> Record | None:
        """Takes out the first that counts, if it is not after ``moment``."""
        if self.earliest > moment:
            return None
        record = self.first()
        if record is None or record[0] > moment:
            return None
        if self._run and self._run[0] is record:
            return self._run.popleft()
        return heappop(self._heap)

    def tidy(self, counting: int) -> None:
        """Drops those that do not count if they are most; ``counting`` at most do."""
        if len(self._run) + len(self._heap) > 4 * counting + STALE_MIN:
            self.clean()

    def clean(self) -> None:
        """Drops all that do not count. O(n): for when these are most."""
        self._run = deque(record for record in self._run if record[2].number)
        self._heap = [record for record in self._heap if record[2].number]
        heapify(self._heap)
