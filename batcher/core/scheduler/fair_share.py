"""Sorted structures of the order: fair shares between tenants, length buckets, deadlines.

Fair shares are start-time fair queueing, in tokens. Every tenant has a virtual time: tokens it was given, divided by
its weight. The one with the smallest is served next. A tenant without waiting tasks accumulates no credit: when it
returns it starts where the others are. A task's cost is estimated at hand-out, and corrected when its answer has
ended (P. Goyal, H. Vin, H. Cheng, "Start-time Fair Queueing", 1996; for tokens of language models: Y. Sheng et al.,
"Fairness in Serving Large Language Models", 2024).
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from heapq import heapify, heappop, heappush, heapreplace, nlargest
from typing import Final

from sortedcontainers import SortedList

from batcher.core.scheduler.task import QueuedTask, TenantShare

IDLE_MIN: Final = 1024
"""So many tenants without anything waiting are no reason to clean up."""
STALE_MIN: Final = 1024
"""So many records of tasks that wait no more are no reason to clean up."""


class FairShares:
    """The tenants of one class.

    Attributes:
        time: virtual time of the tenant that was served last in turn: the start of a tenant that had no waiting tasks.
        weight: of all tenants with waiting tasks.
    """

    def __init__(self, weights: Mapping[str, float] | None) -> None:
        """``weights`` of tenants that differ from 1; None: all tasks count as one tenant's."""
        self.time = 0.0
        self.weight = 0.0
        self._weights = weights
        self._shares: dict[str, TenantShare] = {}
        self._clean_at = IDLE_MIN

    def add(self, task: QueuedTask) -> None:
        """``task`` begins to wait."""
        key = task.tenant if self._weights is not None else ""
        task.share = share = self._shares.get(key) or self._open(key)
        if not share.waiting:
            share.time = max(share.time, self.time)
            self.weight += share.weight
        share.waiting += 1
        share.tokens += task.cost_tokens

    def remove(self, task: QueuedTask) -> None:
        """``task`` waits no more."""
        share = task.share
        share.waiting -= 1
        share.tokens -= task.cost_tokens
        if not share.waiting:
            self.weight -= share.weight

    def lead_tokens(self, share: TenantShare) -> float:
        """Tokens by which the tenant is ahead of its share."""
        return (share.time - self.time) * share.weight

    def tokens_before(self, tenant: str) -> float:
        """Tokens that go before a new task of the tenant, by its own tasks that wait and the weights of the others."""
        share = self._shares.get(tenant if self._weights is not None else "")
        own = share.tokens if share is not None else 0
        weight = self._weight_of(tenant)
        others = self.weight - (weight if own else 0.0)
        return own * (1.0 + others / weight)

    def busiest(self, most: int) -> list[str]:
        """The tenants with the most waiting tokens; none where all tasks count as one tenant's."""
        if self._weights is None:
            return []
        waiting = (name for name, share in self._shares.items() if share.waiting)
        return nlargest(most, waiting, key=lambda name: self._shares[name].tokens)

    def room(self, tenant: str, limit: int) -> int:
        """How many more tasks of the tenant may come, when those with waiting tasks share ``limit`` by weight."""
        share = self._shares.get(tenant if self._weights is not None else "")
        waiting = share.waiting if share is not None else 0
        weight = self._weight_of(tenant)
        everybody = self.weight + (0.0 if waiting else weight)
        return math.ceil(limit * weight / everybody) - waiting

    def _weight_of(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0) if self._weights is not None else 1.0

    def _open(self, key: str) -> TenantShare:
        if len(self._shares) >= self._clean_at:
            # Idle tenants that are behind the others would start where these are anyway.
            kept = {k: s for k, s in self._shares.items() if s.waiting or s.time > self.time}
            self._shares, self._clean_at = kept, 2 * len(kept) + IDLE_MIN
        share = self._shares[key] = TenantShare(self._weight_of(key))
        return share


