"""Clocks that cross a wire. Inside a process time is monotonic seconds; between our processes it is Unix milliseconds.

The public API has Timestamp and Duration.
"""

import time

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

_NANOS = 1_000_000_000
_LONGEST_MS = 1e14
"""Three thousand years: what a Duration holds is not much longer."""


def unix_ms() -> int:
    """Return the current time, in milliseconds since the Unix epoch."""
    return time.time_ns() // 1_000_000


def timestamp(at_unix_ms: int) -> Timestamp:
    """Return the message of a time."""
    return Timestamp(seconds=at_unix_ms // 1000, nanos=at_unix_ms % 1000 * 1_000_000)


def duration(ms: float) -> Duration:
    """Return the message of a duration, as of `set_duration`."""
    message = Duration()
    set_duration(message, ms)
    return message


def set_duration(message: Duration, ms: float) -> None:
    """Set a new `message` to a duration; 0 for one that is negative or too long, as another process may send it."""
    nanos = round(ms * 1e6) if 0 <= ms <= _LONGEST_MS else 0
    message.seconds, message.nanos = divmod(nanos, _NANOS)


def ms_of(message: Duration | Timestamp) -> float:
    """Return milliseconds: of a duration, or since the Unix epoch."""
    return message.seconds * 1e3 + message.nanos / 1e6
