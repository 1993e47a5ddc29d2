"""A row that somebody waits for, as the gateway sends it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from gateway.streaming.row import Row
from sluice.internal.v1.task_pb2 import Task


class Line(NamedTuple):
    """Rows of one class of one model wait in one line."""

    model: str
    priority_class: str


class Place(Enum):
    """Where a row is, as far as is known."""

    NOWHERE = auto()
    """No batcher could be found for it."""
    WAITING = auto()
    """In this gateway, until a batcher has room for it."""
    SENT = auto()
    """On its way to its batcher."""
    HELD = auto()
    """Its batcher has it."""


@dataclass(eq=False, slots=True)
class SentRow:
    """A row that somebody waits for.

    Attributes:
        task: as sent last.
        headers: of its message.
        attempt: its tokens.
        deadline: seconds.
        batcher: that has it, or had it last; empty: none.
        was_sent: a batcher may have it, or may have had it.
        was_held: a batcher has said that it has it: it waits for a worker until its deadline.
        needs_room: whether it waits for room: once a batcher has taken it, it goes elsewhere without.
        room_at: the batcher whose room it takes; empty: none.
        size: of its task, bytes.
        ask_at: when to ask about it, or to try again.
        questions: asked since the last word about it, and the time of the first of them.
        without_since: since when it is known to be without a batcher.
        tokens: that had arrived when it was sent last.
        resends: since the last new token.
        on_taken: called once, when a batcher has it, or nobody waits for it any more.
    """

    task: Task
    headers: Mapping[str, str]
    attempt: Row
    deadline: float
    place: Place = Place.NOWHERE
    batcher: str = ""
    was_sent: bool = False
    was_held: bool = False
    needs_room: bool = True
    room_at: str = ""
    size: int = 0
    ask_at: float = 0.0
    questions: int = 0
    asked_at: float = 0.0
    without_since: float | None = None
    tokens: int = 0
    resends: int = 0
    on_taken: Callable[[], None] | None = None

    @property
    def row_id(self) -> str:
        """Its name."""
        return self.task.request_id

    @property
    def line(self) -> Line:
        """Its model and class."""
        return Line(self.task.model, self.task.priority_class)

    @property
    def tenant(self) -> str:
        """The tenant that its room is counted for."""
        return self.task.tenant

    @property
    def has_tokens(self) -> bool:
        """Whether something of the answer has arrived."""
        return bool(self.attempt.token_ids)

    def taken(self) -> None:
        """It has left this gateway."""
        on_taken, self.on_taken = self.on_taken, None
        if on_taken is not None:
            on_taken()
