"""The rows that this gateway sends, and the room that batchers give it for them.

A batcher says in its reports how many rows of a class, and how many bytes of their tasks, one gateway may have there
without a frame. The gateway counts its own rows, so a report that is lost, doubled or late neither makes nor loses
room. Interactive rows take none, and never wait. Inside a class tenants take turns by weight, and one that comes late
gets its share on top of what others have taken.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import NamedTuple

from gateway.streaming.row import Row
from sluice.fair_queue import FairQueue, Flow
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
        self.weights: Mapping[str, float] = {}
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


@dataclass(eq=False, slots=True)
class _Tenant(Flow):
    """A tenant in a wait queue.

    Attributes:
        rows: of it that wait, in order.
        again: how many at the head of `rows` a batcher had before.
    """

    rows: deque[SentRow] = field(default_factory=deque)
    again: int = 0


class WaitQueue:
    """Rows of one line that wait for room. Tenants share what comes: each row costs its tenant 1 by weight.

    Rows that a batcher had before go before others of their tenant, both in the order in which they came.

    Attributes:
        freed: there may be room for some of them.
        without_since: since when there was no batcher for them; infinity: there is one.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Start empty, with the `weights` of tenants that differ from 1."""
        self.freed = False
        self.without_since = inf
        self._tenants = FairQueue[_Tenant](_Tenant, weights)
        self._begun = 0
        """How often a tenant has begun to wait."""

    def __len__(self) -> int:
        return sum(len(tenant.rows) for tenant in list(self._tenants))

    @property
    def since(self) -> float:
        """Since when the one waits that has waited longest, as far as they wait in order; infinity: none does."""
        heads = [tenant.rows[0] for tenant in list(self._tenants) if tenant.rows]
        return min((row.waits_since for row in heads), default=inf)

    def use_weights(self, weights: Mapping[str, float]) -> None:
        """Share by other weights from now on."""
        self._tenants.use_weights(weights)

    def add(self, row: SentRow) -> None:
        """Let a row wait."""
        tenant = self._tenants.flow(row.task.tenant)
        tenant.rows.insert(tenant.again if row.was_sent else len(tenant.rows), row)
        tenant.again += row.was_sent
        if tenant.key is None:
            self._begun += 1
            self._tenants.activate(tenant)
            self._tenants.place(tenant, (0.0, self._begun))

    def remove(self, row: SentRow) -> None:
        """Let a row wait no more."""
        tenant = self._tenants.flow(row.task.tenant)
        tenant.rows.remove(row)
        tenant.again -= row.was_sent
        if not tenant.rows:
            self._tenants.place(tenant, None)

    def has(self, tenant: str) -> bool:
        """Return whether rows of a tenant wait."""
        flow = self._tenants.flows.get(tenant)
        return flow is not None and bool(flow.rows)

    def heads(self) -> list[SentRow]:
        """Return the first row of each tenant, that whose turn it is first."""
        return [tenant.rows[0] for tenant in self._tenants]

    def serve(self, row: SentRow) -> None:
        """Let a row leave because it was its turn."""
        tenant = self._tenants.flow(row.task.tenant)
        self._tenants.serve(tenant)
        self._tenants.charge(tenant, 1.0)
        self.remove(row)
