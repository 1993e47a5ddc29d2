"""The rows that this gateway sends, and the room that batchers give it for them.

A batcher says in its reports how many rows of a class, and how many bytes of their tasks, one gateway may have there
without a frame. The gateway counts its own rows, so a report that is lost, doubled or late neither makes nor loses
room. Interactive rows take none, and never wait. Inside a class tenants take turns by weight, and one that comes late
gets its share on top of what others have taken.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import NamedTuple

from gateway.streaming.row import Row
from sluice.internal.v1.task_pb2 import Task
from sluice.wire.subjects import URGENT_CLASS


class Line(NamedTuple):
    """Rows of one class of one model wait in one line."""

    model: str
    priority_class: str


@lru_cache(maxsize=1024)
def line_of(model: str, priority_class: str) -> Line:
    """The line of a class of a model: one object, which all its rows have."""
    return Line(model, priority_class)


@dataclass(eq=False, slots=True)
class SentRow:
    """A row that somebody waits for.

    Attributes:
        task: as sent last.
        headers: of its message.
        attempt: its tokens.
        deadline: seconds.
        line: its model and class, once it was sent.
        waits: it is in this gateway, until a batcher has room for it.
        waits_since: when that began last, seconds.
        batcher: that it was sent to; empty: none.
        held: that batcher has said that it has it.
        was_held: one has said so: it waits for a worker until its deadline.
        needs_room: whether it waits for room: once a batcher has taken it, it goes elsewhere without.
        room_at: the batcher whose room it takes; empty: none.
        size: of its task, bytes.
        ask_at: when to ask about it, or to try again.
        questions: asked since the last word about it, and the time of the first of them.
        outlived: its batcher has answered a question about it: the row does not end batchers.
        sent_at: when it was to be sent for the first time.
        tokens: that had arrived when it was sent last.
        losses: of a worker or a batcher that had it, in succession without a new token.
        on_taken: called once, when a batcher has room for it, or nobody waits for it any more.
    """

    task: Task
    headers: Mapping[str, str]
    attempt: Row
    deadline: float
    line: Line = field(init=False)
    waits: bool = False
    waits_since: float = 0.0
    batcher: str = ""
    held: bool = False
    was_held: bool = False
    needs_room: bool = True
    room_at: str = ""
    size: int = 0
    ask_at: float = 0.0
    questions: int = 0
    asked_at: float = 0.0
    outlived: bool = False
    sent_at: float = 0.0
    tokens: int = 0
    losses: int = 0
    on_taken: Callable[[], None] | None = None

    @property
    def was_sent(self) -> bool:
        """Whether a batcher had it before."""
        return self.task.attempt > 0

    def losses_now(self) -> int:
        """`losses`, unless a token has come since it was sent last."""
        return self.losses if self.attempt.completion_tokens == self.tokens else 0

    def taken(self) -> None:
        """It has left this gateway."""
        on_taken, self.on_taken = self.on_taken, None
        if on_taken is not None:
            on_taken()


class Room(NamedTuple):
    """Rows of one class, and bytes of their tasks, that a gateway may have at one batcher."""

    rows: float
    size: float


class TakenRoom:
    """How much of each batcher's room this gateway's rows take.

    Attributes:
        weights: of tenants that differ from 1.
    """

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}
        self._rows: defaultdict[tuple[str, Line], Counter[str]] = defaultdict(Counter)
        """By batcher and line: rows of each tenant."""
        self._sizes: defaultdict[tuple[str, Line], Counter[str]] = defaultdict(Counter)

    def take(self, row: SentRow, batcher: str) -> None:
        """The row is sent to a batcher."""
        self.free(row)
        if row.line.priority_class == URGENT_CLASS:
            return
        row.room_at = batcher
        self._rows[batcher, row.line][row.task.tenant] += 1
        self._sizes[batcher, row.line][row.task.tenant] += row.size

    def free(self, row: SentRow) -> bool:
        """The row does not wait there any more; whether it took room."""
        if not row.room_at:
            return False
        place = row.room_at, row.line
        row.room_at = ""
        rows, sizes = self._rows[place], self._sizes[place]
        rows[row.task.tenant] -= 1
        sizes[row.task.tenant] -= row.size
        if not rows[row.task.tenant]:
            del rows[row.task.tenant], sizes[row.task.tenant]
        if not rows:
            del self._rows[place], self._sizes[place]
        return True

    def fits(self, row: SentRow, batcher: str, room: Room) -> bool:
        """Whether the row has room at a batcher: of the whole, or of its tenant's share."""
        place = batcher, row.line
        if place not in self._rows:
            return True
        rows, sizes = self._rows[place], self._sizes[place]
        if rows.total() < room.rows and sizes.total() + row.size <= room.size:
            return True
        share = self._weight(row.task.tenant) / sum(map(self._weight, {*rows, row.task.tenant}))
        few = rows[row.task.tenant] + 1 <= share * room.rows
        return few and sizes[row.task.tenant] + row.size <= share * room.size

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)


class WaitingLine:
    """Rows of one line that wait, tenants in turn: by start-time fair queueing, where each row costs 1 / weight.

    Rows that a batcher had before go before others of their tenant, both in the order in which they came.

    Attributes:
        freed: there may be room for some of them.
        without_since: since when there was no batcher for them; infinity: there is one.
    """

    freed = False
    without_since = inf

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._rows: dict[str, deque[SentRow]] = {}
        self._again: Counter[str] = Counter()
        """How many at the head of a tenant's rows a batcher had before."""
        self._turns: dict[str, float] = {}
        """When the next row of each tenant has its turn."""
        self._reached = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def __iter__(self) -> Iterator[SentRow]:
        """All rows, those of a tenant in their order."""
        return (row for rows in self._rows.values() for row in rows)

    @property
    def since(self) -> float:
        """Since when the one waits that has waited longest, as far as they wait in order; infinity: none does."""
        heads = [rows[0] for rows in list(self._rows.values()) if rows]
        return min((row.waits_since for row in heads), default=inf)

    def add(self, row: SentRow) -> None:
        """A row waits."""
        rows = self._rows.setdefault(row.task.tenant, deque())
        if not rows:
            self._turns[row.task.tenant] = max(self._turns.get(row.task.tenant, 0.0), self._reached)
        rows.insert(self._again[row.task.tenant] if row.was_sent else len(rows), row)
        self._again[row.task.tenant] += row.was_sent

    def remove(self, row: SentRow) -> None:
        """A row does not wait any more."""
        rows = self._rows[row.task.tenant]
        rows.remove(row)
        self._again[row.task.tenant] -= row.was_sent
        if not rows:
            del self._rows[row.task.tenant], self._again[row.task.tenant]
            if not self._rows:
                self._turns.clear()

    def of(self, tenant: str) -> bool:
        """Whether rows of a tenant wait."""
        return tenant in self._rows

    def heads(self) -> list[SentRow]:
        """The first row of each tenant, that whose turn it is first."""
        return [self._rows[tenant][0] for tenant in sorted(self._rows, key=self._turns.__getitem__)]

    def served(self, row: SentRow) -> None:
        """A row leaves because it was its turn."""
        self._reached = self._turns[row.task.tenant]
        self._turns[row.task.tenant] += 1 / self._weights.get(row.task.tenant, 1.0)
        self.remove(row)
