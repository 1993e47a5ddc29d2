"""Which tasks go to the worker next.

More urgent classes go first; inside a class what came back from a lost worker, then the earliest deadline, then the
first to arrive. There is no waiting for company: whatever waits goes as soon as there is room.

Every call takes O(log n): a class keeps two heaps, and tasks that were cancelled stay in them until they surface.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from batcher.core.batches import Batch, BatchCause, BatchLimit, BatchRow, Decision
from batcher.core.replicas import Replica
from batcher.core.tasks import QueuedTask
from sluice.batching import Policy
from sluice.wire.subjects import CLASSES

_RANK: Final[Mapping[str, int]] = {name: rank for rank, name in enumerate(CLASSES)}


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

    def __init__(self, policy: Policy, weights: Mapping[str, float] | None = None) -> None:
        self._max_rows = policy.max_rows
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

    def finish(
        self, request_id: str, output_tokens: int, now: float, *, whole: bool = True
    ) -> None:
        """Forgets a task that was handed out and needs no worker any more.

        Args:
            output_tokens: of the whole answer, what existed when the task came included.
            whole: the answer ended by itself: its length tells what to expect of others.
        """
        entry = self._entries.pop(request_id)
        assert not entry.waiting, request_id

    def requeue(self, request_id: str, produced: int, now: float) -> None:
        """Puts a task that was handed out back to the head of its class.

        ``produced`` tokens of its answer exist now, what existed when it came included.
        """
        assert produced >= 0
        entry = self._entries[request_id]
        assert not entry.waiting, request_id
        entry.since, entry.waiting, entry.returned = now, True, True
        self._push(entry)

    def next_batch(self, now: float, replicas: Sequence[Replica]) -> Decision:
        """Forms one batch for one of ``replicas``, the live workers of the model."""
        expired = tuple(entry.task.request_id for entry in self._pop_expired(now))
        free = max(replicas, key=lambda replica: replica.free_rows, default=None)
        count = min(free.free_rows, self._max_rows, len(self)) if free else 0
        batch = self._form(now, free, count) if free and count else None
        return Decision(batch, expired, self._wake_at())

    def expected_wait(self, priority_class: str, now: float, tenant: str = "default") -> float:
        """How long a task that came now would wait here, seconds; 0 when not known."""
        return 0.0

    def waiting_tokens(self, priority_class: str) -> int:
        """Their prompts and expected answers, tokens."""
        rank = _RANK[priority_class]
        entries = (entry for entry in self._entries.values() if entry.waiting)
        own = (entry.task for entry in entries if _RANK[entry.task.priority_class] == rank)
        return sum(task.prompt_tokens + task.max_tokens for task in own)

    @property
    def tokens_per_s(self) -> float:
        """Prompts and expected answers that were handed out a second while tasks waited; 0: not known."""
        return 0.0

    def service_s(self, priority_class: str) -> float:
        """How long answers of the class took lately, from being handed out to the end; 0: not known."""
        return 0.0

    def _form(self, now: float, replica: Replica, count: int) -> Batch:
        idle = replica.idle
        rows = tuple(self._pop_row(now) for _ in range(count))
        tokens = [row.prefill_tokens for row in rows]
        limit = BatchLimit.ROWS if count < replica.free_rows else BatchLimit.WORKER_ROWS
        return Batch(
            rows,
            replica.worker,
            BatchCause.WORKER_IDLE if idle else BatchCause.WINDOW_OVER,
            limit if len(self) else BatchLimit.ALL_WAITING,
            tokens=sum(tokens),
            cache_tokens=sum(row.cache_tokens for row in rows),
            padding_share=1 - sum(tokens) / (len(tokens) * max(tokens)),
            longest_wait=max(rows, key=lambda row: row.waited_s),
        )

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
                task = entry.task
                prefill = task.prompt_tokens + task.produced
                cache = task.prompt_tokens + task.max_tokens
                return BatchRow(task.request_id, now - entry.since, prefill, cache)
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
