"""What a row gives when nobody reads it as a stream: an embedding, a guard's verdict, a shadow, a chunk of audio.

An `gateway.streaming.answer.Answer` is a result that callers read, and that several rows may work on.
"""

from collections.abc import Callable, MutableMapping
from typing import Protocol

from gateway.streaming.dispatch import Dispatch
from gateway.streaming.row import Row
from gateway.streaming.state import ENDED, StreamState
from sluice.errors import SluiceError
from sluice.internal.v1.frame_pb2 import Frame
from sluice.v1.inference_pb2 import FinishReason


class RowRequest(Protocol):
    """Whose row it is, and how long it may take.

    Attributes:
        arrived_at: when the request came, seconds.
        deadline: when it fails, seconds.
    """

    tenant: str
    priority_class: str
    arrived_at: float
    deadline: float


class RowResult:
    """The result of one row, whose tokens nobody reads as they come.

    Attributes:
        request: what it is for.
        request_id: its name, which is that of its first row.
        state: how far it is.
        error: why it failed, in state FAILED.
        reason: why it is complete, in state FINISHED.
        attempts: the rows that worked on it, in the order in which they began.
        current: the last of them, whose result it is.
    """

    state = StreamState.PUBLISHING
    error: SluiceError | None = None
    reason: "FinishReason.ValueType | None" = None

    def __init__(
        self,
        request: RowRequest,
        row: Row,
        dispatch: Dispatch,
        waiting: "MutableMapping[str, RowResult]",
        on_end: Callable[[], None],
    ) -> None:
        """Waits for ``row``.

        Args:
            request: what it is for.
            row: which is sent next.
            dispatch: where its rows are.
            waiting: has an entry for every row of a result that has not ended.
            on_end: called once, with the end.
        """
        self.request = request
        self.request_id = row.row_id
        self.attempts: list[Row] = []
        self._dispatch = dispatch
        self._waiting = waiting
        self._on_end = on_end
        self._add(row)

    def _add(self, row: Row) -> None:
        self.current = row
        self.attempts.append(row)
        assert row.row_id not in self._waiting, "row ids are unique"
        self._waiting[row.row_id] = self

    @property
    def ended(self) -> bool:
        """Whether it is complete or failed."""
        return self.state in ENDED

    @property
    def taken(self) -> bool:
        """Whether a batcher had any of its rows: only then was something computed."""
        return any(row.taken for row in self.attempts)

    @property
    def row_ended(self) -> bool:
        """Whether no row is computed for it any more."""
        return self.ended or self.state is StreamState.CHECKING

    def published(self, row_id: str) -> None:
        """A batcher has the task of the row."""
        row = next(one for one in self.attempts if one.row_id == row_id)
        row.taken = True
        if row is self.current and self.state is StreamState.PUBLISHING:
            self._move(StreamState.WAITING)

    def row_failed(self, row_id: str, error: SluiceError) -> None:
        """A row cannot be answered: that is the end, if it is the current one."""
        if row_id == self.current.row_id:
            self.fail(error)

    def accept(self, frame: Frame, now: float) -> None:
        """Adds what is new in ``frame``."""
        accepted, row = self.current.accept(frame, now), self.current
        if accepted.token_ids and self.state is not StreamState.STREAMING:
            self._move(StreamState.STREAMING)
        if self._end_with_row(now):
            self._dispatch.release(row)
        elif accepted.gap:
            self._dispatch.ask(row.row_id)

    def _end_with_row(self, now: float) -> bool:
        """Ends when the current row has ended; whether it did."""
        outcome = self.current.outcome()
        if isinstance(outcome, SluiceError):
            self._end(outcome)
        elif outcome is not None:
            self.finish(outcome, now)
        return outcome is not None

    def finish(self, reason: "FinishReason.ValueType", now: float) -> None:
        """Ends complete: its row ended with ``reason``."""
        self._end(self.current.close(reason))

    def fail(self, error: SluiceError) -> None:
        """Ends with ``error``, unless it has ended; its row is cancelled."""
        if not self.ended:
            self._cancel_row()
            self._end(error)

    def _cancel_row(self) -> None:
        if not self.row_ended:
            self._dispatch.cancel(self.current.row_id)

    def _end(self, outcome: "FinishReason.ValueType | SluiceError") -> None:
        if isinstance(outcome, SluiceError):
            self.error = outcome
            self._move(StreamState.FAILED)
        else:
            self.reason = outcome
            self._move(StreamState.FINISHED)
        for row in self.attempts:
            del self._waiting[row.row_id]
        # It refers to the caller's call, which refers to this: without a circle nothing waits for a collection.
        on_end, self._on_end = self._on_end, _ended
        on_end()

    def _move(self, target: StreamState) -> None:
        assert not self.ended, "an end is final"
        self.state = target


def _ended() -> None:
    raise AssertionError("it ends once")
