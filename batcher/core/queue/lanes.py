"""Waiting tasks of one class and of about one length: whose turn it is among tenants, and which of theirs.

A lane has a heap of its tenants by virtual time, and for each tenant a line: its tasks in their own order.
Virtual times change outside; a key in the heap that has become too small is corrected when it surfaces, one that has
become too large by `moved_back`.
"""

from heapq import heappop, heappush, heapreplace

from batcher.core.queue.accounts import Account
from batcher.core.queue.entries import Entry, Records


class _Line:
    """Tasks of one tenant; ``key`` is that of its valid place in the lane's heap, None: it has none."""

    __slots__ = ("account", "key", "records")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.key: float | None = None
        self.records = Records()


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
        account = entry.account
        line = self._lines.get(account)
        if line is None:
            line = self._lines[account] = _Line(account)
        line.records.push((entry.order, entry.number, entry))
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
            record = line.records.first()
            if record is not None:
                return record[2]
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
        """Drops records that do not count."""
        for line in self._lines.values():
            line.records.clean()

    def _place(self, line: _Line) -> None:
        line.key = line.account.time
        self._placed += 1
        heappush(self._places, (line.key, self._placed, line))

    def _renew_places(self) -> None:
        self._places.clear()
        for line in self._lines.values():
            self._place(line)
