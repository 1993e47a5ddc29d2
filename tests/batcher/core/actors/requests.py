"""What travels through the world: tasks in JetStream, requests at their gateway."""

from dataclasses import dataclass
from typing import Final

from gateway.streaming.dispatch import SentRow
from sluice.internal.v1 import task_pb2

LATE: Final = -1
"""The end of a request whose deadline passed at its gateway."""


def token(request_id: str, index: int) -> int:
    """What the model draws."""
    return (int(request_id[1:]) * 31 + index * 7) % 1000


@dataclass
class Message:
    """A task in JetStream."""

    task: task_pb2.Task
    sequence: int
    deliver_at: float


@dataclass
class Request:
    """A request at its gateway."""

    row: SentRow
    has_deadline: bool
    end: int = 0
    cancelled: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.row.attempt.transcript.token_ids

    @property
    def waiting(self) -> bool:
        return not self.end and not self.cancelled
