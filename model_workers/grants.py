"""Grants: how many tasks each batcher may send. Only the worker knows its slots, its cache and all batchers.

1. A grant is a total: the tasks that a batcher may have sent over its channel since it opened, ended ones included, by
   class, most urgent first. A late or repeated grant therefore adds no capacity, and tasks on their way need no count
   of their own. KV tokens that tasks will occupy when they end are granted in the same way.
2. A class has the free slots, and those of less urgent sequences if the engine preempts. One slot of `RESERVED_SHARE`,
   and at least one, stays with the less urgent ones: preempted sequences continue in it.
3. Capacity is divided among the batchers that have tasks of the class or a more urgent one queued, so that all have the
   same number in the engine; none gets more than it has queued. What is left is divided among all batchers.
4. A batcher repeats its queue with each heartbeat. After `SILENT_HEARTBEATS` without a message it may be suspended, and
   counts as one with an empty queue.
5. A batcher with nothing of the most urgent class queued may send one such task while the engine has capacity, up to an
   equal part of the slots: the task does not wait for a grant.
6. Nothing is granted while a sequence is computed alone, or a batch runs that nothing can join.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sluice.internal.v1 import worker_pb2
from sluice.wire.subjects import CLASSES

RESERVED_SHARE: Final = 16
"""One slot of this many, and at least one, stays with less urgent sequences."""
SILENT_HEARTBEATS: Final = 3
"""Heartbeat intervals for which a batcher's report of its queue holds."""


class ClassCapacity(NamedTuple):
    """What a worker can still accept of one class.

    Attributes:
        tokens: KV tokens; infinite if only slots limit the worker.
    """

    tasks: int
    tokens: float


NO_CAPACITY: Final = (ClassCapacity(0, math.inf),) * len(CLASSES)


@dataclass(frozen=True, slots=True)
class Grant:
    """Totals that a batcher may have sent, by class.

    Attributes:
        tokens: KV tokens; empty if only tasks limit the worker.
        is_wanted: Whether the batcher has tasks queued.
        batchers: Number of batchers that share the worker.
    """

    tasks: Sequence[int] = ()
    tokens: Sequence[int] = ()
    is_wanted: bool = False
    batchers: int = 1


@dataclass(slots=True)
class Holder:
    """The channel of one batcher: what came over it since it opened, and what is queued at its other end.

    Attributes:
        patience_s: How long the report of the queue holds, in seconds.
        reported_at: When the batcher last reported its queue, in monotonic seconds.
        queued: Tasks queued at the batcher, by class.
    """

    epoch: int
    patience_s: float
    reported_at: float = 0.0
    sent_tasks: int = 0
    sent_tokens: int = 0
    queued: Sequence[int] = field(default=(0,) * len(CLASSES))


