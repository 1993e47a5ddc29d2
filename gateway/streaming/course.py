"""How one answer stands, when what of it came, and how it ended."""

from typing import Final

from gateway.streaming.states import LEGAL_MOVES, StreamState
from sluice.errors import SluiceError
from sluice.internal.v1.frame_pb2 import RowTimings
from sluice.v1.inference_pb2 import Finished, FinishReason

_ENDED: Final = frozenset({StreamState.FINISHED, StreamState.FAILED})


class Course:
    """The life of a stream.

    Attributes:
        state: where it stands (`StreamState`).
        error: why it failed, in state FAILED.
        finished: how it ended, in state FINISHED.
        first_frame_at: when the first frame came, seconds.
        first_token_at: when there was something to show for the first time, seconds.
        awaited: how the answer ends if no guard objects, in state CHECKING.
    """

    def __init__(self) -> None:
        self.state = StreamState.PUBLISHING
        self.error: SluiceError | None = None
        self.finished: Finished | None = None
        self.first_frame_at: float | None = None
        self.first_token_at: float | None = None
        self.awaited: tuple[FinishReason.ValueType, RowTimings] | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing will be added."""
        return self.state in _ENDED

    @property
    def row_ended(self) -> bool:
        """Whether no row computes for it."""
        return self.ended or self.state is StreamState.CHECKING

    def published(self) -> None:
        """JetStream has the task."""
        if self.state is StreamState.PUBLISHING:
            self._move(StreamState.WAITING)

    def frame_came(self, *, tokens: bool, now: float) -> None:
        """Of the row whose answer it is; ``tokens``: with some."""
        if self.first_frame_at is None:
            self.first_frame_at = now
        if tokens and self.state is not StreamState.STREAMING:
            self._move(StreamState.STREAMING)

    def shown(self, now: float) -> None:
        """There is something to show."""
        if self.first_token_at is None:
            self.first_token_at = now

    def begin_anew(self) -> None:
        """Another row's answer it is from now on."""
        self.awaited = None
        self._move(StreamState.PUBLISHING)

    def check(self, reason: "FinishReason.ValueType", row: RowTimings) -> None:
        """The answer is complete, and waits for verdicts of guards."""
        self.awaited = reason, row
        self._move(StreamState.CHECKING)

    def fail(self, error: SluiceError) -> None:
        """It ends with ``error``."""
        self.error = error
        self._move(StreamState.FAILED)

    def finish(self, finished: Finished) -> None:
        """It ends as ``finished`` says."""
        self.finished = finished
        self._move(StreamState.FINISHED)

    def _move(self, target: StreamState) -> None:
        assert target in LEGAL_MOVES[self.state], f"{self.state.name} to {target.name}"
        self.state = target
