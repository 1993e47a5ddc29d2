"""Waiting requests of one class and their tenants' shares; `batcher.core.scheduler.order` has the rules."""

import math
from bisect import bisect_left, insort
from collections.abc import Mapping
from heapq import heapify, heappop, heappush, nlargest
from typing import Final

from batcher.core.scheduler.entry import HeapItem, QueueEntry, TenantShare
from sluice.fair_queue import FairQueue
from sluice.settings.batching import ClassPolicy, Policy

SERVICE_SHARE: Final = 0.1
"""Weight of the newest answer in the moving mean of service times."""
STALE_MIN: Final = 64
"""Size up to which a heap is never rebuilt, however many of its entries are stale."""


class ClassOrder:
    """Waiting requests of one class, in order.

    Attributes:
        policy: the objectives of the class.
        waiting: number of waiting requests.
        tokens: prompt and expected answer tokens of the waiting requests.
        prefill_tokens: tokens of the waiting requests to compute before their next token.
        passed_since: when a request of the class was last taken, or since when one waits,
            including its time before this batcher.
        seen_at: when the last request arrived.
        service_s: mean service time of an answer, in seconds; 0 while unknown.
        tenants: the shares of tenants, in fair order.
    """

    policy: ClassPolicy

    def __init__(self, name: str, policy: Policy, weights: Mapping[str, float]) -> None:
        """Create an empty order; `weights` has the tenants whose weight is not 1."""
        self.waiting = self.tokens = self.prefill_tokens = 0
        self.passed_since = -math.inf
        self.seen_at = -math.inf
        self.service_s = 0.0
        self.tenants = FairQueue[TenantShare](TenantShare, weights)
        self._name = name
        self._weight = 0.0
        """Total weight of the tenants with waiting requests."""
        self._common = TenantShare(1.0)
        """Share of every request if the policy ignores tenants; nothing is charged to it."""
        self._returned: list[HeapItem] = []
        self._late: list[tuple[float, int, TenantShare]] = []
        """Tenants by their earliest deadline."""
        self._configure(policy)

    def _configure(self, policy: Policy) -> None:
        self.policy = policy.of_class(self._name)
        self._is_fair = policy.order == "fair"
        self._rules = policy

    # Changes.

    def add(self, entry: QueueEntry, now: float) -> None:
        """Add a request that was just given its number."""
        if not self.waiting:
            self.passed_since = max(self.passed_since, now - entry.age_s)
        self.seen_at = now
        tenant = self._share_of(entry)
        if not tenant.waiting:
            self._level(tenant)
        self._enter(entry, tenant)

    def change(self, policy: Policy, weights: Mapping[str, float]) -> list[QueueEntry]:
        """Continue under another policy or other weights; tenants keep the tokens they are ahead or behind.

        Returns:
            The waiting requests.
        """
        entries, was_fair = self._drain(), self._is_fair
        self._configure(policy)
        self.tenants.use_weights(weights)
        for entry in entries:
            tenant = self._share_of(entry)
            if not was_fair and not tenant.waiting:
                self._level(tenant)
            self._enter(entry, tenant)
        return entries

    def _drain(self) -> list[QueueEntry]:
        """Empty all lists, and return the waiting requests in order of arrival."""
        shares = self._common, *self.tenants.flows.values()
        heaps = [self._returned, *(share.in_turn for share in shares)]
        entries = [entry for heap in heaps for _, number, entry in heap if number == entry.number]
        self.waiting = self.tokens = self.prefill_tokens = 0
        self._weight = 0.0
        self._late.clear()
        for heap in (*heaps, *(share.by_deadline for share in shares)):
            heap.clear()
        for share in shares:
            self.tenants.place(share, None)
            share.waiting = share.tokens = 0
            share.late = None
        return sorted(entries, key=lambda entry: entry.number)

    def _level(self, tenant: TenantShare) -> None:
        """Raise the virtual time of a tenant that starts to wait: idle time earns no credit."""
        if tenant is not self._common:
            self.tenants.activate(tenant)

    def _share_of(self, entry: QueueEntry) -> TenantShare:
        if not self._is_fair:
            return self._common
        return self.tenants.flow(entry.tenant)

    def _enter(self, entry: QueueEntry, tenant: TenantShare) -> None:
        """Put a request into the lists of its tenant's share."""
        entry.share = tenant
        if not tenant.waiting:
            self._weight += tenant.weight
        self._count(tenant, entry, 1)
        began = entry.waiting_since - entry.age_s
        entry.due = min(entry.deadline, began + self._rules.horizon_s) if self._is_fair else 0.0
        if entry.returned:
            push_item(self._returned, (entry.deadline, entry.number, entry), self.waiting)
            return
        push_item(tenant.in_turn, (entry.due, entry.number, entry), tenant.waiting)
        if self._is_fair and entry.deadline != math.inf:
            push_item(tenant.by_deadline, (entry.deadline, entry.number, entry), tenant.waiting)
        self._place(tenant)

    def cancel(self, entry: QueueEntry) -> None:
        """Remove a waiting request."""
        self._remove(entry)
        self._place(entry.share)

    def take(self, entry: QueueEntry, now: float) -> None:
        """Remove a request because a worker gets it.

        The caller must `charge` it next, which also updates the place of its tenant. Virtual time
        only advances for a request that is taken in turn.
        """
        next_tenant = self.tenants.first
        if not entry.returned and next_tenant and next_tenant.in_turn[0][2] is entry:
            self.tenants.serve(next_tenant)
        self.passed_since = now
        self._remove(entry)

    def charge(self, entry: QueueEntry, tokens: int) -> None:
        """Set the charge of a request to `tokens`, whatever it was before."""
        share = entry.share
        if share is not self._common:
            self.tenants.charge(share, tokens - entry.charged)
            entry.charged = tokens
        self._place(share)

    def served(self, service_s: float) -> None:
        """Learn the service time of an answer, in seconds."""
        mean = self.service_s
        self.service_s = mean + (service_s - mean) * (SERVICE_SHARE if mean else 1.0)

    # Questions.

    def first(self, now: float) -> QueueEntry:
        """Return the request with the smallest key; at least one must wait."""
        if self._returned:
            return self._returned[0][2]
        near = now + self._rules.urgency * self.service_s
        for deadline, _, tenant in self._late:
            if deadline > near:
                break
            if not self._is_ahead(tenant):
                return tenant.by_deadline[0][2]
        next_tenant = self.tenants.first
        assert next_tenant is not None, "some wait"
        return next_tenant.in_turn[0][2]

    def first_returned(self) -> QueueEntry | None:
        """Return the first request that a batcher had before, if any."""
        return self._returned[0][2] if self._returned else None

    def key(self, entry: QueueEntry, now: float) -> tuple[float, float, float, int]:
        """Return parts 2 to 6 of the order's key."""
        share = entry.share
        if entry.returned:
            return 0, entry.deadline, 0.0, entry.number
        is_near = self._is_fair and entry.deadline <= now + self._rules.urgency * self.service_s
        if is_near and not self._is_ahead(share):
            return 1, entry.deadline, 0.0, entry.number
        return 2, share.virtual_time, entry.due, entry.number

    def _is_ahead(self, tenant: TenantShare) -> bool:
        """Return whether a tenant is too far ahead of its share to get ahead further by deadlines."""
        lead = tenant.virtual_time - self.tenants.virtual_time
        return lead > self._rules.urgent_lead_tokens / tenant.weight

    @property
    def overdue_at(self) -> float:
        """Time from which the class is overdue: none of its requests was taken for `aging_s`."""
        return self.passed_since + self.policy.aging_s

    def pressing_at(self, entry: QueueEntry) -> float:
        """Return the time from which a request must not wait for others."""
        if entry.returned:
            return -math.inf
        if not self._is_fair:
            return self.overdue_at
        return min(self.overdue_at, entry.deadline - self._rules.urgency * self.service_s)

    def share_before(self, tenant: str) -> float:
        """Return the share of the waiting tokens that goes before a new request of the tenant.

        It follows from the tenant's own waiting tokens and the weights of the other tenants.
        """
        if not self._is_fair:
            return 1.0
        share = self.tenants.flows.get(tenant)
        if share is None or not share.tokens:
            return 0.0
        return min(1.0, share.tokens * self._weight / share.weight / self.tokens)

    def busiest(self, count: int) -> list[str]:
        """Return up to `count` tenants with the most waiting tokens; none if the policy ignores tenants."""
        if not self._is_fair:
            return []
        flows = self.tenants.flows
        waiting = (name for name, tenant in flows.items() if tenant.waiting)
        return nlargest(count, waiting, key=lambda name: flows[name].tokens)

    # Inside.

    def _remove(self, entry: QueueEntry) -> None:
        tenant = entry.share
        self._count(tenant, entry, -1)
        if not tenant.waiting:
            self._weight -= tenant.weight
            tenant.in_turn.clear()
            tenant.by_deadline.clear()
        entry.number = 0  # What is in the heaps of it is stale.
        if self._returned:
            drop_stale(self._returned)

    def _place(self, tenant: TenantShare) -> None:
        """Update a tenant's position in the lists after its time or its requests changed."""
        in_turn, by_deadline = tenant.in_turn, tenant.by_deadline
        if not in_turn and tenant.key is None:
            return  # Nothing of it waits, or only returned requests, which `_returned` orders.
        drop_stale(in_turn)
        self.tenants.place(tenant, in_turn[0][:2] if in_turn else None)
        drop_stale(by_deadline)
        if tenant.late is not None:
            del self._late[bisect_left(self._late, tenant.late)]
            tenant.late = None
        if by_deadline:
            deadline, number, _ = by_deadline[0]
            tenant.late = (deadline, number, tenant)
            insort(self._late, tenant.late)

    def _count(self, tenant: TenantShare, entry: QueueEntry, entries: int) -> None:
        tokens = entries * entry.cost_tokens
        self.waiting += entries
        self.tokens += tokens
        self.prefill_tokens += entries * entry.prefill_tokens
        tenant.waiting += entries
        tenant.tokens += tokens


def push_item(heap: list[HeapItem], item: HeapItem, waiting: int) -> None:
    """Add an item to a heap of which at most `waiting` items are not stale."""
    if len(heap) > 4 * waiting + STALE_MIN:
        heap[:] = [item for item in heap if item[1] == item[2].number]
        heapify(heap)
    heappush(heap, item)


def drop_stale(heap: list[HeapItem]) -> None:
    """Remove stale items from the front: their requests were taken, cancelled or queued again."""
    while heap and heap[0][1] != heap[0][2].number:
        heappop(heap)
