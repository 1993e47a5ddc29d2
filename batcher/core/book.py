"""All rows that a ledger holds, by request: how many are in which state, and whose deadline comes next."""

import math
from collections import Counter
from collections.abc import Iterator
from heapq import heappop, heappush

from batcher.core.effects import Move
from batcher.core.rows import Row, RowState


class Book:
    """Rows by request id. Every change of a row's state goes through here."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}
        self._states: Counter[RowState] = Counter()
        self._deadlines: list[tuple[float, str]] = []
        self._moves: list[Move] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def __iter__(self) -> Iterator[Row]:
        return iter(list(self._rows.values()))

    def __getitem__(self, request_id: str) -> Row:
        return self._rows[request_id]

    def get(self, request_id: str) -> Row | None:
        """The row, or None when it is not held."""
        return self._rows.get(request_id)

    def count(self, state: RowState) -> int:
        """Rows in one state."""
        return self._states[state]

    def enter(self, row: Row) -> None:
        """Takes a row that is not held."""
        assert row.id not in self._rows, row.id
        self._rows[row.id] = row
        self._states[row.state] += 1
        self._moves.append(Move(row, None, row.state))
        if not math.isinf(row.deadline):
            heappush(self._deadlines, (row.deadline, row.id))

    def move(self, row: Row, state: RowState, now: float) -> None:
        """A step in the life of a row; a closed one is forgotten."""
        before = row.state
        row.move(state, now)
        self._states[before] -= 1
        self._moves.append(Move(row, before, state))
        if state is RowState.CLOSED:
            del self._rows[row.id]
        else:
            self._states[state] += 1

    def take_moves(self) -> list[Move]:
        """The steps since the last call, in order."""
        moves, self._moves = self._moves, []
        return moves

    def late(self, now: float) -> Iterator[Row]:
        """Rows whose deadline has come, each once."""
        while self._deadlines and self._deadlines[0][0] <= now:
            row = self._rows.get(heappop(self._deadlines)[1])
            if row is not None:
                yield row

    def next_deadline(self) -> float | None:
        """When `late` has something."""
        while self._deadlines and self._deadlines[0][1] not in self._rows:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None
