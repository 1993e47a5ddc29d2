"""A row that somebody waits for, as the gateway sends it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
        was_held: a batcher has said that it has it: it waits for a worker until its deadline.
        needs_room: whether it waits for room: once a batcher has taken it, it goes elsewhere without.
        room_at: the batcher whose room it takes; empty: none.
        size: of its task, bytes.
        ask_at: when to ask about it, or to try again.
        questions: asked since the last word about it, and the time of the first of them.
        outlived: its batcher has answered a question about it: the row does not end batchers.
        sent_at: when it was to be sent for the first time.
        tokens: that had arrived when it was sent last.
        losses: of a worker or a batcher that had it, in succession without a new token.
        on_taken: called once, when a batcher has it, or nobody waits for it any more.
        line: its model and class.
    """

    task: Task
    headers: Mapping[str, str]
    attempt: Row
    deadline: float
    place: Place = Place.NOWHERE
    batcher: str = ""
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
    line: Line = field(init=False)

    def __post_init__(self) -> None:
        self.line = Line(self.task.model, self.task.priority_class)

    @property
    def row_id(self) -> str:
        """Its name."""
        return self.task.request_id

    @property
    def tenant(self) -> str:
        """The tenant that its room is counted for."""
        return self.task.tenant

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
