"""The free capacity of a worker, as the scheduler sees it."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Room(NamedTuple):
    """What rows of one class may take of a worker, those of less urgent rows included."""

    free_rows: float
    free_tokens: float = math.inf
    waiting_tokens: int = 0


class Capacity(NamedTuple):
    """What a live worker grants, less what was sent."""

    worker: str
    free_rows: float
    free_tokens: float = math.inf
    """Room in its KV cache, tokens; infinite when only rows limit it."""
    waiting_tokens: int = 0
    """Prompt tokens that it computes before those of a new row, or with them, those of rows on their way too."""
    running_rows: int = 0
    """Rows in it, of all batchers."""
    batches_in_flight: int = 0
    """Batches of this batcher that it has not answered."""
    batches_running: int = 0
    """Batches of which it still computes a sequence, those of all batchers, and those in flight to it."""
    urgent: Sequence[Room] = ()
    """If its engine preempts less urgent rows: the room of each class but the last, most urgent first."""

    @property
    def idle(self) -> bool:
        """Whether it has no rows, and none are on their way."""
        return not (self.running_rows or self.batches_in_flight or self.waiting_tokens)


def room_of(capacity: Capacity, rank: int) -> Room | Capacity:
    """Return what rows of the class with ``rank`` may take of a worker, without what a policy keeps free."""
    return capacity.urgent[rank] if rank < len(capacity.urgent) else capacity
