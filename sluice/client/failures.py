"""Turns what gRPC raises into the classes of `sluice.errors`, and says after which a new call may go on."""

import re
from collections.abc import Iterable
from typing import Final, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from sluice import errors
from sluice.errors import SluiceError

STATUS_KEY: Final = "grpc-status-details-bin"
_TOO_LARGE: Final = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)")


class ConnectionLost(errors.TransportUnavailable):
    """The gateway cannot be reached, or the stream broke."""


def error_of(call: grpc.RpcError) -> SluiceError:
    """The typed error; a status that is not ours becomes the nearest class, with its code in the metadata."""
    return _typed(call) or _foreign(call.code(), call.details() or "")


def ended_early() -> ConnectionLost:
    """The error for a stream that ended with OK and without Finished, which only something in between can do."""
    return ConnectionLost("the stream ended before the answer was complete")


def may_resume(error: SluiceError) -> bool:
    """Whether the same request can go on with a new call: the other end went away, it did not say no."""
    return error.code is grpc.StatusCode.UNAVAILABLE


def _typed(call: grpc.RpcError) -> SluiceError | None:
    # The stubs do not say so, but both kinds of call give pairs, or None.
    trailer = dict(cast("Iterable[tuple[str, bytes]]", call.trailing_metadata() or ()))
    if STATUS_KEY not in trailer:
        return None
    try:
        return errors.from_status(status_pb2.Status.FromString(trailer[STATUS_KEY]))
    except DecodeError:
        return None


def _foreign(code: grpc.StatusCode, details: str) -> SluiceError:
    metadata = {"code": code.name}
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlinePassed("the answer was not complete in time", metadata=metadata)
    if code is grpc.StatusCode.UNAVAILABLE:
        return ConnectionLost(details, metadata=metadata)
    if code is grpc.StatusCode.CANCELLED:
        return errors.Cancelled(details, metadata=metadata)
    if sizes := _TOO_LARGE.search(details):
        metadata |= {"bytes": sizes[1], "limit_bytes": sizes[2]}
        return errors.MessageTooLarge(
            f"the message of {sizes[1]} bytes is over the limit of {sizes[2]} bytes",
            metadata=metadata,
        )
    return errors.InternalError(f"{code.name}: {details}", metadata=metadata)
