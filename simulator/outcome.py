"""What became of each request, and what was seen on the way."""

from dataclasses import dataclass, field
from enum import Enum

from simulator.trace import Arrival


class Ending(Enum):
    """How a request ended."""

    FINISHED = "finished"
    EXPIRED = "expired"
    """Its deadline passed."""
    REFUSED = "refused"
    """The gateway's admission turned it away at once."""
    OPEN = "open"
    """The simulation was over first."""


@dataclass(slots=True)
class Outcome:
    """One request; times are seconds since the trace began, as its caller sees them.

    Attributes:
        wait_s: in the batcher's queue, all times that it waited there.
    """

    arrival: Arrival
    ending: Ending = Ending.OPEN
    wait_s: float = 0.0
    first_at: float | None = None
    ended_at: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """To the first token."""
        return None if self.first_at is None else self.first_at - self.arrival.at_s

    @property
    def latency_s(self) -> float | None:
        """To the end of the answer."""
        if self.ending is not Ending.FINISHED or self.ended_at is None:
            return None
        return self.ended_at - self.arrival.at_s


@dataclass(frozen=True, slots=True)
class QueueSample:
    """How much waited, and how much was computed, at one time."""

    at_s: float
    queued: tuple[int, ...]
    """By class, most urgent first."""
    running: int


@dataclass(slots=True)
class History:
    """One run of a simulation.

    Attributes:
        outcomes: one a request, in order of arrival.
        workers: how many there were.
        seconds: how long it ran.
        busy_s: that workers computed, all together.
        row_s: seconds times rows in slots, all workers together.
        cells: prompt tokens of all batches, each row as long as the longest of its batch.
        filled: prompt tokens of all batches.
    """

    outcomes: list[Outcome]
    workers: int
    slots: int
    seconds: float = 0.0
    busy_s: float = 0.0
    row_s: float = 0.0
    batches: int = 0
    rows_sent: int = 0
    cells: int = 0
    filled: int = 0
    samples: list[QueueSample] = field(default_factory=list)
    tenant_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens of prompts and answers that were computed for each tenant."""
