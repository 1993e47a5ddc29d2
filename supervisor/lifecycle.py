"""The life cycle of a supervised process: its phases, and the wait before each restart.

A core without clock and processes: `now` is monotonic seconds.
"""

import enum
from collections.abc import Mapping
from typing import Final

BACKOFF_MIN_S: Final = 0.2
BACKOFF_MAX_S: Final = 5.0
STEADY_S: Final = 5.0
"""A process that ran for this long is started again at once; one that ended sooner waits longer each time."""


class Phase(enum.StrEnum):
    """Where a process is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    BACKING_OFF = "backing_off"
    STOPPING = "stopping"
    STOPPED = "stopped"


MOVES: Final[Mapping[Phase, frozenset[Phase]]] = {
    Phase.WAITING: frozenset({Phase.RUNNING, Phase.BACKING_OFF, Phase.STOPPED}),
    Phase.RUNNING: frozenset({Phase.BACKING_OFF, Phase.STOPPING}),
    Phase.BACKING_OFF: frozenset({Phase.RUNNING, Phase.BACKING_OFF, Phase.STOPPED}),
    Phase.STOPPING: frozenset({Phase.STOPPED}),
    Phase.STOPPED: frozenset(),
}


class Lifecycle:
    """Phase, restarts and waits of one process.

    Attributes:
        phase: where it is now.
        restarts: how often it was started again.
    """

    def __init__(self) -> None:
        self.phase = Phase.WAITING
        self.restarts = 0
        self._young_ends = 0
        self._started_at: float | None = None

    def started(self, now: float) -> None:
        """Record that the process runs."""
        if self.phase is Phase.BACKING_OFF:
            self.restarts += 1
        self._move(Phase.RUNNING)
        self._started_at = now

    def exited(self, now: float) -> float:
        """Record that the process ended or could not be started; return the wait before the restart, in seconds.

        The first restart is at once, and so is each one after a run of `STEADY_S`.
        """
        if self._started_at is not None and now - self._started_at >= STEADY_S:
            self._young_ends = 0
        self._started_at = None
        self._move(Phase.BACKING_OFF)
        wait_s = _wait_s(self._young_ends)
        self._young_ends += 1
        return wait_s

    def stop(self) -> None:
        """Record that a stop is requested: a running process is stopping now, any other has stopped."""
        if self.phase is Phase.RUNNING:
            self._move(Phase.STOPPING)
        elif self.phase in (Phase.WAITING, Phase.BACKING_OFF):
            self._move(Phase.STOPPED)

    def stopped(self) -> None:
        """Record that the process that was asked to end has ended."""
        self._move(Phase.STOPPED)

    @property
    def ending(self) -> bool:
        """Whether it is stopping or has stopped."""
        return self.phase in (Phase.STOPPING, Phase.STOPPED)

    def _move(self, phase: Phase) -> None:
        assert phase in MOVES[self.phase], f"{self.phase} cannot become {phase}"
        self.phase = phase


def _wait_s(ends: int) -> float:
    """Return the wait after this many ends in a row; the exponent is bounded so that it never overflows."""
    return min(BACKOFF_MIN_S * 2.0 ** (min(ends, 16) - 1), BACKOFF_MAX_S) if ends else 0.0
