"""The free capacity of a worker, as the scheduler sees it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from batcher.core.scheduler.task import Batch


class Room(NamedTuple):
    """What rows of one class may take of a worker, those of less urgent rows included."""

    free_rows: int
    free_tokens: float = math.inf
    waiting_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a live worker grants, less what was sent."""

    worker: str
    free_rows: int
    free_tokens: float = math.inf
    """Room in its KV cache, tokens; infinite when only rows limit it."""
    waiting_tokens: int = 0
    """Prompt tokens that it computes before those of a new row, or with them."""
    running_rows: int = 0
    """Rows in it, of all batchers."""
    batches_in_flight: int = 0
    """Batches of this batcher that it has not answered."""
    urgent: Sequence[Room] = ()
    """If its engine preempts less urgent rows: the room of each class but the last, most urgent first."""

    @property
    def idle(self) -> bool:
        """Whether it has no rows."""
        return not (self.running_rows or self.batches_in_flight or self.waiting_tokens)

    def after(self, batch: Batch) -> "Capacity":
        """The capacity left once ``batch`` is in flight to ``batch.worker``, whatever the class of its rows."""
        if batch.worker != self.worker:
            return self
        rows, tokens, cache = len(batch.rows), batch.tokens, batch.cache_tokens
        return replace(
            self,
            free_rows=self.free_rows - rows,
            free_tokens=self.free_tokens - cache,
            waiting_tokens=self.waiting_tokens + tokens,
            batches_in_flight=self.batches_in_flight + 1,
            urgent=[
                Room(room.free_rows - rows, room.free_tokens - cache, room.waiting_tokens + tokens)
                for room in self.urgent
            ],
        )
