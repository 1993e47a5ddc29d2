"""What the queue is told of a task."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueuedTask:
    """What the queue looks at; lengths in tokens."""

    request_id: str
    priority_class: str
    deadline: float = math.inf
    """Monotonic seconds."""
    tenant: str = "default"
    workload: str = ""
    """What the caller says the task is; answers of one workload tend to be of one length."""
    prompt_tokens: int = 1
    max_tokens: int = 1
    """Longest answer, what exists already included."""
    produced: int = 0
    """Tokens of the answer that exist already."""
    prefix: bytes = b""
    """Hash of the prompt's beginning; empty: not known."""
