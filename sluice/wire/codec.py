"""Packs and unpacks messages that cross NATS or Triton, with a limit of their size, and reads requests of callers."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from sluice.errors import InvalidRequest
from sluice.internal.v1.control_pb2 import BatcherReport, ControlMessage
from sluice.internal.v1.frame_pb2 import FrameBundle
from sluice.wire import subjects

MAX_MESSAGE_BYTES: Final = 1024 * 1024
"""Largest payload, bytes: the default `max_payload` of nats-server."""
BUNDLE_FRAMES_MAX: Final = 8192
"""Frames in one message to a gateway, which looks at all of them in one go: about 10 ms."""
LONG_BYTES: Final = 1024
"""Copies of shorter messages are not worth their time."""

_M = TypeVar("_M", bound=Message)


class MalformedMessage(ValueError):
    """Bytes from a wire are not the message that belongs there."""


class OversizedMessage(ValueError):
    """A message is too large for the wire: `size` and `limit` in bytes."""

    def __init__(self, kind: str, size: int, limit: int) -> None:
        super().__init__(f"{kind} of {size} bytes is over the limit of {limit} bytes")
        self.size = size
        self.limit = limit


def header_bytes(headers: Mapping[str, str]) -> int:
    """Return the bytes that `headers` add to a NATS message: the server counts them as part of its payload.

    nats-py counts the payload alone. The server answers a message that is too large by closing the connection, and
    nats-py does not open it again.
    """
    lines = (len(key.encode()) + len(value.encode()) + 4 for key, value in headers.items())
    return len(b"NATS/1.0\r\n\r\n") + sum(lines)


def pack(message: Message, limit: int = MAX_MESSAGE_BYTES) -> bytes:
    """Serialize `message`.

    Raises:
        OversizedMessage: it takes more than `limit` bytes.
    """
    payload = message.SerializeToString()
    if len(payload) > limit:
        raise OversizedMessage(type(message).__name__, len(payload), limit)
    return payload


def unpack(kind: type[_M], payload: bytes) -> _M:
    """Parse `payload` as a `kind`.

    Raises:
        MalformedMessage: it is something else.
    """
    try:
        return kind.FromString(payload)
    except DecodeError as error:
        raise MalformedMessage(f"not a {kind.__name__}: {error}") from error


def unpack_to_keep(kind: type[_M], payload: bytes) -> _M:
    """Parse like `unpack`, in less memory: parsed, a list of numbers takes 11 bytes each, in a copy 4."""
    message = unpack(kind, payload)
    return deepcopy(message) if len(payload) > LONG_BYTES else message


def request_reader(
    parse: Callable[[bytes], Message],
) -> Callable[[bytes], Message | InvalidRequest]:
    """Return `parse` for a gRPC server; for a malformed request it returns an error, which the method raises.

    gRPC would end the call as INTERNAL.
    """

    def read(payload: bytes) -> Message | InvalidRequest:
        try:
            return parse(payload)
        except DecodeError:
            return InvalidRequest(
                "the bytes are no such message: a string is not UTF-8, or a field is broken"
            )

    return read


def read_report(subject: str, payload: bytes) -> BatcherReport:
    """Read the report that came on `subject`.

    Raises:
        MalformedMessage: it is none, or names another batcher than the one whose subject it came on.
    """
    report = unpack(BatcherReport, payload)
    if subject != f"{subjects.REPORTS}.{report.batcher}":
        raise MalformedMessage(f"a report of {report.batcher!r} on {subject}")
    return report


def read_bundle(payload: bytes) -> FrameBundle:
    """Return what a batcher tells a gateway.

    Raises:
        MalformedMessage: it is none, has more than `BUNDLE_FRAMES_MAX` frames, or names no batcher: nothing could be
            sent to it.
    """
    bundle = unpack(FrameBundle, payload)
    most = max(len(bundle.frames), len(bundle.pending), len(bundle.unknown))
    if most > BUNDLE_FRAMES_MAX:
        raise MalformedMessage(f"a FrameBundle of {most} entries, the limit is {BUNDLE_FRAMES_MAX}")
    return _from_sender(bundle, "batcher")


def read_control(payload: bytes) -> ControlMessage:
    """Read a control message of a gateway; raise as `read_bundle` does."""
    return _from_sender(unpack(ControlMessage, payload), "gateway")


def _from_sender(message: _M, field: str) -> _M:
    sender = getattr(message, field)
    if not subjects.is_token(sender):
        raise MalformedMessage(f"a {type(message).__name__} of {field} {sender!r}")
    return message
