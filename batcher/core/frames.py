"""Frames: merges workers' frames into rows, gives gateways what they lack, packs what they are told into messages."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from batcher.core.row import Row, RowState
from batcher.core.workers import ChannelBroken
from sluice.internal.v1 import frame_pb2
from sluice.wire.codec import BUNDLE_FRAMES_MAX, MAX_MESSAGE_BYTES
from sluice.wire.subjects import URGENT_CLASS

RESEND_TOKENS_MAX: Final = 256
"""Tokens in one frame for a gateway that lacks tokens; with log-probabilities too it stays far below 1 MiB."""

BUNDLE_BYTES_MAX: Final = MAX_MESSAGE_BYTES - 4096
"""Of one bundle, with a margin."""


def merge(row: Row, frame: frame_pb2.Frame) -> frame_pb2.Frame | None:
    """Adds a worker's frame to its row; returns what is new of it, None when nothing is.

    Raises:
        ChannelBroken: tokens between the row and the frame are missing.
    """
    known = len(row.produced) - frame.start_index
    if known < 0:
        raise ChannelBroken("frames are missing")
    if known:
        if known >= len(frame.token_ids) and not frame.HasField("final"):
            return None
        frame = _without_head(frame, known)
    row.produced.extend(frame.token_ids)
    row.logprobs.extend(frame.logprobs)
    return frame


def without_final(frame: frame_pb2.Frame) -> frame_pb2.Frame:
    """The tokens of a frame alone."""
    rest = frame_pb2.Frame()
    rest.CopyFrom(frame)
    rest.ClearField("final")
    return rest


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
    """Frames with the tokens of ``row`` from ``from_index``, then the final one; empty when there are none.

    Tokens below ``row.base`` came from the gateway itself and are not sent back to it.
    """
    frames = [
        frame_pb2.Frame(
            request_id=row.request_id,
            attempt=row.attempt,
            start_index=start,
            token_ids=row.produced[start : start + RESEND_TOKENS_MAX],
            logprobs=row.logprobs[start - row.base : start - row.base + RESEND_TOKENS_MAX],
        )
        for start in range(max(from_index, row.base), len(row.produced), RESEND_TOKENS_MAX)
    ]
    return frames if row.final is None else [*frames, final_frame(row)]


def bundles(
    batcher: str, frames: Sequence[frame_pb2.Frame], held: Sequence[frame_pb2.TaskRef]
) -> list[frame_pb2.FrameBundle]:
    """Packs what one gateway is told, in order, into messages of a size that NATS takes."""
    bundle = frame_pb2.FrameBundle(batcher=batcher, frames=frames, pending=held)
    few = max(len(frames), len(held)) <= BUNDLE_FRAMES_MAX
    if (few and bundle.ByteSize() <= BUNDLE_BYTES_MAX) or len(frames) + len(held) < 2:
        return [bundle]
    rows, refs = len(frames) // 2, len(held) // 2
    return [
        *bundles(batcher, frames[:rows], held[:refs]),
        *bundles(batcher, frames[rows:], held[refs:]),
    ]


def _without_head(frame: frame_pb2.Frame, known: int) -> frame_pb2.Frame:
    return frame_pb2.Frame(
        request_id=frame.request_id,
        attempt=frame.attempt,
        start_index=frame.start_index + known,
        token_ids=frame.token_ids[known:],
        logprobs=frame.logprobs[known:],
        final=frame.final if frame.HasField("final") else None,
    )


class _ForGateway(NamedTuple):
    urgent: list[frame_pb2.Frame]
    others: list[frame_pb2.Frame]
    held: list[Row]


class Outbox:
    """What gateways are to be told: rows that this batcher has, and frames, those of urgent rows first."""

    def __init__(self, batcher: str) -> None:
        self._batcher = batcher
        self._gateways: dict[str, _ForGateway] = {}
        self._resends: dict[str, tuple[Row, int]] = {}

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self._gateways or self._resends)

    def hold(self, row: Row) -> None:
        """The batcher has the row, unless it ends before the gateway is told."""
        self._of(row).held.append(row)

    def publish(self, row: Row, frame: frame_pb2.Frame) -> None:
        """Sends a frame to the row's gateway."""
        lists = self._gateways.get(row.task.gateway) or self._of(row)
        (lists.urgent if row.priority_class == URGENT_CLASS else lists.others).append(frame)

    def forget(self, row: Row) -> None:
        """Nothing more is sent of the row."""
        self._resends.pop(row.request_id, None)

    def resend(self, row: Row, from_index: int) -> None:
        """The gateway lacks frames from an index on."""
        _, known = self._resends.get(row.request_id, (row, from_index))
        self._resends[row.request_id] = (row, min(known, from_index))

    def take(self) -> list[tuple[str, frame_pb2.FrameBundle]]:
        """Gateway and message since the last call, what is of a row in order."""
        # Once for all questions that came: an answer may be long, and a gateway that lost many frames asks often.
        for row, from_index in self._resends.values():
            for frame in resend(row, from_index):
                self.publish(row, frame)
        self._resends.clear()
        gateways, self._gateways = self._gateways, {}
        return [
            (gateway, bundle)
            for gateway, (urgent, others, held) in gateways.items()
            for bundle in bundles(
                self._batcher,
                urgent + others,
                [row.ref for row in held if row.state < RowState.ENDED],
            )
        ]

    def _of(self, row: Row) -> _ForGateway:
        return self._gateways.setdefault(row.task.gateway, _ForGateway([], [], []))
