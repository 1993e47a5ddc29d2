"""Free capacity of a worker, as the scheduler sees it."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class UsableCapacity(NamedTuple):
    """Capacity of a worker that requests of one class may use; if it preempts, with what less urgent ones occupy."""

    free_slots: float
    free_tokens: float = math.inf
    waiting_tokens: int = 0


class Capacity(NamedTuple):
    """Capacity that a live worker grants, less what was sent to it since."""

    worker: str
    free_slots: float
    free_tokens: float = math.inf
    """Free tokens of the worker's KV cache; infinite if only slots limit it."""
    waiting_tokens: int = 0
    """Prompt tokens that are computed before, or together with, a new request. Includes requests in
    flight."""
    running: int = 0
    """Requests in the worker, from all batchers."""
    batches_in_flight: int = 0
    """Batches of this batcher that the worker has not acknowledged."""
    batches_running: int = 0
    """Batches with at least one unfinished sequence, from all batchers, plus those in flight."""
    urgent: Sequence[UsableCapacity] = ()
    """Capacity of each class but the last, most urgent first; empty if the engine does not preempt."""

    @property
    def idle(self) -> bool:
        """Whether the worker has no requests and none are in flight."""
        return not (self.running or self.batches_in_flight or self.waiting_tokens)


def capacity_of(capacity: Capacity, rank: int) -> UsableCapacity | Capacity:
    """Return what requests of the class with this rank may use, before the policy reserves any of it."""
    return capacity.urgent[rank] if rank < len(capacity.urgent) else capacity
