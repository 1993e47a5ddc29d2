"""The free capacity of a worker, as the scheduler sees it."""

import math
from dataclasses import dataclass, replace

from batcher.core.scheduler.task import Batch


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
    step_s: float = 0.0
    """What a step takes now; 0: not known."""
    prefill_token_s: float = 0.0
    """What a prompt token adds to it; 0: not known."""
    preempts: bool = False
    """Whether its engine preempts less urgent rows."""
    preemptible: "tuple[Capacity, ...]" = ()
    """If it does: by class, most urgent first, the capacity when less urgent rows are preempted."""

    @property
    def idle(self) -> bool:
        """Whether it has no rows."""
        return not (self.running_rows or self.batches_in_flight or self.waiting_tokens)

    def first_token_s(self, prefill_tokens: int) -> float:
        """How long a row of so many tokens would wait for its next one; 0 when costs are not known."""
        steps = self.batches_in_flight + (1 if self.running_rows else 0)
        tokens = self.waiting_tokens + prefill_tokens
        return steps * self.step_s + tokens * self.prefill_token_s

    def after(self, batch: Batch) -> "Capacity":
        """The capacity left once ``batch`` is in flight to ``batch.worker``, whatever the class of its rows."""
        if batch.worker != self.worker:
            return self
        return replace(
            self,
            free_rows=self.free_rows - len(batch.rows),
            free_tokens=self.free_tokens - batch.cache_tokens,
            waiting_tokens=self.waiting_tokens + batch.tokens,
            batches_in_flight=self.batches_in_flight + 1,
            preemptible=tuple(each.after(batch) for each in self.preemptible),
        )
