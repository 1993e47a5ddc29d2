"""The life cycle of one answer: its states, the legal moves between them, and the times that are reported."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from gateway.streaming.resume_token import ResumeToken
from sluice.errors import SluiceError
from sluice.internal.v1.frame_pb2 import RowTimings
from sluice.v1.inference_pb2 import Finished, FinishReason, Started, Timings
from sluice.wire.clock import duration


class StreamState(Enum):
    """The state of a request."""

    PUBLISHING = auto()
    """The task is on its way to a batcher, or to JetStream."""
    WAITING = auto()
    """A batcher or JetStream has the task; no frame has arrived yet."""
    STREAMING = auto()
    """Frames arrive."""
    CHECKING = auto()
    """The row has ended; the answer waits for the verdicts of guards."""
    FINISHED = auto()
    """The answer is complete."""
    FAILED = auto()
    """It ended with an error: the caller left, the deadline passed, the engine failed."""


_ENDED: Final = frozenset({StreamState.FINISHED, StreamState.FAILED})
_AFTER_STREAMING: Final = _ENDED | {StreamState.PUBLISHING, StreamState.CHECKING}

# Frames, even the last one, may arrive before the word that the task was taken.
# When another model takes over, its task is published: every live state may return to PUBLISHING.
LEGAL_MOVES: Final[Mapping[StreamState, frozenset[StreamState]]] = {
    StreamState.PUBLISHING: frozenset(StreamState),
    StreamState.WAITING: _AFTER_STREAMING | {StreamState.STREAMING},
    StreamState.STREAMING: _AFTER_STREAMING,
    StreamState.CHECKING: _ENDED | {StreamState.PUBLISHING},
    StreamState.FINISHED: frozenset(),
    StreamState.FAILED: frozenset(),
}


@dataclass
class RequestTimings:
    """Time spent in the gateway, milliseconds; the rest of `Timings` comes with the final frame."""

    arrived_at: float
    """On the clock of ``now``, seconds."""
    safety_ms: float = 0.0
    route_ms: float = 0.0
    tokenize_ms: float = 0.0
    publish_ms: float = 0.0

    def with_row(self, row: RowTimings, first_token_at: float, now: float) -> Timings:
        """The timings of an answer that ends ``now``."""
        return Timings(
            safety=duration(self.safety_ms),
            route=duration(self.route_ms),
            tokenize=duration(self.tokenize_ms),
            publish=duration(self.publish_ms),
            queue=duration(row.queue_ms),
            batch=duration(row.batch_ms),
            prefill=duration(row.prefill_ms),
            decode=duration(row.decode_ms),
            time_to_first_token=duration((first_token_at - self.arrived_at) * 1000),
            total=duration((now - self.arrived_at) * 1000),
        )


@dataclass(frozen=True)
class StreamSpec:
    """What is fixed about a stream when its request is admitted."""

    started: Started
    deadline: float
    """On the clock of ``now``, seconds."""
    with_logprobs: bool
    timings: RequestTimings
    tenant: str = ""
    priority_class: str = ""
    key: str = ""
    """Idempotency key, empty without one."""
    fingerprint: bytes = b""
    """Equal for equal requests."""
    resume_token: Callable[[str], ResumeToken] | None = None
    """The resume token of an answer of the named model; None: no caller reads the answer."""


class Lifecycle:
    """State of one answer; `Stream` is the only subclass and makes the moves.

    Attributes:
        state: see `StreamState`.
        error: why it failed, in state FAILED.
        finished: how it ended, in state FINISHED.
        first_frame_at: when the first frame arrived, seconds.
        first_token_at: when there was something to show for the first time, seconds.
    """

    def __init__(self) -> None:
        self.state = StreamState.PUBLISHING
        self.error: SluiceError | None = None
        self.finished: Finished | None = None
        self.first_frame_at: float | None = None
        self.first_token_at: float | None = None
        self._row_end: tuple[FinishReason.ValueType, RowTimings] | None = None
        """How the answer ends if no guard objects, in state CHECKING."""

    @property
    def ended(self) -> bool:
        """Whether the answer is complete or failed."""
        return self.state in _ENDED

    @property
    def row_ended(self) -> bool:
        """Whether no row computes the answer any more."""
        return self.ended or self.state is StreamState.CHECKING

    def _set_published(self) -> None:
        if self.state is StreamState.PUBLISHING:
            self._move(StreamState.WAITING)

    def _set_frame_arrived(self, *, with_tokens: bool, now: float) -> None:
        if self.first_frame_at is None:
            self.first_frame_at = now
        if with_tokens and self.state is not StreamState.STREAMING:
            self._move(StreamState.STREAMING)

    def _set_shown(self, now: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now

    def _move(self, target: StreamState) -> None:
        assert target in LEGAL_MOVES[self.state], f"{self.state.name} to {target.name}"
        self.state = target
