"""The order of waiting tasks of one model: `Order.first` is the one with the smallest key. Parts of the key:

1. The class. Overdue classes come first, the longest overdue before the others: tasks of it wait, and none was taken
   for its `aging_s`. Then interactive, standard, bulk.
2. Tasks that a batcher had before, and lost or gave back, by deadline.
3. Urgent tasks, by deadline: the time left is below `urgency` times the service time of the class, and the tenant is at
   most `urgent_lead_tokens` ahead of its fair share.
4. The tenant's virtual time: first the tenant that was given the fewest tokens for its weight.
5. The deadline, at most `horizon_s` after the task came to its gateway, so that none waits behind all that came much
   later.
6. The order of arrival.

With `order: class` 3 to 5 are left out, with `order: arrival` 1 as well.

Fair shares are start-time fair queueing, in tokens. Every tenant has a virtual time: tokens it was given, divided by
its weight. A tenant without waiting tasks accumulates no credit: when it returns it starts where the others are. A
task's cost is estimated when it is taken, and corrected when its answer has ended (P. Goyal, H. Vin, H. Cheng,
"Start-time Fair Queueing", 1996; for tokens of language models: Y. Sheng et al., "Fairness in Serving Large Language
Models", 2024).

With n tasks of t tenants `add`, `take`, `cancel` and `first` take O(log n), and move O(t) entries of a short list;
amortized, because entries of tasks that wait no more stay in heaps until they are first, or most of what is there.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush, nlargest
from typing import Final

from batcher.core.scheduler.task import Entry, QueuedTask, Tenant
from sluice.settings.batching import Policy
from sluice.wire.subjects import CLASSES, RANKS

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

    def __init__(self, name: str, policy: Policy, weights: Mapping[str, float]) -> None:
        """``weights`` of tenants that differ from 1."""
        self.policy = policy.of_class(name)
        self.waiting = self.tokens = self.prefill_tokens = 0
        self.passed_since = -math.inf
        self.seen_at = -math.inf
        self.service_s = 0.0
        self._is_fair = policy.order == "fair"
        self._urgency, self._horizon_s = policy.urgency, policy.horizon_s
        self._lead_max = policy.urgent_lead_tokens
        self._weights = weights
        self._time = 0.0
        """Virtual time of the tenant that was served last in turn."""
        self._weight = 0.0
        """Of all tenants with waiting tasks."""
        self._tenants: dict[str, Tenant] = {}
        self._clean_at = IDLE_MIN
        self._returned: list[Entry] = []
        self._turns: list[tuple[float, float, int, Tenant]] = []
        """Tenants by virtual time and first task."""
        self._late: list[tuple[float, int, Tenant]] = []
        """Tenants by their earliest deadline, but for those that are too far ahead."""
        self._ahead: list[tuple[float, int, Tenant]] = []
        """These, by the virtual time at which they are not any more."""

    # Changes.

    def add(self, task: QueuedTask, now: float) -> None:
        """``task``, with a new number, begins to wait."""
        began = now - task.age_s
        if not self.waiting:
            self.passed_since = max(self.passed_since, began)
        self.seen_at = now
        name = task.tenant if self._is_fair else ""
        tenant = task.share = self._tenants.get(name) or self._open(name)
        if not tenant.waiting:
            tenant.time = max(tenant.time, self._time)
            self._weight += tenant.weight
        self._count(tenant, task, 1)
        task.due = min(task.deadline, began + self._horizon_s) if self._is_fair else 0.0
        if task.returned:
            _push(self._returned, (task.deadline, task.number, task), self.waiting)
            return
        _push(tenant.in_turn, (task.due, task.number, task), tenant.waiting)
        if self._is_fair and task.deadline != math.inf:
            _push(tenant.by_deadline, (task.deadline, task.number, task), tenant.waiting)
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
        """Sets the charge of ``task`` to ``tokens``, whatever it was before."""
        task.share.time += (tokens - task.charged) / task.share.weight
        task.charged = tokens
        self._place(task.share)

    def served(self, service_s: float) -> None:
        """Adds the service time of an answer."""
        known = self.service_s
        self.service_s = known + (service_s - known) * (SERVICE_SHARE if known else 1.0)

    def adopt(self, task: QueuedTask) -> None:
        """``task``, which a worker has, was taken in an order before this one."""
        name = task.tenant if self._is_fair else ""
        task.share = self._tenants.get(name) or self._open(name)

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

    def is_overdue(self, now: float) -> bool:
        """Whether the class has waited too long for one of its tasks to be taken."""
        return self.passed_since + self.policy.aging_s <= now

    def is_pressing(self, task: QueuedTask, now: float) -> bool:
        """Whether ``task`` must not wait for others."""
        if task.returned or self.is_overdue(now):
            return True
        return self._is_fair and task.deadline <= now + self._urgency * self.service_s

    def tokens_before(self, tenant: str) -> float:
        """Tokens that go before a new task of the tenant, by its own that wait and the weights of the others."""
        known = self._tenants.get(tenant if self._is_fair else "")
        own, weight = known.tokens if known else 0, self._weights.get(tenant, 1.0)
        others = self._weight - (weight if own else 0.0)
        return min(self.tokens, own * (1.0 + others / weight))

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
            _drop_stale(self._returned)

    def _place(self, tenant: Tenant) -> None:
        """Puts a tenant where its time and its tasks put it."""
        in_turn, by_deadline = tenant.in_turn, tenant.by_deadline
        if not in_turn and tenant.turn is None:
            return  # Nothing of it waits, or only what was lost before.
        if in_turn:
            _drop_stale(in_turn)
        turn = (tenant.time, *in_turn[0][:2], tenant) if in_turn else None
        if turn != tenant.turn:
            if tenant.turn is not None:
                del self._turns[bisect_left(self._turns, tenant.turn)]
            tenant.turn = turn
            if turn is not None:
                insort(self._turns, turn)
        if not by_deadline and tenant.late is tenant.ahead is None:
            return
        _drop_stale(by_deadline)
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


def _push(heap: list[Entry], entry: Entry, waiting: int) -> None:
    """Adds an entry to a heap, of which at most ``waiting`` are not stale."""
    if len(heap) > 4 * waiting + STALE_MIN:
        heap[:] = [one for one in heap if one[1] == one[2].number]
        heapify(heap)
    heappush(heap, entry)


def _drop_stale(heap: list[Entry]) -> None:
    """Removes entries of tasks that do not wait any more, or again, until the first is none of them."""
    while heap and heap[0][1] != heap[0][2].number:
        heappop(heap)


class Order:
    """All waiting tasks of a model, class by class. Time is an argument, monotonic seconds.

    Attributes:
        classes: by name, the most urgent first.
        waiting: how many tasks wait.
    """

    def __init__(
        self,
        policy: Policy,
        weights: Mapping[str, float],
        estimate: Callable[[QueuedTask], None],
    ) -> None:
        """``estimate`` sets the costs of a task, when it begins to wait and, where they were guesses, when it goes."""
        self.classes = {name: ClassOrder(name, policy, weights) for name in CLASSES}
        self.waiting = 0
        self._policy = policy
        self._by_class = policy.order != "arrival"
        self._estimate = estimate
        self._numbers = 0

    def add(self, task: QueuedTask, now: float) -> None:
        """``task`` begins to wait."""
        task.waiting_since = now  # Before the number: other threads look at tasks that have one.
        self._numbers = task.number = self._numbers + 1
        self.waiting += 1
        self._estimate(task)
        self.classes[task.priority_class].add(task, now)

    def cancel(self, task: QueuedTask) -> None:
        """``task`` waits no more."""
        self.waiting -= 1
        self.classes[task.priority_class].cancel(task)

    def first(self, now: float) -> QueuedTask | None:
        """The task with the smallest key; None: none waits."""
        if not self._by_class:
            return self._first_to_arrive(now)
        chosen: ClassOrder | None = None
        overdue_since = math.inf
        for members in self.classes.values():
            if members.waiting:
                overdue_at = members.passed_since + members.policy.aging_s
                if overdue_at <= now and overdue_at < overdue_since:
                    chosen, overdue_since = members, overdue_at
                elif chosen is None:
                    chosen = members
        return None if chosen is None else chosen.first(now)

    def take(self, task: QueuedTask, now: float) -> None:
        """``task``, of a worker now, is charged to its tenant."""
        self.waiting -= 1
        members = self.classes[task.priority_class]
        members.take(task, now)
        if task.guessed:
            self._estimate(task)
        members.charge(task, task.cost_tokens)
        task.sent_at, task.waited_s = now, now - task.waiting_since

    def modest_until(self, priority_class: str) -> float:
        """Until when the class leaves room to more urgent ones, if no more tasks of these come."""
        if not self._by_class:
            return -math.inf
        more_urgent = CLASSES[: RANKS[priority_class]]
        seen_at = max((self.classes[name].seen_at for name in more_urgent), default=-math.inf)
        return seen_at + self._policy.spare_s

    def tokens_before(self, priority_class: str, tenant: str) -> float:
        """Tokens, prompt and expected answer, that go before a new task of the class and tenant."""
        if not self._by_class:
            return sum(members.tokens for members in self.classes.values())
        more_urgent = CLASSES[: RANKS[priority_class]]
        own = self.classes[priority_class].tokens_before(tenant)
        return own + sum(self.classes[name].tokens for name in more_urgent)

    def _first_to_arrive(self, now: float) -> QueuedTask | None:
        waiting = [members.first(now) for members in self.classes.values() if members.waiting]
        return min(waiting, key=lambda task: (not task.returned, task.number), default=None)
