"""Puts the frames of one request in order (docs/internals/wire.md, Frames).

The rules, with ``next_index`` the number of tokens held:

- A frame of a lower attempt than the highest seen comes from an earlier owner of the row: dropped.
- A frame that ends at or below ``next_index`` and is not final is a duplicate: dropped.
- A frame that begins below and ends above loses the head that is known.
- A frame that begins above is a gap: it is dropped, and the missing frames are requested, once until ``next_index``
  moves or ``stall_s`` passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from sluice.internal.v1.frame_pb2 import Final, Frame, Logprobs
from sluice.wire.attempts import task_attempt


@dataclass(frozen=True)
class AcceptedFrame:
    """What was new in a frame."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[Logprobs] = ()
    final: Final | None = None
    gap: bool = False
    """Set when frames before this one are missing and must be requested."""
    recovered: bool = False
    """The first frame of a later attempt: another process continues the row."""


_NOTHING_NEW = AcceptedFrame()


class Assembler:
    """Order, duplicates, gaps and attempts of one row.

    Attributes:
        next_index: number of tokens held.
        attempt: the highest seen; frames of lower ones are dropped.
        has_frames: whether a frame has arrived, so a batcher has the row.
        sent_at: when the row was sent, seconds.
        last_token_at: when tokens, or the values that were wanted, arrived last, seconds.
        recoveries: how often another process continued the row.
        recovered_gap_s: the longest time without a token because of that.
        recovered_task: whether it was the task that was sent again last: its batcher was lost, else its worker.
    """

    def __init__(self, next_index: int, stall_s: float, now: float) -> None:
        self.next_index = next_index
        self.attempt = 0
        self._stall_s = stall_s
        self.has_frames = False
        self.sent_at = now
        self.last_token_at = -inf
        self.recoveries = 0
        self.recovered_gap_s = 0.0
        self.recovered_task = False
        self._from_attempt = 0
        """That of the last frame that was accepted."""
        self._requested_at: float | None = None

    def fence(self, attempt: int) -> None:
        """Drops frames of attempts below ``attempt`` from now on."""
        self.attempt, self._requested_at = max(self.attempt, attempt), None

    def accept(self, frame: Frame, now: float) -> AcceptedFrame:
        """What is new in ``frame``."""
        if frame.attempt < self.attempt:
            return _NOTHING_NEW
        recovered = self.has_frames and frame.attempt > self._from_attempt
        if recovered:
            self._note_recovery(frame.attempt, now)
        self.attempt = self._from_attempt = frame.attempt
        self.has_frames = True
        if frame.start_index > self.next_index:
            return AcceptedFrame(gap=self._request(now), recovered=recovered)
        known = self.next_index - frame.start_index
        token_ids = frame.token_ids[known:]
        if frame.final.values:
            self.last_token_at = now
        if token_ids:
            self.next_index += len(token_ids)
            self._requested_at, self.last_token_at = None, now
        final = frame.final if frame.HasField("final") else None
        return AcceptedFrame(token_ids, frame.logprobs[known:], final, False, recovered)

    def _note_recovery(self, attempt: int, now: float) -> None:
        self.recoveries += 1
        self.recovered_task = task_attempt(attempt) > task_attempt(self._from_attempt)
        gap_s = now - max(self.last_token_at, self.sent_at)
        self.recovered_gap_s = max(self.recovered_gap_s, gap_s)

    def _request(self, now: float) -> bool:
        if self._requested_at is not None and now - self._requested_at < self._stall_s:
            return False
        self._requested_at = now
        return True
