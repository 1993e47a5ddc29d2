"""What travels through the world: tasks in the work queue, requests at their gateway."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice.internal.v1 import task_pb2

if TYPE_CHECKING:
    from tests.batcher.core.actors.shell import Shell


def token(request_id: str, index: int) -> int:
    """What the model draws."""
    return (int(request_id[1:]) * 31 + index * 7) % 1000


@dataclass
class Message:
    """A task in the work queue."""

    task: task_pb2.Task
    deliveries: int = 0
    owner: Shell | None = None
    progress_at: float = 0.0


@dataclass
class Request:
    """A request at its gateway."""

    task: task_pb2.Task
    tokens: list[int] = field(default_factory=list)
    attempt: int = 0
    end: int = 0
    cancelled: bool = False
    heard_at: float = 0.0

    @property
    def waiting(self) -> bool:
        return not self.end and not self.cancelled