class _TenantTasks:
    """Tasks of one tenant in one bucket, by `QueuedTask.due` and arrival; ``key`` is its place in the bucket's heap.

    What comes in order, as most does, needs no sorted list: that takes three times as long.
    """

    __slots__ = ("_in_order", "_last_due", "_others", "key", "share")

    def __init__(self, share: TenantShare) -> None:
        self.share = share
        self.key = share.time
        self._in_order: OrderedDict[int, QueuedTask] = OrderedDict()
        self._last_due = -math.inf
        self._others: SortedList[tuple[float, int, QueuedTask]] = SortedList()

    def add(self, task: QueuedTask) -> None:
        """``task`` is the latest to arrive."""
        if task.due >= self._last_due or not self._in_order:
            self._in_order[task.number] = task
            self._last_due = task.due
        else:
            self._others.add((task.due, task.number, task))

    def remove(self, task: QueuedTask) -> bool:
        """``task`` waits no more; whether others do."""
        if self._in_order.pop(task.number, None) is None:
            self._others.remove((task.due, task.number, task))
        return bool(self._in_order or self._others)

    def first(self) -> QueuedTask | None:
        """The first task."""
        first = next(iter(self._in_order.values()), None)
        if self._others and (first is None or self._others[0][:2] < (first.due, first.number)):
            return self._others[0][2]
        return first


class LengthBucket:
    """Tasks of one class and of about one length: a heap of tenants by virtual time, each with its sorted tasks.

    Virtual times change outside. A key in the heap that has become too small is corrected when it surfaces, one that
    has become too large by `moved_back`.

    Attributes:
        waiting: how many.
    """

    __slots__ = ("_heap", "_pushes", "_tenants", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self._tenants: dict[TenantShare, _TenantTasks] = {}
        self._heap: list[tuple[float, int, _TenantTasks]] = []
        self._pushes = 0

    def add(self, task: QueuedTask) -> None:
        """``task`` begins to wait."""
        self.waiting += 1
        of_tenant = self._tenants.get(task.share)
        if of_tenant is None:
            of_tenant = self._tenants[task.share] = _TenantTasks(task.share)
            self._push(of_tenant)
        of_tenant.add(task)

    def remove(self, task: QueuedTask) -> None:
        """``task`` waits no more; its number is still the one it was added with."""
        self.waiting -= 1
        if not self._tenants[task.share].remove(task):
            del self._tenants[task.share]

    def head(self) -> QueuedTask | None:
        """The first task of the tenant with the smallest virtual time."""
        heap = self._heap
        while heap:
            key, number, of_tenant = heap[0]
            if key != of_tenant.key:
                heappop(heap)  # It has another place.
            elif of_tenant.share.time != key:
                of_tenant.key = of_tenant.share.time
                heapreplace(heap, (of_tenant.key, number, of_tenant))
            elif (task := of_tenant.first()) is not None:
                return task
            else:
                heappop(heap)
        return None

    def moved_back(self, share: TenantShare) -> None:
        """The tenant's virtual time has decreased."""
        of_tenant = self._tenants.get(share)
        if of_tenant is None or share.time >= of_tenant.key:
            return
        if len(self._heap) > 4 * len(self._tenants) + 64:
            self._heap.clear()
            for each in self._tenants.values():
                self._push(each)
        else:
            self._push(of_tenant)

    def _push(self, of_tenant: _TenantTasks) -> None:
        of_tenant.key = of_tenant.share.time
        self._pushes += 1
        heappush(self._heap, (of_tenant.key, self._pushes, of_tenant))


class Deadlines:
    """Waiting tasks by deadline: a heap, in which records of tasks that wait no more stay until they surface.

    Most tasks leave long before their deadline: a sorted list, which finds each of them, takes three times as long.

    Attributes:
        earliest: no waiting task has a deadline before this; it may be too early, but not too late.
    """

    __slots__ = ("_heap", "earliest")

    def __init__(self) -> None:
        self.earliest = float("inf")
        self._heap: list[tuple[float, int, QueuedTask]] = []

    def __len__(self) -> int:
        """Records, those of tasks that wait no more included."""
        return len(self._heap)

    def add(self, task: QueuedTask, waiting: int) -> None:
        """``task`` is one of ``waiting`` that wait."""
        if len(self._heap) > 4 * waiting + STALE_MIN:
            self._heap = [record for record in self._heap if record[1] == record[2].number]
            heapify(self._heap)
        heappush(self._heap, (task.deadline, task.number, task))
        if task.deadline < self.earliest:
            self.earliest = task.deadline

    def first(self) -> QueuedTask | None:
        """The task with the earliest deadline."""
        heap = self._heap
        while heap and heap[0][1] != heap[0][2].number:
            heappop(heap)
        self.earliest = heap[0][0] if heap else float("inf")
        return heap[0][2] if heap else None

    def pop(self, until: float) -> QueuedTask | None:
        """Takes the first out if its deadline is not after ``until``."""
        if self.earliest > until:
            return None
        first = self.first()
        return heappop(self._heap)[2] if first is not None and first.deadline <= until else None
