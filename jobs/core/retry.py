"""What becomes of an item that failed: it waits for the mesh, is tried again, or is a dead letter.

| gRPC code | what |
|---|---|
| UNAVAILABLE, ABORTED, and RESOURCE_EXHAUSTED with a time to retry | the mesh has no room now: not counted as a try |
| INTERNAL, UNKNOWN, DEADLINE_EXCEEDED, CANCELLED, DATA_LOSS, other RESOURCE_EXHAUSTED | tried again, a few times |
| the others | the item itself is wrong: dead at once |
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, Self

from sluice.errors import SluiceError
from sluice.v1.jobs_pb2 import JobRetries
from sluice.wire.clock import ms_of

RETRIES: Final = 3
FIRST_WAIT_S: Final = 1.0
WAIT_S_MAX: Final = 60.0
_NO_ROOM: Final = frozenset({"UNAVAILABLE", "ABORTED"})
_PASSING: Final = frozenset(
    {"INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED", "CANCELLED", "DATA_LOSS", "RESOURCE_EXHAUSTED"}
)


class Failure(Enum):
    """Kinds of errors of an item."""

    NO_ROOM = "no room"
    """The mesh cannot take it now; says nothing of the item."""
    PASSING = "passing"
    """Another try may succeed."""
    PERMANENT = "permanent"
    """No try can succeed."""


def failure_of(error: SluiceError) -> Failure:
    """The kind of ``error``."""
    code = error.code.name
    if code in _NO_ROOM or (code == "RESOURCE_EXHAUSTED" and error.retry_after_s is not None):
        return Failure.NO_ROOM
    return Failure.PASSING if code in _PASSING else Failure.PERMANENT


@dataclass(frozen=True)
class RetryPolicy:
    """How items are tried again; seconds."""

    retries: int = RETRIES
    first_wait_s: float = FIRST_WAIT_S
    wait_s_max: float = WAIT_S_MAX

    @classmethod
    def of(cls, wire: JobRetries) -> Self:
        """What a job says."""
        return cls(
            wire.max_retries if wire.HasField("max_retries") else RETRIES,
            ms_of(wire.initial_backoff) / 1e3 or FIRST_WAIT_S,
            ms_of(wire.max_backoff) / 1e3 or WAIT_S_MAX,
        )

    def wait_s(self, failures: int, dice: float) -> float:
        """The wait after so many failures: it doubles with each, and is drawn from its upper half."""
        step = min(self.wait_s_max, self.first_wait_s * 2.0 ** min(failures - 1, 60))
        return step * (0.5 + dice / 2)
