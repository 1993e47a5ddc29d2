"""The free capacity of a worker, as the scheduler sees it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from batcher.core.scheduler.task import Batch

KEPT_SHARE: Final = 16
"""One slot of so many, and at least one, stays with less urgent rows."""


class Usage(NamedTuple):
    """The use of a worker by rows of one class, those in flight to it included; tokens."""

    rows: int = 0
    waiting_tokens: int = 0
    """To be computed before their next tokens."""
    cache_tokens: int = 0
    """In the cache, or reserved for them."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The free capacity of a live worker; rows that were sent and are not in its reports yet count as used."""

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

    def with_preemption(self, usages: Sequence[Usage], slots: int, places: int) -> "Capacity":
        """The same with `preemptible` filled in, for a worker whose engine gives slots of less urgent rows to others.

        A preempted row is not lost: it waits inside the engine and continues when a slot is free. So an urgent row
        need not wait for a long answer of another class to end, and no slot has to stand empty for it. Some less urgent
        rows keep their slots in any case: preempted ones come back through them, however many urgent rows there are.

        Args:
            usages: by class, the most urgent first.
            slots: rows that are computed at once.
            places: rows that the worker takes in all.
        """
        found = []
        left = places - sum(usage.rows for usage in usages)
        kept = -(-slots // KEPT_SHARE)
        for rank in range(1, len(usages)):
            before, below = usages[:rank], usages[rank:]
            taken = sum(usage.rows for usage in before)
            preempts = sum(usage.rows for usage in below) > kept
            seen = replace(
                self,
                preempts=True,
                free_rows=max(0, min(slots - taken - kept, left)) if preempts else 0,
                free_tokens=self.free_tokens + sum(usage.cache_tokens for usage in below),
                waiting_tokens=sum(usage.waiting_tokens for usage in before),
            )
            found.append(seen)
        return replace(self, preempts=True, preemptible=tuple(found))

    def after(self, batch: Batch) -> "Capacity":
        """The capacity left once ``batch`` is in flight to ``batch.worker``, whatever the class of its rows."""
        if batch.worker != self.worker:
            return self
        return replace(
            self,
            free_rows=0 if batch.rows[0].alone else self.free_rows - len(batch.rows),
            free_tokens=self.free_tokens - batch.cache_tokens,
            waiting_tokens=self.waiting_tokens + batch.tokens,
            batches_in_flight=self.batches_in_flight + 1,
            preemptible=tuple(each.after(batch) for each in self.preemptible),
        )
