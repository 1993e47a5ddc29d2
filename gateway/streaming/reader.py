"""One call that reads an answer, and how far it has come."""

from collections.abc import Callable

from sluice.errors import SluiceError


class Reader:
    """The position of one call in a transcript.

    What waits for it is bounded by ``limit`` tokens. One arrival that is larger than that (a catch-up after a loss, the
    part of an answer that existed when the call came) is not the reader's fault, so it counts only what came after the
    arrival that found it idle.

    Attributes:
        index: tokens taken so far.
        notices: notices taken so far.
        displaced_by: the error that ends this call although the answer may go on for another one.
    """

    def __init__(self, index: int, limit: int, wake: Callable[[], None]) -> None:
        self.index = index
        self.notices = 0
        self.displaced_by: SluiceError | None = None
        self.wake = wake
        self._limit = limit
        self._burst = 0

    def attach(self, total: int) -> None:
        """The answer has ``total`` tokens already."""
        self._burst = total - self.index

    def grew(self, before: int, total: int) -> None:
        """The answer grew from ``before`` to ``total`` tokens."""
        if self.index >= before:
            self._burst = total - before

    def too_slow(self, total: int) -> bool:
        """Whether more than the limit waits."""
        return total - self.index - self._burst > self._limit

    def took(self, total: int) -> None:
        """The call has taken everything up to ``total``."""
        self.index = total
        self._burst = 0
