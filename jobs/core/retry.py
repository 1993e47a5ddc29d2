"""Retries: what becomes of an item that failed.

| gRPC code | consequence |
|---|---|
| UNAVAILABLE, ABORTED, and RESOURCE_EXHAUSTED with a retry delay | the mesh has no capacity: not counted as a try |
| INTERNAL, UNKNOWN, DEADLINE_EXCEEDED, CANCELLED, DATA_LOSS, other RESOURCE_EXHAUSTED | retried a few times |
| the others | the item itself is wrong: dead at once |
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, Self

from sluice.errors import SluiceError
from sluice.v1.jobs_pb2 import JobRetries
from sluice.wire.clock import ms_of

WAIT_S_MAX: Final = 60.0
"""Default upper bound of the wait before a retry, in seconds."""
_NO_ROOM: Final = frozenset({"UNAVAILABLE", "ABORTED"})
_PASSING: Final = frozenset(
    {"INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED", "CANCELLED", "DATA_LOSS", "RESOURCE_EXHAUSTED"}
)


class FailureKind(Enum):
    """Kinds of errors of an item."""

    NO_ROOM = "no room"
    """The mesh has no capacity for it now; says nothing about the item."""
    PASSING = "passing"
    """Another try may succeed."""
    PERMANENT = "permanent"
    """No try can succeed."""


def failure_kind(error: SluiceError) -> FailureKind:
    """Return the kind of an error."""
    code = error.code.name
    if code in _NO_ROOM or (code == "RESOURCE_EXHAUSTED" and error.retry_after_s is not None):
        return FailureKind.NO_ROOM
    return FailureKind.PASSING if code in _PASSING else FailureKind.PERMANENT


@dataclass(frozen=True)
class ItemRetryPolicy:
    """How items are retried."""

    retries: int = 3
    first_wait_s: float = 1.0
    wait_s_max: float = WAIT_S_MAX

    @classmethod
    def of(cls, wire: JobRetries) -> Self:
        """Return the policy of a job, with defaults for what it leaves out."""
        return cls(
            wire.max_retries if wire.HasField("max_retries") else cls.retries,
            ms_of(wire.initial_backoff) / 1e3 or cls.first_wait_s,
            ms_of(wire.max_backoff) / 1e3 or cls.wait_s_max,
        )

    def wait_s(self, failures: int, dice: float) -> float:
        """Return the wait after this many failures, in seconds.

        It doubles with each failure; `dice`, from 0 to 1, draws it from its upper half.
        """
        step = min(self.wait_s_max, self.first_wait_s * 2.0 ** min(failures - 1, 60))
        return step * (0.5 + dice / 2)
