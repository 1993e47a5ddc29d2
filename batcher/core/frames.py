"""Frames: merges workers' frames into rows, answers `Resend`, packs frames into messages, and keeps final frames in an
outbox until their gateway confirms them.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Final

from batcher.core.row import Row
from sluice.internal.v1 import frame_pb2
from sluice.wire.codec import MAX_MESSAGE_BYTES

RESEND_TOKENS_MAX: Final = 4096
"""Tokens in one frame of an answer to `Resend`; with log-probabilities a frame of 256 stays far below 1 MiB too."""
RESEND_LOGPROBS_MAX: Final = 256

BUNDLE_BYTES_MAX: Final = MAX_MESSAGE_BYTES - 4096
"""Frames in one bundle; the rest is for its own fields and for length prefixes."""


FINAL_TRIES: Final = 6
"""The first sending of an end and five more."""


class Merge(Enum):
    """How a worker's frame relates to its row."""

    NEW = "new"
    """It continues at the row's next index."""
    DUPLICATE = "duplicate"
    """Everything in it is known."""
    STALE = "stale"
    """It belongs to an earlier attempt."""
    GAP = "gap"
    """Tokens between the row and the frame are missing."""


def classify(row: Row, frame: frame_pb2.Frame) -> Merge:
    """How ``frame`` relates to ``row``."""
    if frame.attempt != row.attempt:
        return Merge.STALE
    known = len(row.produced)
    if frame.start_index > known:
        return Merge.GAP
    if frame.start_index + len(frame.token_ids) <= known and not frame.HasField("final"):
        return Merge.DUPLICATE
    return Merge.NEW


def merge(row: Row, frame: frame_pb2.Frame) -> frame_pb2.Frame:
    """Adds a `Merge.NEW` frame to ``row``; returns it without the tokens that the row already has."""
    known = len(row.produced) - frame.start_index
    if known:
        frame = _without_head(frame, known)
    row.extend(frame.token_ids, frame.logprobs)
    return frame


def final_frame(row: Row) -> frame_pb2.Frame:
    """The final frame of ``row``, after all its tokens."""
    assert row.final is not None
    return frame_pb2.Frame(
        request_id=row.request_id,
        attempt=row.attempt,
        start_index=len(row.produced),
        final=row.final,
    )


def resend(row: Row, from_index: int) -> list[frame_pb2.Frame]:
    """Frames with the tokens of ``row`` from ``from_index``, the final frame included; empty when there are none.

    Tokens below ``row.base`` came from the gateway itself and are not sent back to it.
    """
    start = max(from_index, row.base)
    frames = [_piece(row, index, end) for index, end in _pieces(row, start)]
    if row.final is not None:
        if not frames:
            return [final_frame(row)]
        frames[-1].final.CopyFrom(row.final)
    return frames


def bundles(batcher: str, frames: Iterable[frame_pb2.Frame]) -> Iterator[frame_pb2.FrameBundle]:
    """Packs frames for one gateway, in order, into as few messages as their size allows."""
    bundle, size = frame_pb2.FrameBundle(batcher=batcher), 0
    for frame in frames:
        more = frame.ByteSize() + 8
        if bundle.frames and size + more > BUNDLE_BYTES_MAX:
            yield bundle
            bundle, size = frame_pb2.FrameBundle(batcher=batcher), 0
        bundle.frames.append(frame)
        size += more
    if bundle.frames:
        yield bundle


def _without_head(frame: frame_pb2.Frame, known: int) -> frame_pb2.Frame:
    rest = frame_pb2.Frame(
        request_id=frame.request_id,
        attempt=frame.attempt,
        start_index=frame.start_index + known,
        token_ids=frame.token_ids[known:],
        logprobs=frame.logprobs[known:],
    )
    if frame.HasField("final"):
        rest.final.CopyFrom(frame.final)
    return rest


def _pieces(row: Row, start: int) -> Iterator[tuple[int, int]]:
    most = RESEND_LOGPROBS_MAX if row.logprobs else RESEND_TOKENS_MAX
    for index in range(start, len(row.produced), most):
        yield index, min(index + most, len(row.produced))


def _piece(row: Row, start: int, end: int) -> frame_pb2.Frame:
    return frame_pb2.Frame(
        request_id=row.request_id,
        attempt=row.attempt,
        start_index=start,
        token_ids=row.produced[start:end],
        logprobs=row.logprobs[start - row.base : end - row.base],
    )


class Outbox:
    """Frames that wait to be sent, answers to `Resend`, and final frames until they are confirmed."""

    def __init__(self, final_retry_s: float) -> None:
        self._retry_s = final_retry_s
        self._frames: list[tuple[str, frame_pb2.Frame]] = []
        self._resends: dict[str, tuple[Row, int]] = {}
        # All ends wait equally long, so the order of entry is the order of time: row, when to repeat, tries.
        self._finals: OrderedDict[str, tuple[Row, float, int]] = OrderedDict()

    def publish(self, row: Row, frame: frame_pb2.Frame) -> None:
        """Sends a frame to the row's gateway."""
        self._frames.append((row.task.gateway, frame))

    def end(self, row: Row, now: float, frame: frame_pb2.Frame | None = None) -> None:
        """Sends the final frame of a row for the first time; ``frame`` is the worker's, if it sent one."""
        assert row.final is not None
        if frame is None:
            frame = final_frame(row)
        else:
            frame.final.CopyFrom(row.final)
        self.publish(row, frame)
        self._wait(row, now, tries=1)

    def unanswered(self, row: Row, now: float) -> None:
        """The gateway did not answer what it has of the row: it is asked again."""
        self._wait(row, now, FINAL_TRIES)

    def forget(self, row: Row) -> None:
        """The final frame of the row is confirmed, or no longer needed."""
        self._finals.pop(row.request_id, None)
        self._resends.pop(row.request_id, None)

    def resend(self, row: Row, from_index: int) -> None:
        """The gateway lacks frames from an index on."""
        _, known = self._resends.get(row.request_id, (row, from_index))
        self._resends[row.request_id] = (row, min(known, from_index))

    def repeat(self, now: float) -> Iterator[Row]:
        """Sends unconfirmed final frames again; returns the rows whose gateway is to be asked instead."""
        while (at := self.next_at()) is not None and at <= now:
            _, (row, _, tries) = self._finals.popitem(last=False)
            if tries < FINAL_TRIES:
                self.publish(row, final_frame(row))
                self._wait(row, now, tries + 1)
            else:
                yield row

    def next_at(self) -> float | None:
        """When `repeat` is due next."""
        return next(iter(self._finals.values()))[1] if self._finals else None

    def take(self) -> list[tuple[str, frame_pb2.Frame]]:
        """Gateway and frame, in order, since the last call."""
        # Once for all `Resend`s that came: an answer may be long, and a gateway that lost many frames asks often.
        for row, from_index in self._resends.values():
            for frame in resend(row, from_index):
                self.publish(row, frame)
        self._resends.clear()
        frames, self._frames = self._frames, []
        return frames

    def _wait(self, row: Row, now: float, tries: int) -> None:
        self._finals[row.request_id] = (row, now + self._retry_s, tries)
        self._finals.move_to_end(row.request_id)