class Grants:
    """The grants of all channels of a worker.

    Attributes:
        withdrawn: Whether nothing is granted to anybody.
    """

    def __init__(self) -> None:
        self._holders: dict[str, Holder] = {}
        self.withdrawn = False

    def open(self, batcher: str, epoch: int, heartbeat_s: float) -> None:
        """Start to count for a new channel of a batcher."""
        self._holders[batcher] = Holder(epoch, SILENT_HEARTBEATS * heartbeat_s)

    def close(self, batcher: str) -> None:
        """Remove a lost batcher."""
        self._holders.pop(batcher, None)

    def epoch(self, batcher: str) -> int:
        """Return the epoch of a batcher's channel; 0: it has none."""
        holder = self._holders.get(batcher)
        return holder.epoch if holder is not None else 0

    def take(self, batch: worker_pb2.Batch, now: float) -> None:
        """Count a batch that has arrived, refused tasks included, and set what its batcher still has queued."""
        if (holder := self._holders.get(batch.batcher)) is not None:
            holder.sent_tasks += len(batch.tasks)
            holder.sent_tokens += sum(task.cache_tokens for task in batch.tasks)
            self.set_queued(batch.batcher, batch.queued, now)

    def set_queued(self, batcher: str, queued: Sequence[int], now: float) -> None:
        """Set the number of tasks that a batcher has queued, by class."""
        if (holder := self._holders.get(batcher)) is not None:
            holder.queued = queued if len(queued) == len(CLASSES) else (0,) * len(CLASSES)
            holder.reported_at = now

    def give(
        self, load: worker_pb2.WorkerLoad, now: float, owners: Iterable[str] = ()
    ) -> Mapping[str, Grant]:
        """Return the grants of all batchers; `owners` has the batcher of each sequence in the engine."""
        # Rule 6.
        if self.withdrawn or load.batch_running:
            return {
                name: self._grant(holder, NO_CAPACITY) for name, holder in self._holders.items()
            }
        if not self._holders:
            return {}
        capacities = class_capacities(load)
        if len(self._holders) == 1:  # the usual case, at every step
            ((batcher, holder),) = self._holders.items()
            return {batcher: self._grant(holder, capacities)}
        running = Counter(owners)
        free_tasks = load.max_tasks - load.running - load.waiting if load.max_tasks else math.inf
        for holder in self._holders.values():
            # Rule 4: a batcher that is silent for too long counts as one without a queue.
            if now > holder.reported_at + holder.patience_s:
                holder.queued = (0,) * len(CLASSES)
        quiet_slots = load.slots // len(self._holders)
        shares: dict[str, list[ClassCapacity]] = {batcher: [] for batcher in self._holders}
        for rank, capacity in enumerate(capacities):
            demand = {
                name: sum(holder.queued[: rank + 1]) for name, holder in self._holders.items()
            }
            # Tokens are divided among those that want any, or a task that needs nearly all would wait for ever.
            wanting = sum(count > 0 for count in demand.values()) or len(demand)
            # Rule 3.
            for batcher, count in self._divided(capacity.tasks, demand, running).items():
                # Rule 5.
                is_quiet = not demand[batcher] and running[batcher] < max(1, quiet_slots)
                if not rank and not count and free_tasks > 0 and is_quiet:
                    count = 1
                shares[batcher].append(ClassCapacity(count, capacity.tokens / wanting))
        return {batcher: self._grant(self._holders[batcher], shares[batcher]) for batcher in shares}

    def _divided(
        self, tasks: int, queued_tasks: Mapping[str, int], running: Counter[str]
    ) -> dict[str, int]:
        """Divide the capacity of a class by rule 3; `queued_tasks` are those that it is for."""
        granted = dict.fromkeys(self._holders, 0)
        totals = running.copy()
        for _ in range(tasks):
            # One task at a time, to the batcher with the fewest: totals stay as equal as they can be.
            wanting = [name for name, count in queued_tasks.items() if granted[name] < count]
            name = min(wanting or self._holders, key=totals.__getitem__)
            totals[name] += 1
            granted[name] += 1
        return granted

    def _grant(self, holder: Holder, capacities: Sequence[ClassCapacity]) -> Grant:
        tokens: Sequence[int] = ()
        if not math.isinf(capacities[0].tokens):
            # Rule 1: totals, so that what is on its way is counted already.
            tokens = [holder.sent_tokens + max(0, int(capacity.tokens)) for capacity in capacities]
        tasks = [holder.sent_tasks + capacity.tasks for capacity in capacities]
        return Grant(tasks, tokens, any(holder.queued), len(self._holders))


def class_capacities(load: worker_pb2.WorkerLoad) -> list[ClassCapacity]:
    """Return the capacity of a worker for each class, most urgent first."""
    present = load.running + load.waiting
    free_slots = max(0, load.slots - present)
    free_tokens = math.inf
    if load.block_tokens:
        # Waiting sequences have no blocks yet.
        free_tokens = load.free_blocks * load.block_tokens - load.waiting_tokens
    capacities = [ClassCapacity(free_slots, free_tokens)] * len(CLASSES)
    if len(load.classes) != len(CLASSES):
        return capacities  # the engine does not preempt
    reserved = -(-load.slots // RESERVED_SHARE)
    used = 0
    for rank, own in enumerate(load.classes[:-1]):
        # Rule 2: what this class may take is what it and more urgent ones have not taken yet.
        used += own.running + own.waiting
        below = load.classes[rank + 1 :]
        if present - used > reserved:
            tasks = min(load.slots - used - reserved, load.max_tasks - present)
            tokens = free_tokens + sum(
                capacity.running_tokens + capacity.waiting_tokens for capacity in below
            )
            capacities[rank] = ClassCapacity(
                max(free_slots, tasks), tokens if tasks > 0 else free_tokens
            )
    return capacities
