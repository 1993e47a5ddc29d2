"""Puts the frames of one request in order (docs/wire.md, Frames).

The rules, with ``next_index`` the number of tokens held:

- A frame of a lower attempt than the highest seen comes from an earlier owner of the row: dropped.
- A frame that ends at or below ``next_index`` and is not final is a duplicate: dropped.
- A frame that begins below and ends above loses the head that is known.
- A frame that begins above is a gap: dropped, and asked for again, once until ``next_index`` moves or ``stall_s``
  passes.
- Silence for ``stall_s`` is asked about too: the frame that got lost may have been the last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.internal.v1.frame_pb2 import Final, Frame, Logprobs


@dataclass(frozen=True)
class Taken:
    """What a frame added."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[Logprobs] = ()
    final: Final | None = None
    resend_from: int | None = None
    """Set when frames before this one are missing and should be asked for."""
    recovered: bool = False
    """The first frame of a later attempt: another process goes on with the row."""


_NOTHING = Taken()


class Assembler:
    """Order, duplicates, gaps and attempts of one request."""

    def __init__(self, next_index: int, stall_s: float, now: float) -> None:
        self.next_index = next_index
        self.attempt = 0
        self._stall_s = stall_s
        self._seen_any = False
        self._heard_at = now
        self._asked_at: float | None = None

    def take(self, frame: Frame, now: float) -> Taken:
        """What ``frame`` adds to the tokens held."""
        if frame.attempt < self.attempt:
            return _NOTHING
        recovered = self._seen_any and frame.attempt > self.attempt
        self.attempt, self._seen_any, self._heard_at = frame.attempt, True, now
        if frame.start_index > self.next_index:
            return Taken(resend_from=self._ask(now), recovered=recovered)
        return self._accept(frame, recovered)

    @property
    def heard(self) -> bool:
        """Whether a batcher has the row: a frame came."""
        return self._seen_any

    def overdue(self, now: float) -> int | None:
        """The index to ask for when nothing came for ``stall_s``, else None."""
        if now - self._heard_at < self._stall_s:
            return None
        return self._ask(now)

    def ask_now(self, now: float) -> int:
        """The index to ask for when frames are known to have been lost."""
        self._asked_at = now
        return self.next_index

    def _accept(self, frame: Frame, recovered: bool) -> Taken:
        known = self.next_index - frame.start_index
        token_ids = frame.token_ids[known:]
        if token_ids:
            self.next_index += len(token_ids)
            self._asked_at = None
        final = frame.final if frame.HasField("final") else None
        return Taken(token_ids, frame.logprobs[known:], final, None, recovered)

    def _ask(self, now: float) -> int | None:
        if self._asked_at is not None and now - self._asked_at < self._stall_s:
            return None
        return self.ask_now(now)
