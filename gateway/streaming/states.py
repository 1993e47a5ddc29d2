"""The life of one request inside the gateway, and the moves that are legal."""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final


class StreamState(Enum):
    """Where a request stands."""

    PUBLISHING = auto()
    """The task is on its way to JetStream."""
    WAITING = auto()
    """JetStream has the task; no frame came yet."""
    STREAMING = auto()
    """Frames come."""
    CHECKING = auto()
    """The row has ended; the answer waits for the verdicts of guards."""
    FINISHED = auto()
    """The answer is complete."""
    FAILED = auto()
    """It ended with an error: the caller left, the deadline passed, the engine failed."""


# A batcher can be quicker than JetStream's acknowledgement: frames, and even the last one, may come while publishing.
# Where a second model takes over, its task is published.
LEGAL_MOVES: Final[Mapping[StreamState, frozenset[StreamState]]] = {
    StreamState.PUBLISHING: frozenset(
        {
            StreamState.PUBLISHING,
            StreamState.WAITING,
            StreamState.STREAMING,
            StreamState.CHECKING,
            StreamState.FINISHED,
            StreamState.FAILED,
        }
    ),
    StreamState.WAITING: frozenset(
        {
            StreamState.PUBLISHING,
            StreamState.STREAMING,
            StreamState.CHECKING,
            StreamState.FINISHED,
            StreamState.FAILED,
        }
    ),
    StreamState.STREAMING: frozenset(
        {
            StreamState.PUBLISHING,
            StreamState.CHECKING,
            StreamState.FINISHED,
            StreamState.FAILED,
        }
    ),
    StreamState.CHECKING: frozenset(
        {StreamState.PUBLISHING, StreamState.FINISHED, StreamState.FAILED}
    ),
    StreamState.FINISHED: frozenset(),
    StreamState.FAILED: frozenset(),
}
