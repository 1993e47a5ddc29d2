"""The states of a result or an answer stream.

Frames, even the last one, may arrive before the batcher's word that it has the task. Only
`gateway.streaming.result_collector` and `gateway.streaming.answer_stream` import this: nothing else changes a state.
"""

from enum import Enum, auto
from typing import Final


class StreamState(Enum):
    """The state of a request."""

    PUBLISHING = auto()
    """The task is on its way to a batcher."""
    WAITING = auto()
    """A batcher has the task; no frame has arrived yet."""
    STREAMING = auto()
    """Frames arrive."""
    CHECKING = auto()
    """The run has ended; the answer waits for the verdicts of guards."""
    FINISHED = auto()
    """The answer is complete."""
    FAILED = auto()
    """It ended with an error: the caller left, the deadline passed, the engine failed."""


ENDED: Final = frozenset({StreamState.FINISHED, StreamState.FAILED})
