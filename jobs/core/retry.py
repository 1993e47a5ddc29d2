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
"""Default upper bound of the wait before a retry, and that of the retry delay of an error, in seconds."""
_NO_CAPACITY: Final = frozenset({"UNAVAILABLE", "ABORTED"})
_TRANSIENT: Final = frozenset(
    {"INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED", "CANCELLED", "DATA_LOSS", "RESOURCE_EXHAUSTED"}
)


class FailureKind(Enum):
    """Whether an item that failed is sent again, and whether that counts as a try; see the module."""

    NO_CAPACITY = "no capacity"
    """The mesh has no capacity now: sent again without limit, and not counted as a try."""
    TRANSIENT = "transient"
    """Another try may succeed: sent again up to `JobRetries.retries` times."""
    PERMANENT = "permanent"
    """No try can succeed: dead at once."""


def failure_kind(error: SluiceError) -> FailureKind:
    """Return the kind of an error."""
    code = error.code.name
    if code in _NO_CAPACITY or (code == "RESOURCE_EXHAUSTED" and error.retry_after_s is not None):
        return FailureKind.NO_CAPACITY
    return FailureKind.TRANSIENT if code in _TRANSIENT else FailureKind.PERMANENT


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
