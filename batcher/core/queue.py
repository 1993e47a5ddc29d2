"""Which tasks go to the worker next.

More urgent classes go first; inside a class what came back from a lost worker, then the earliest deadline, then the
first to arrive. There is no waiting for company: whatever waits goes as soon as there is room.

Every call takes O(log n): a class keeps two heaps, and tasks that were cancelled stay in them until they surface.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush
from typing import Final

from sluice.wire.subjects import CLASSES

_RANK: Final[Mapping[str, int]] = {name: rank for rank, name in enumerate(CLASSES)}


@dataclass(frozen=True, slots=True)
class QueuedTask:
    """What the queue looks at."""

    request_id: str
    priority_class: str
    deadline: float = math.inf
    """Monotonic seconds."""


class BatchCause(Enum):
    """Why a batch was formed when it was."""

    ALL_WAITING = "all_waiting"
    """The worker had room for everything that waited."""
    NO_MORE_ROOM = "no_more_room"
    """The worker's free slots are used up."""
    FULL = "full"
    """The batch has as many rows as a batch may have."""


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One member of a batch, and how long it waited, seconds."""

    request_id: str
    waited_s: float


@dataclass(frozen=True, slots=True)
class Batch:
    """Tasks that go to a worker together, most urgent first."""

    rows: tuple[BatchRow, ...]
    cause: BatchCause


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now."""

    batch: Batch | None
    """None: nothing to send."""
    expired: tuple[str, ...]
    """Tasks whose deadline passed while they waited; the queue has forgotten them."""
    wake_at: float | None
    """When to ask again if nothing happens before; None: never."""


@dataclass(slots=True)
class _Entry:
    task: QueuedTask
    number: int
    since: float
    waiting: bool = True
    returned: bool = False

    def __lt__(self, other: "_Entry") -> bool:
        return (self.task.deadline, self.number) < (other.task.deadline, other.number)


class _Class:
    """Waiting tasks of one class: those that came back, and those that are new."""

    def __init__(self) -> None:
        self._returned: list[_Entry] = []
        self._new: list[_Entry] = []

    def push(self, entry: _Entry) -> None:
        heappush(self._returned if entry.returned else self._new, entry)

    def pop(self) -> _Entry | None:
        for heap in (self._returned, self._new):
            if _surface(heap):
                return heappop(heap)
        return None

    def pop_expired(self, now: float) -> Iterator[_Entry]:
        for heap in (self._returned, self._new):
            while _surface(heap) and heap[0].task.deadline <= now:
                yield heappop(heap)

    def next_deadline(self) -> float:
        tops = (heap[0].task.deadline for heap in (self._returned, self._new) if _surface(heap))
        return min(tops, default=math.inf)


def _surface(heap: list[_Entry]) -> bool:
    """Drops cancelled entries from the top; whether anything is left."""
    while heap and not heap[0].waiting:
        heappop(heap)
    return bool(heap)


class Queue:
    """Tasks of one model: those that wait, and those handed out until `finish`."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._entries: dict[str, _Entry] = {}
        self._classes = tuple(_Class() for _ in CLASSES)
        self._waiting = [0 for _ in CLASSES]
        self._numbers = 0

    def __len__(self) -> int:
        """Tasks that wait."""
        return sum(self._waiting)

    def waiting(self, priority_class: str) -> int:
        """Tasks of one class that wait."""
        return self._waiting[_RANK[priority_class]]

    def add(self, task: QueuedTask, now: float) -> None:
        """Takes a task that the queue does not hold."""
        assert task.request_id not in self._entries, task.request_id
        self._numbers += 1
        entry = _Entry(task, self._numbers, now)
        self._entries[task.request_id] = entry
        self._push(entry)

    def cancel(self, request_id: str) -> None:
        """Forgets a task, waiting or handed out; unknown ones are ignored."""
        entry = self._entries.pop(request_id, None)
        if entry is not None and entry.waiting:
            entry.waiting = False
            self._waiting[_RANK[entry.task.priority_class]] -= 1

    def finish(self, request_id: str) -> None:
        """Forgets a task that was handed out and needs no worker any more."""
        entry = self._entries.pop(request_id)
        assert not entry.waiting, request_id

    def requeue(self, request_id: str, produced: int, now: float) -> None:
        """Puts a task that was handed out back to the head of its class.

        Its length has grown by ``produced`` tokens of answer; the order here does not look at lengths.
        """
        assert produced >= 0
        entry = self._entries[request_id]
        assert not entry.waiting, request_id
        entry.since, entry.waiting, entry.returned = now, True, True
        self._push(entry)

    def next_batch(self, now: float, capacity: int) -> Decision:
        """Forms one batch of at most ``capacity`` rows."""
        expired = tuple(entry.task.request_id for entry in self._pop_expired(now))
        room = min(capacity, self._max_rows)
        rows = tuple(self._pop_row(now) for _ in range(min(room, len(self))))
        batch = Batch(rows, self._cause(len(rows), capacity)) if rows else None
        return Decision(batch, expired, self._wake_at())

    def _cause(self, rows: int, capacity: int) -> BatchCause:
        if not len(self):
            return BatchCause.ALL_WAITING
        return BatchCause.FULL if rows < capacity else BatchCause.NO_MORE_ROOM

    def _push(self, entry: _Entry) -> None:
        rank = _RANK[entry.task.priority_class]
        self._classes[rank].push(entry)
        self._waiting[rank] += 1

    def _pop_row(self, now: float) -> BatchRow:
        for rank, members in enumerate(self._classes):
            entry = members.pop()
            if entry is not None:
                entry.waiting = False
                self._waiting[rank] -= 1
                return BatchRow(entry.task.request_id, now - entry.since)
        raise AssertionError("asked for more rows than wait")

    def _pop_expired(self, now: float) -> Iterator[_Entry]:
        for rank, members in enumerate(self._classes):
            for entry in members.pop_expired(now):
                entry.waiting = False
                self._waiting[rank] -= 1
                del self._entries[entry.task.request_id]
                yield entry

    def _wake_at(self) -> float | None:
        earliest = min(members.next_deadline() for members in self._classes)
        return None if math.isinf(earliest) else earliest
