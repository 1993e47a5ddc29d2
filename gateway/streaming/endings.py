"""How rows end, in the words of the public API."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sluice import errors
from sluice.errors import InvalidRequest, SluiceError
from sluice.internal.v1 import frame_pb2
from sluice.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FinishReason,
    Timings,
)
from sluice.wire.clock import duration

RETRY_AFTER_S: Final = 1.0
"""When to try again what failed for want of capacity, seconds."""

_REASONS: Final[Mapping[int, "FinishReason.ValueType"]] = {
    frame_pb2.ROW_END_STOP: FINISH_REASON_STOP,
    frame_pb2.ROW_END_LENGTH: FINISH_REASON_LENGTH,
}


@dataclass
class Hops:
    """When and how long the hops of the gateway took; the rest of `Timings` comes with the final frame."""

    arrived_at: float
    """On the clock of ``now``, seconds."""
    safety_ms: float = 0.0
    route_ms: float = 0.0
    tokenize_ms: float = 0.0
    publish_ms: float = 0.0


def finish_reason_of(end: "frame_pb2.RowEnd.ValueType") -> "FinishReason.ValueType | None":
    """The reason of a complete answer; None when ``end`` is an error."""
    return _REASONS.get(end)


def error_of(final: frame_pb2.Final) -> SluiceError:
    """The error that a row ended with."""
    if final.end == frame_pb2.ROW_END_DEADLINE:
        return errors.DeadlinePassed("the deadline passed before the answer was complete")
    if final.end == frame_pb2.ROW_END_CANCELLED:
        return errors.Cancelled("the request was cancelled")
    kind = errors.BY_REASON.get(final.error.reason)
    if kind is None:
        refused = final.end == frame_pb2.ROW_END_REFUSED
        kind = errors.Overloaded if refused else errors.EngineFailed
    retryable = kind.code in (errors.Overloaded.code, errors.ModelUnavailable.code)
    return kind(
        final.error.message or "the row ended without an answer",
        retry_after_s=RETRY_AFTER_S if retryable else None,
    )


def timings_of(hops: Hops, row: frame_pb2.RowTimings, first_at: float, now: float) -> Timings:
    """Where the time went; ``first_at`` is when the first token came, or the end without one."""
    return Timings(
        safety=duration(hops.safety_ms),
        route=duration(hops.route_ms),
        tokenize=duration(hops.tokenize_ms),
        publish=duration(hops.publish_ms),
        queue=duration(row.queue_ms),
        batch=duration(row.batch_ms),
        prefill=duration(row.prefill_ms),
        decode=duration(row.decode_ms),
        time_to_first_token=duration((first_at - hops.arrived_at) * 1000),
        total=duration((now - hops.arrived_at) * 1000),
    )


def contradiction() -> SluiceError:
    """The tokens that the caller resumed with are not those that it would be shown now."""
    return InvalidRequest.of(
        "resume.token_ids",
        "are not the beginning of this answer: the model or the safety policy has changed since; "
        "ask again without resume",
    )
