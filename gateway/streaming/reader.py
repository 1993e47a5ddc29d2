"""A call that reads an answer, and the request that the answer is for."""

from collections.abc import Callable
from typing import Protocol

from gateway.identity.resume_token import ResumeToken
from gateway.streaming.row_result import RowRequest
from sluice.errors import SluiceError
from sluice.internal.v1.frame_pb2 import RowTimings
from sluice.v1.inference_pb2 import Started, Timings


class AnsweredRequest(RowRequest, Protocol):
    """The request that an answer is for.

    Attributes:
        key: its idempotency key; empty without one.
        fingerprint: equal for equal requests.
        with_logprobs: whether callers get log-probabilities.
    """

    key: str
    fingerprint: bytes
    with_logprobs: bool

    def timings(self, row: RowTimings, first_token_at: float, now: float) -> Timings:
        """The timings of an answer that ends ``now``."""

    def started(self) -> Started:
        """The first event of the answer, of the model that is asked first."""

    def resume_token(self, model: str) -> ResumeToken:
        """The resume token at the beginning of an answer of ``model``."""


class Reader:
    """The position of one call in an answer.

    The number of unread tokens is bounded by ``limit``. A single arrival that is larger than that (a catch-up after a
    loss, the part of an answer that existed when the call came) is not the reader's fault, so only tokens count that
    came after the arrival that found it idle.

    Attributes:
        index: tokens read so far.
        notices: notices read so far.
        wake: called when there is something to read.
        stop: called with the error that ends the call, which may be waiting for a client that does not read.
        displaced_by: the error that ends this call although the answer may go on for another one.
    """

    def __init__(
        self,
        index: int,
        limit: int,
        wake: Callable[[], None],
        stop: Callable[[SluiceError], None] = lambda _: None,
    ) -> None:
        self.index = index
        self.notices = 0
        self.wake = wake
        self.stop = stop
        self.displaced_by: SluiceError | None = None
        self._limit = limit
        self._burst = 0

    def grew(self, before: int, total: int) -> bool:
        """The answer grew from ``before`` to ``total`` tokens in one arrival; whether more than the limit is unread."""
        if self.index >= before:
            self._burst = total - before
        return total - self.index - self._burst > self._limit

    def displace(self, error: SluiceError) -> None:
        """The call ends with ``error``; another one reads instead."""
        self.displaced_by = error
        self.stop(error)

    def advance(self, total: int) -> None:
        """The call has read everything up to ``total``."""
        self.index = max(self.index, total)
        self._burst = 0
