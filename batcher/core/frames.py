"""Rules for frames: what a worker's frame adds to a row, what answers a `Resend`, and how frames share a message."""

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Final

from batcher.core.rows import Row
from sluice.internal.v1 import frame_pb2
from sluice.wire.codec import MAX_MESSAGE_BYTES

RESEND_TOKENS_MAX: Final = 4096
"""Tokens in one frame of an answer to `Resend`; with log-probabilities a frame of 256 stays far below 1 MiB too."""
RESEND_LOGPROBS_MAX: Final = 256

BUNDLE_BYTES_MAX: Final = MAX_MESSAGE_BYTES - 4096
"""Frames in one bundle; the rest is for its own fields and for length prefixes."""


class Merge(Enum):
    """What a worker's frame is to its row."""

    NEW = "new"
    """It goes on where the row stands."""
    DUPLICATE = "duplicate"
    """Everything in it is known."""
    STALE = "stale"
    """It belongs to an earlier attempt."""
    GAP = "gap"
    """Tokens between the row and the frame are missing."""


def classify(row: Row, frame: frame_pb2.Frame) -> Merge:
    """What ``frame`` is to ``row``."""
    if frame.attempt != row.attempt:
        return Merge.STALE
    known = len(row.produced)
    if frame.start_index > known:
        return Merge.GAP
    if frame.start_index + len(frame.token_ids) <= known and not frame.HasField("final"):
        return Merge.DUPLICATE
    return Merge.NEW


def merge(row: Row, frame: frame_pb2.Frame) -> frame_pb2.Frame:
    """Adds a `Merge.NEW` frame to ``row``; returns it without the head that was known."""
    known = len(row.produced) - frame.start_index
    if known:
        frame = _without_head(frame, known)
    row.extend(frame.token_ids, frame.logprobs)
    return frame


def final_frame(row: Row) -> frame_pb2.Frame:
    """The end of ``row`` behind all its tokens."""
    assert row.final is not None
    return frame_pb2.Frame(
        request_id=row.id, attempt=row.attempt, start_index=len(row.produced), final=row.final
    )


def resend(row: Row, from_index: int) -> list[frame_pb2.Frame]:
    """Frames from ``from_index`` to what ``row`` has, its final included; empty when there is nothing.

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
        request_id=row.id,
        attempt=row.attempt,
        start_index=start,
        token_ids=row.produced[start:end],
        logprobs=row.logprobs[start - row.base : end - row.base],
    )
