"""The waiting tasks of one class and the shares of its tenants; `batcher.core.scheduler.order` has the rules."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush, nlargest
from typing import Final

from batcher.core.scheduler.task import Entry, QueuedTask, Tenant
from sluice.settings.batching import ClassPolicy, Policy

SERVICE_SHARE: Final = 0.1
"""Weight of the newest answer in the mean service time."""
IDLE_MIN: Final = 1024
"""So many tenants without anything waiting are no reason to clean up."""
STALE_MIN: Final = 64
"""So many entries of tasks that wait no more are no reason to clean up a heap."""


class ClassOrder:
    """The waiting tasks of one class.

    Attributes:
        policy: its objectives.
        waiting: how many.
        tokens: of them, prompt and expected answer.
        prefill_tokens: of them, to compute before their next tokens.
        passed_since: when one of them was taken last, or since when some wait, their time elsewhere included.
        seen_at: when the last one came.
        service_s: mean service time of answers; 0: not known.
    """

    policy: ClassPolicy

    def __init__(self, name: str, policy: Policy, weights: Mapping[str, float]) -> None:
        """``weights`` of tenants that differ from 1."""
        self.waiting = self.tokens = self.prefill_tokens = 0
        self.passed_since = -math.inf
        self.seen_at = -math.inf
        self.service_s = 0.0
        self._name = name
        self._time = 0.0
        """Virtual time of the tenant that was served last in turn."""
        self._weight = 0.0
        """Of all tenants with waiting tasks."""
        self._tenants: dict[str, Tenant] = {}
        self._common = Tenant(1.0)
        """The share of all tasks where tenants make no difference; nothing is charged to it."""
        self._clean_at = IDLE_MIN
        self._returned: list[Entry] = []
        self._turns: list[tuple[float, float, int, Tenant]] = []
        """Tenants by virtual time and first task."""
        self._late: list[tuple[float, int, Tenant]] = []
        """Tenants by their earliest deadline, but for those that are too far ahead."""
        self._ahead: list[tuple[float, int, Tenant]] = []
        """These, by the virtual time at which they are not any more."""
        self._configure(policy, weights)

    def _configure(self, policy: Policy, weights: Mapping[str, float]) -> None:
        self.policy = policy.of_class(self._name)
        self._is_fair = policy.order == "fair"
        self._urgency, self._horizon_s = policy.urgency, policy.horizon_s
        self._lead_max = policy.urgent_lead_tokens
        self._weights = weights

    # Changes.

    def add(self, task: QueuedTask, now: float) -> None:
        """``task``, with a new number, begins to wait."""
        if not self.waiting:
            self.passed_since = max(self.passed_since, now - task.age_s)
        self.seen_at = now
        tenant = self._share_of(task)
        if not tenant.waiting:
            self._level(tenant)
        self._enter(task, tenant)

    def change(self, policy: Policy, weights: Mapping[str, float]) -> None:
        """Continue under another policy or other weights; each tenant keeps the tokens it is ahead or behind."""
        tasks, was_fair = self._waiting_tasks(), self._is_fair
        self._configure(policy, weights)
        for name, tenant in self._tenants.items():
            weight = weights.get(name, 1.0)
            tenant.time = self._time + (tenant.time - self._time) * tenant.weight / weight
            tenant.weight = weight
        self._clear()
        for task in tasks:
            tenant = self._share_of(task)
            if not was_fair and not tenant.waiting:
                self._level(tenant)
            self._enter(task, tenant)

    def _waiting_tasks(self) -> list[QueuedTask]:
        """Return the tasks that wait, in order of arrival."""
        heaps = [self._returned, *(tenant.in_turn for tenant in self._shares())]
        tasks = [task for heap in heaps for _, number, task in heap if number == task.number]
        return sorted(tasks, key=lambda task: task.number)

    def _shares(self) -> Iterator[Tenant]:
        yield self._common
        yield from self._tenants.values()

    def _clear(self) -> None:
        """Empty all lists of waiting tasks."""
        self.waiting = self.tokens = self.prefill_tokens = 0
        self._weight = 0.0
        for entries in (self._returned, self._turns, self._late, self._ahead):
            entries.clear()
        for tenant in self._shares():
            tenant.waiting = tenant.tokens = 0
            tenant.in_turn.clear()
            tenant.by_deadline.clear()
            tenant.turn = tenant.late = tenant.ahead = None

    def _level(self, tenant: Tenant) -> None:
        """Take from a tenant that begins to wait the credit of the time in which it did not."""
        if tenant is not self._common:
            tenant.time = max(tenant.time, self._time)

    def _share_of(self, task: QueuedTask) -> Tenant:
        if not self._is_fair:
            return self._common
        return self._tenants.get(task.tenant) or self._open(task.tenant)

    def _enter(self, task: QueuedTask, tenant: Tenant) -> None:
        """Put a task into the lists of its share."""
        task.share = tenant
        if not tenant.waiting:
            self._weight += tenant.weight
        self._count(tenant, task, 1)
        began = task.waiting_since - task.age_s
        task.due = min(task.deadline, began + self._horizon_s) if self._is_fair else 0.0
        if task.returned:
            push(self._returned, (task.deadline, task.number, task), self.waiting)
            return
        push(tenant.in_turn, (task.due, task.number, task), tenant.waiting)
        if self._is_fair and task.deadline != math.inf:
            push(tenant.by_deadline, (task.deadline, task.number, task), tenant.waiting)
        self._place(tenant)

    def cancel(self, task: QueuedTask) -> None:
        """``task`` waits no more."""
        self._remove(task)
        self._place(task.share)

    def take(self, task: QueuedTask, now: float) -> None:
        """`first` goes. Out of turn virtual time does not move on; the caller charges its tenant."""
        if not task.returned and self._turns and self._turns[0][-1].in_turn[0][2] is task:
            self._time = max(self._time, task.share.time)
        self.passed_since = now
        self._remove(task)

    def charge(self, task: QueuedTask, tokens: int) -> None:
        """Set the charge of ``task`` to ``tokens``, whatever it was before; without shares nothing is charged."""
        share = task.share
        if share is not self._common:
            share.time += (tokens - task.charged) / share.weight
            task.charged = tokens
        self._place(share)

    def served(self, service_s: float) -> None:
        """Add the service time of an answer."""
        known = self.service_s
        self.service_s = known + (service_s - known) * (SERVICE_SHARE if known else 1.0)

    # Questions.

    def first(self, now: float) -> QueuedTask:
        """The task with the smallest key; some wait."""
        if self._returned:
            return self._returned[0][2]
        ahead, late = self._ahead, self._late
        while ahead and ahead[0][0] <= self._time:
            self._place(ahead[0][-1])
        if late and late[0][0] <= now + self._urgency * self.service_s:
            return late[0][-1].by_deadline[0][2]
        return self._turns[0][-1].in_turn[0][2]

    def first_returned(self) -> QueuedTask | None:
        """Return the first of the tasks that a batcher had before."""
        return self._returned[0][2] if self._returned else None

    def key(self, task: QueuedTask, now: float) -> tuple[float, float, float, int]:
        """Return parts 2 to 6 of the order's key."""
        share = task.share
        if task.returned:
            return 0, task.deadline, 0.0, task.number
        is_near = self._is_fair and task.deadline <= now + self._urgency * self.service_s
        if is_near and share.time - self._lead_max / share.weight <= self._time:
            return 1, task.deadline, 0.0, task.number
        return 2, share.time, task.due, task.number

    @property
    def overdue_at(self) -> float:
        """When the class will have waited too long for one of its tasks to be taken."""
        return self.passed_since + self.policy.aging_s

    def is_overdue(self, now: float) -> bool:
        """Return whether the class has waited too long for one of its tasks to be taken."""
        return self.overdue_at <= now

    def pressing_at(self, task: QueuedTask) -> float:
        """Return from when on ``task`` must not wait for others."""
        if task.returned:
            return -math.inf
        if not self._is_fair:
            return self.overdue_at
        return min(self.overdue_at, task.deadline - self._urgency * self.service_s)

    def is_pressing(self, task: QueuedTask, now: float) -> bool:
        """Return whether ``task`` must not wait for others."""
        return self.pressing_at(task) <= now

    def share_before(self, tenant: str) -> float:
        """Return the share of the waiting tokens that goes before a new task of the tenant.

        It follows from the tenant's own that wait, and from the weights of the others.
        """
        if not self._is_fair:
            return 1.0
        known = self._tenants.get(tenant)
        if known is None or not known.tokens:
            return 0.0
        weight = self._weights.get(tenant, 1.0)
        return min(1.0, known.tokens * self._weight / weight / self.tokens)

    def busiest(self, most: int) -> list[str]:
        """The tenants with the most waiting tokens; none where tenants make no difference."""
        if not self._is_fair:
            return []
        waiting = (name for name, tenant in self._tenants.items() if tenant.waiting)
        return nlargest(most, waiting, key=lambda name: self._tenants[name].tokens)

    # Inside.

    def _remove(self, task: QueuedTask) -> None:
        tenant = task.share
        self._count(tenant, task, -1)
        if not tenant.waiting:
            self._weight -= tenant.weight
            tenant.in_turn.clear()
            tenant.by_deadline.clear()
        task.number = 0  # What is in the heaps of it is stale.
        if self._returned:
            drop_stale(self._returned)

    def _place(self, tenant: Tenant) -> None:
        """Puts a tenant where its time and its tasks put it."""
        in_turn, by_deadline = tenant.in_turn, tenant.by_deadline
        if not in_turn and tenant.turn is None:
            return  # Nothing of it waits, or only what was lost before.
        if in_turn:
            drop_stale(in_turn)
        turn = (tenant.time, *in_turn[0][:2], tenant) if in_turn else None
        if turn != tenant.turn:
            if tenant.turn is not None:
                del self._turns[bisect_left(self._turns, tenant.turn)]
            tenant.turn = turn
            if turn is not None:
                insort(self._turns, turn)
        if not by_deadline and tenant.late is tenant.ahead is None:
            return
        drop_stale(by_deadline)
        if tenant.late is not None:
            del self._late[bisect_left(self._late, tenant.late)]
        if tenant.ahead is not None:
            del self._ahead[bisect_left(self._ahead, tenant.ahead)]
        tenant.late = tenant.ahead = None
        if by_deadline:
            deadline, number, _ = by_deadline[0]
            until = tenant.time - self._lead_max / tenant.weight
            if until <= self._time:
                tenant.late = (deadline, number, tenant)
                insort(self._late, tenant.late)
            else:
                tenant.ahead = (until, number, tenant)
                insort(self._ahead, tenant.ahead)

    def _count(self, tenant: Tenant, task: QueuedTask, tasks: int) -> None:
        tokens = tasks * task.cost_tokens
        self.waiting += tasks
        self.tokens += tokens
        self.prefill_tokens += tasks * task.prefill_tokens
        tenant.waiting += tasks
        tenant.tokens += tokens

    def _open(self, name: str) -> Tenant:
        if len(self._tenants) >= self._clean_at:
            # Idle tenants that are behind the others would start where these are anyway.
            kept = {k: t for k, t in self._tenants.items() if t.waiting or t.time > self._time}
            self._tenants, self._clean_at = kept, 2 * len(kept) + IDLE_MIN
        tenant = self._tenants[name] = Tenant(self._weights.get(name, 1.0))
        return tenant


def push(heap: list[Entry], entry: Entry, waiting: int) -> None:
    """Add an entry to a heap, of which at most ``waiting`` are not stale."""
    if len(heap) > 4 * waiting + STALE_MIN:
        heap[:] = [one for one in heap if one[1] == one[2].number]
        heapify(heap)
    heappush(heap, entry)


def drop_stale(heap: list[Entry]) -> None:
    """Remove entries of tasks that do not wait any more, or again, until the first is none of them."""
    while heap and heap[0][1] != heap[0][2].number:
        heappop(heap)
