"""Frames: merge what workers send, answer gateways that miss tokens, and pack messages."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from batcher.core.queued_request import QueuedRequest, RequestState
from batcher.core.workers import ChannelBroken
from sluice.internal.v1 import frame_pb2
from sluice.wire.codec import BUNDLE_FRAMES_MAX, MAX_MESSAGE_BYTES

RESEND_TOKENS_MAX: Final = 256
"""Tokens in one frame for a gateway that misses tokens; stays far below NATS's 1 MiB even with
log-probabilities."""

BUNDLE_BYTES_MAX: Final = MAX_MESSAGE_BYTES - 4096
"""Size of one bundle, in bytes: the limit of a message less a margin for its header."""


def merge(request: QueuedRequest, frame: frame_pb2.Frame) -> frame_pb2.Frame | None:
    """Add a worker's frame to its request and return the new part; None if nothing is new.

    Raises:
        ChannelBroken: tokens between the request and the frame are missing.
    """
    known_tokens = len(request.produced) - frame.start_index
    if known_tokens < 0:
        raise ChannelBroken("frames are missing")
    if known_tokens:
        if known_tokens >= len(frame.token_ids) and not frame.HasField("final"):
            return None
        frame = part_of(frame, known_tokens, final=frame.HasField("final"))
    request.produced.extend(frame.token_ids)
    request.logprobs.extend(frame.logprobs)
    return frame


def final_frame(request: QueuedRequest) -> frame_pb2.Frame:
    """Return the final frame of a request, after all its tokens."""
    assert request.final is not None
    return frame_pb2.Frame(
        request_id=request.request_id,
        attempt=request.attempt,
        start_index=len(request.produced),
        final=request.final,
    )


def resend(
    request: QueuedRequest, from_index: int, tokens_max: int = RESEND_TOKENS_MAX
) -> list[frame_pb2.Frame]:
    """Return frames with the tokens of a request from `from_index` on, then the final one if it has ended.

    Tokens below `request.base` came from the gateway itself and are not sent back to it.
    """
    frames = [
        frame_pb2.Frame(
            request_id=request.request_id,
            attempt=request.attempt,
            start_index=start,
            token_ids=request.produced[start : start + tokens_max],
            logprobs=request.logprobs[start - request.base : start - request.base + tokens_max],
        )
        for start in range(max(from_index, request.base), len(request.produced), tokens_max)
    ]
    return frames if request.final is None else [*frames, final_frame(request)]


def pack_bundles(
    batcher: str, frames: Sequence[frame_pb2.Frame], task_refs: Sequence[frame_pb2.TaskRef]
) -> list[frame_pb2.FrameBundle]:
    """Pack frames and acknowledgements for one gateway, in order, into messages that NATS accepts.

    A single frame is never split: its message may be too large.
    """
    bundle = frame_pb2.FrameBundle(batcher=batcher, frames=frames, pending=task_refs)
    # Halve what NATS would refuse; order within a request is kept, because halves are sent in order.
    few = max(len(frames), len(task_refs)) <= BUNDLE_FRAMES_MAX
    if (few and bundle.ByteSize() <= BUNDLE_BYTES_MAX) or len(frames) + len(task_refs) < 2:
        return [bundle]
    half, refs_half = (len(frames) + 1) // 2, len(task_refs) // 2
    return [
        *pack_bundles(batcher, frames[:half], task_refs[:refs_half]),
        *pack_bundles(batcher, frames[half:], task_refs[refs_half:]),
    ]


def part_of(frame: frame_pb2.Frame, known_tokens: int = 0, *, final: bool) -> frame_pb2.Frame:
    """Return a frame without its first `known_tokens` tokens, with its end if `final`."""
    return frame_pb2.Frame(
        request_id=frame.request_id,
        attempt=frame.attempt,
        start_index=frame.start_index + known_tokens,
        token_ids=frame.token_ids[known_tokens:],
        logprobs=frame.logprobs[known_tokens:],
        final=frame.final if final else None,
    )


@dataclass
class _ForGateway:
    frames: list[frame_pb2.Frame] = field(default_factory=list)
    unacknowledged: list[QueuedRequest] = field(default_factory=list)


class Outbox:
    """Messages that wait for `take`: acknowledgements, and frames in order. Gateways take urgent frames first."""

    def __init__(self, batcher: str) -> None:
        self._batcher = batcher
        self._gateways = defaultdict[str, _ForGateway](_ForGateway)
        self._resends: dict[str, tuple[QueuedRequest, int]] = {}

    def __bool__(self) -> bool:
        """Return whether there is anything to send."""
        return bool(self._gateways or self._resends)

    def acknowledge(self, request: QueuedRequest) -> None:
        """Queue an acknowledgement that this batcher has the request; dropped if the request ends before `take`."""
        self._gateways[request.task.gateway].unacknowledged.append(request)

    def publish(self, request: QueuedRequest, frame: frame_pb2.Frame) -> None:
        """Queue a frame for the request's gateway."""
        self._gateways[request.task.gateway].frames.append(frame)

    def forget(self, request: QueuedRequest) -> None:
        """Drop what `resend` queued for a request."""
        self._resends.pop(request.request_id, None)

    def resend(self, request: QueuedRequest, from_index: int) -> None:
        """Queue the frames that the gateway misses, from an index on."""
        # Several queries before one send: the earliest index covers all of them.
        _, earlier = self._resends.get(request.request_id, (request, from_index))
        self._resends[request.request_id] = (request, min(earlier, from_index))

    def take(self) -> list[tuple[str, frame_pb2.FrameBundle]]:
        """Return gateway and message for everything since the last call: new frames in order, then the resent ones."""
        # Once for all queries: an answer may be long, and a gateway that lost many frames asks often.
        for request, from_index in self._resends.values():
            for frame in resend(request, from_index):
                self.publish(request, frame)
        self._resends.clear()
        bundles = []
        for gateway, messages in self._gateways.items():
            pending = [r.ref for r in messages.unacknowledged if r.state < RequestState.ENDED]
            packed = pack_bundles(self._batcher, messages.frames, pending)
            bundles += [(gateway, bundle) for bundle in packed]
        self._gateways.clear()
        return bundles
