"""Waiting tasks of one class and of about one length: whose turn it is among tenants, and which of theirs.

A lane has a heap of its tenants by virtual time, and for each tenant a line: its tasks in their own order.
Virtual times change outside; a key in the heap that has become too small is corrected when it surfaces, one that has
become too large by `moved_back`.
"""

from collections import deque
from heapq import heapify, heappop, heappush, heapreplace

from batcher.core.queue.accounts import Account
from batcher.core.queue.entries import Entry, Record


class _Line:
    """Tasks of one tenant, the least `Entry.order` first, in order of arrival where that is the same.

    What comes in order, as most does, is kept in a run, whose ends cost nothing; the rest in a heap.

    Attributes:
        key: of its valid place in the lane's heap; None: it has none.
    """

    __slots__ = ("_heap", "_run", "account", "key")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.key: float | None = None
        self._run: deque[Entry] = deque()
        self._heap: list[Record] = []

    def __len__(self) -> int:
        """Tasks, those that do not wait any more included."""
        return len(self._run) + len(self._heap)

    def push(self, entry: Entry) -> None:
        """``entry``, the latest to arrive, waits."""
        run = self._run
        if not run or run[-1].order <= entry.order:
            run.append(entry)
        else:
            heappush(self._heap, (entry.order, entry.number, entry))

    def first(self) -> Entry | None:
        """Who goes first of those that wait; drops the others before it."""
        run, heap = self._run, self._heap
        while run and not run[0].number:
            run.popleft()
        if not heap:
            return run[0] if run else None
        while heap and not heap[0][2].number:
            heappop(heap)
        if run and (not heap or (run[0].order, run[0].number) < heap[0][:2]):
            return run[0]
        return heap[0][2] if heap else None

    def clean(self) -> None:
        """Drops all that do not wait. O(n): for when these are most."""
        self._run = deque(entry for entry in self._run if entry.number)
        self._heap = [record for record in self._heap if record[2].number]
        heapify(self._heap)


class Lane:
    """Tasks of one class and length.

    Attributes:
        waiting: how many.
    """

    __slots__ = ("_lines", "_placed", "_places", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self._lines: dict[Account, _Line] = {}
        self._places: list[tuple[float, int, _Line]] = []
        self._placed = 0

    def push(self, entry: Entry) -> None:
        """``entry`` waits; among those of its tenant the least order goes first."""
        self.waiting += 1
        account = entry.account
        line = self._lines.get(account)
        if line is None:
            line = self._lines[account] = _Line(account)
        line.push(entry)
        if line.key is None:
            self._place(line)

    def head(self) -> Entry | None:
        """Whose turn it is."""
        places = self._places
        while places:
            key, number, line = places[0]
            if key != line.key:  # It has another place, or nothing waits.
                heappop(places)
                continue
            time = line.account.time
            if time != key:
                line.key = time
                heapreplace(places, (time, number, line))
                continue
            entry = line.first()
            if entry is not None:
                return entry
            heappop(places)
            line.key = None
            del self._lines[line.account]
        return None

    def moved_back(self, account: Account) -> None:
        """The tenant's virtual time has become less."""
        line = self._lines.get(account)
        if line is not None and line.key is not None and account.time < line.key:
            self._place(line)
            if len(self._places) > 4 * len(self._lines) + 64:
                self._renew_places()

    def clean(self) -> None:
        """Drops what does not wait."""
        for line in self._lines.values():
            line.clean()

    def _place(self, line: _Line) -> None:
        line.key = line.account.time
        self._placed += 1
        heappush(self._places, (line.key, self._placed, line))

    def _renew_places(self) -> None:
        self._places.clear()
        for line in self._lines.values():
            self._place(line)
