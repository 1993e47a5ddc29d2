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
from collections.abc import Callable, Mapping

from batcher.core.scheduler.class_order import ClassOrder
from batcher.core.scheduler.task import QueuedTask
from sluice.settings.batching import Policy
from sluice.wire.subjects import CLASSES, RANKS, URGENT_CLASS


def is_unlimited(task: QueuedTask) -> bool:
    """Return whether no limit on running batches holds the task back: interactive and returned ones.

    A request that is tried for the last time is a returned one.
    """
    return task.returned or task.priority_class == URGENT_CLASS


class Order:
    """All waiting tasks of a model, class by class. Time is an argument, monotonic seconds.

    Attributes:
        classes: by name, the most urgent first.
        waiting: how many tasks wait.
        by_class: whether classes make a difference.
    """

    by_class: bool

    def __init__(
        self,
        policy: Policy,
        weights: Mapping[str, float],
        estimate: Callable[[QueuedTask], None],
    ) -> None:
        """``estimate`` sets the costs of a task, when it begins to wait and, where they were guesses, when it goes."""
        self.classes = {name: ClassOrder(name, policy, weights) for name in CLASSES}
        self.waiting = 0
        self._estimate = estimate
        self._numbers = 0
        self._configure(policy)

    def _configure(self, policy: Policy) -> None:
        self._spare_s = policy.spare_s
        self.by_class = policy.order != "arrival"

    def change(self, policy: Policy, weights: Mapping[str, float]) -> None:
        """Continue under another policy: waiting times, fair shares and service times stay."""
        self._configure(policy)
        for members in self.classes.values():
            members.change(policy, weights)

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
        if not self.by_class:
            return self._first_to_arrive(now)
        chosen: ClassOrder | None = None
        overdue_since = math.inf
        for members in self.classes.values():
            if members.waiting:
                overdue_at = members.overdue_at
                if overdue_at <= now and overdue_at < overdue_since:
                    chosen, overdue_since = members, overdue_at
                elif chosen is None:
                    chosen = members
        return None if chosen is None else chosen.first(now)

    def first_unlimited(self, now: float) -> QueuedTask | None:
        """Return the first task that no limit on running batches holds back; see `is_unlimited`."""
        first = self.first(now)
        if first is None or is_unlimited(first):
            return first
        for name, members in self.classes.items():
            if members.waiting and name == URGENT_CLASS:
                return members.first(now)
            if (task := members.first_returned()) is not None:
                return task
        return None

    def take(self, task: QueuedTask, now: float) -> None:
        """``task``, of a worker now, is charged to its tenant."""
        self.waiting -= 1
        members = self.classes[task.priority_class]
        members.take(task, now)
        if task.guessed:
            self._estimate(task)
        members.charge(task, task.cost_tokens)
        task.sent_at, task.waited_s = now, now - task.waiting_since

    def key(self, task: QueuedTask, now: float) -> tuple[float, ...]:
        """Return the sort key of a task, without part 1 where all are of one class."""
        return self.classes[task.priority_class].key(task, now)

    def modest_until(self, priority_class: str) -> float:
        """Until when the class leaves room to more urgent ones, if no more tasks of these come."""
        if not self.by_class:
            return -math.inf
        more_urgent = CLASSES[: RANKS[priority_class]]
        seen_at = max((self.classes[name].seen_at for name in more_urgent), default=-math.inf)
        return seen_at + self._spare_s

    def before(self, priority_class: str, tenant: str) -> dict[str, float]:
        """Return the share of each class's waiting tasks that goes before a new task of the class and tenant."""
        if not self.by_class:
            return dict.fromkeys(CLASSES, 1.0)
        shares = dict.fromkeys(CLASSES[: RANKS[priority_class]], 1.0)
        shares[priority_class] = self.classes[priority_class].share_before(tenant)
        return shares

    def _first_to_arrive(self, now: float) -> QueuedTask | None:
        waiting = [members.first(now) for members in self.classes.values() if members.waiting]
        return min(waiting, key=lambda task: self.key(task, now), default=None)
