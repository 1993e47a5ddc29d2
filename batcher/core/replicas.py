"""What the queue is told of a worker."""

import math
from dataclasses import dataclass, replace

from batcher.core.batches import Batch
from batcher.core.rooms import Room


@dataclass(frozen=True, slots=True)
class Replica:
    """A live worker of the model, as far as known: what was sent and is not in its reports yet is counted in."""

    worker: str
    free_rows: int
    free_tokens: float = math.inf
    """Room in its KV cache, tokens; infinite when only rows limit it."""
    waiting_tokens: int = 0
    """Prompt tokens it has not computed yet."""
    running_rows: int = 0
    """Rows in it, of all batchers."""
    batches_in_flight: int = 0
    """Batches of this batcher that it has not answered."""
    step_s: float = 0.0
    """What a step takes now; 0: not known."""
    prefill_token_s: float = 0.0
    """What a prompt token adds to it; 0: not known."""
    rooms: tuple[Room, ...] = ()
    """By class, most urgent first: what it finds when less urgent rows give way. Empty: they do not."""

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not (self.running_rows or self.batches_in_flight or self.waiting_tokens)

    def first_token_s(self, prefill_tokens: int) -> float:
        """How long a row of so many tokens would wait for its next one; 0 when costs are not known."""
        steps = self.batches_in_flight + (1 if self.running_rows else 0)
        tokens = self.waiting_tokens + prefill_tokens
        return steps * self.step_s + tokens * self.prefill_token_s

    def giving_way(self, rank: int) -> "Replica | None":
        """As it is for a class when less urgent rows give way; None: they do not."""
        if rank >= len(self.rooms):
            return None
        room = self.rooms[rank]
        return replace(
            self,
            free_rows=room.free_rows,
            free_tokens=room.free_tokens,
            waiting_tokens=room.waiting_tokens,
        )

    def after(self, batch: Batch) -> "Replica":
        """As it is with ``batch`` on its way to ``batch.worker``."""
        if batch.worker != self.worker:
            return self
        return replace(
            self,
            free_rows=self.free_rows - len(batch.rows),
            free_tokens=self.free_tokens - batch.cache_tokens,
            waiting_tokens=self.waiting_tokens + batch.tokens,
            batches_in_flight=self.batches_in_flight + 1,
            rooms=tuple(room.after(batch) for room in self.rooms),
        )
