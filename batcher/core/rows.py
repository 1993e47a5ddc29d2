"""The life of a row: a task from its arrival in the batcher until nobody can ask for it any more.

    WAITING --> SENT --> RUNNING --> ENDED --> CLOSED
       ^          |         |
       +----------+---------+   (worker lost, or the row refused for now)

A row may end in every state before ENDED (deadline, failure), and may be closed in every state (cancelled, given back).
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final

from sluice.internal.v1 import frame_pb2, task_pb2

ATTEMPTS_PER_DELIVERY: Final = 1000
"""Attempts of a later delivery are above all of an earlier one; the rule is in docs/wire.md."""


class RowState(Enum):
    """Where a row is."""

    WAITING = "waiting"
    """In the queue."""
    SENT = "sent"
    """In a batch that the worker has not answered yet."""
    RUNNING = "running"
    """Taken by the worker."""
    ENDED = "ended"
    """Its final frame went out and waits for the gateway's confirmation."""
    CLOSED = "closed"
    """Forgotten."""

    # `Enum` hashes the name in Python, which every look-up by state would pay; states are the same objects anyway.
    __hash__ = object.__hash__


LEGAL: Final[Mapping[RowState, frozenset[RowState]]] = {
    RowState.WAITING: frozenset({RowState.SENT, RowState.ENDED, RowState.CLOSED}),
    RowState.SENT: frozenset({RowState.WAITING, RowState.RUNNING, RowState.ENDED, RowState.CLOSED}),
    RowState.RUNNING: frozenset({RowState.WAITING, RowState.ENDED, RowState.CLOSED}),
    RowState.ENDED: frozenset({RowState.CLOSED}),
    RowState.CLOSED: frozenset(),
}

IN_FLIGHT: Final = frozenset({RowState.SENT, RowState.RUNNING})
"""States in which a worker may hold the row."""


class Row:
    """One task with all that is known of its answer.

    Attributes:
        id: the request id.
        task: as it came.
        deadline: monotonic seconds; infinite without one.
        produced: the answer so far, from index 0.
        base: how many of `produced` the gateway had when the task came.
        final: the end, once there is one.
        barren: sends in a row that brought no token.
        worker: the worker it was sent to last; empty: never sent.
        batch: the batch it was sent with last.
    """

    def __init__(
        self,
        task: task_pb2.Task,
        *,
        deliveries: int,
        produced: Sequence[int],
        deadline: float,
        now: float,
    ) -> None:
        self.id = task.request_id
        self.task = task
        self.deadline = deadline
        self.produced = list(produced)
        self.base = len(self.produced)
        self.logprobs: list[frame_pb2.Logprobs] = []
        self.final: frame_pb2.Final | None = None
        self.worker = ""
        self.batch = frame_pb2.BatchInfo()
        self.barren = 0
        self._deliveries = deliveries
        self._sends = 0
        self._state = RowState.WAITING
        self._since = now
        self._spent_s = dict.fromkeys(RowState, 0.0)

    @property
    def state(self) -> RowState:
        """Where it is."""
        return self._state

    @property
    def since(self) -> float:
        """When it came to where it is, monotonic seconds."""
        return self._since

    @property
    def attempt(self) -> int:
        """Goes into every frame of the row, and fences out earlier owners."""
        return (self._deliveries - 1) * ATTEMPTS_PER_DELIVERY + self._sends

    def move(self, state: RowState, now: float) -> None:
        """Goes on to ``state``, and books the time spent in the one before."""
        assert state in LEGAL[self._state], f"{self._state} -> {state}"
        self._spent_s[self._state] += now - self._since
        self._state, self._since = state, now

    def next_attempt(self) -> None:
        """Fences out what a worker may still send of the attempt before."""
        self._sends = min(self._sends + 1, ATTEMPTS_PER_DELIVERY - 1)
        self.barren += 1

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[frame_pb2.Logprobs]) -> None:
        """Appends tokens that a worker produced."""
        self.produced.extend(token_ids)
        self.logprobs.extend(logprobs)
        if token_ids:
            self.barren = 0

    def timings(self, of_worker: frame_pb2.RowTimings) -> frame_pb2.RowTimings:
        """The worker's times with the batcher's own."""
        timings = frame_pb2.RowTimings()
        timings.CopyFrom(of_worker)
        timings.queue_ms = self._spent_s[RowState.WAITING] * 1e3
        timings.batch_ms = self._spent_s[RowState.SENT] * 1e3
        return timings
