"""`Order` beside an oracle: the key of its docstring, computed for every task."""

import math
import os
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.core.scheduler.order import Order
from batcher.core.scheduler.task import QueuedTask
from sluice.settings.batching import Policy
from sluice.wire.subjects import CLASSES, RANKS

WEIGHTS = {"b": 2.0, "c": 0.5}


def key(order: Order, policy: Policy, task: QueuedTask, now: float) -> tuple[float, ...]:
    members, tenant = order.classes[task.priority_class], task.share
    overdue_at = members.passed_since + members.policy.aging_s
    rank = RANKS[task.priority_class]
    of_class = (0.0, overdue_at, rank) if overdue_at <= now else (1.0, rank, rank)
    if task.returned:
        return *of_class, 0, task.deadline, 0.0, task.number
    if policy.order == "class":
        return *of_class, 1, task.number
    is_near = task.deadline <= now + policy.urgency * members.service_s
    if is_near and tenant.time - policy.urgent_lead_tokens / tenant.weight <= members._time:
        return *of_class, 1, task.deadline, 0.0, task.number
    return *of_class, 2, tenant.time, task.due, task.number


class History:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.order = Order(policy, WEIGHTS, self.estimate)
        self.waiting: dict[str, QueuedTask] = {}
        self.taken: dict[str, QueuedTask] = {}
        self.now = 0.0
        self.made = 0

    def estimate(self, task: QueuedTask) -> None:
        """A task costs more when it goes than when it came, where that was a guess."""
        task.guessed = task.max_tokens % 2 == 0
        task.cost_tokens = task.max_tokens + (9 if task.charged == 0 and task.number == 0 else 0)

    def do(self, act: str, number: int, tenant: str, name: str) -> None:
        pick = lambda tasks: tasks.pop(sorted(tasks)[number % len(tasks)])  # noqa: E731
        match act:
            case "add":
                deadline = math.inf if number % 3 == 0 else self.now + number / 8
                task = QueuedTask(f"{self.made:04}", name, deadline, tenant=tenant)
                task.age_s = number / 4
                self.made += 1
                task.max_tokens = 1 + number % 50
                self.order.add(task, self.now)
                self.waiting[task.request_id] = task
            case "take" if self.waiting:
                task = self.order.first(self.now)
                self.order.take(task, self.now)
                self.taken[task.request_id] = self.waiting.pop(task.request_id)
            case "cancel" if self.waiting:
                self.order.cancel(pick(self.waiting))
            case "come back" if self.taken:
                task = pick(self.taken)
                task.returned = True
                self.order.add(task, self.now)
                self.waiting[task.request_id] = task
            case "settle" if self.taken:
                task = pick(self.taken)
                self.order.classes[task.priority_class].charge(task, number)
                self.order.classes[task.priority_class].served(number / 16)
            case "wait":
                self.now += number / 16

    def check(self) -> None:
        assert self.order.waiting == len(self.waiting)
        found = self.order.first(self.now)
        tasks = self.waiting.values()
        wanted = min(tasks, key=lambda t: key(self.order, self.policy, t, self.now), default=None)
        assert found is wanted, (found and found.request_id, wanted and wanted.request_id)
        for name, members in self.order.classes.items():
            costs = [task.cost_tokens for task in tasks if task.priority_class == name]
            assert (members.waiting, members.tokens) == (len(costs), sum(costs))


ACTS = ("add", "add", "add", "take", "take", "cancel", "come back", "settle", "wait")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(ACTS), st.integers(0, 200), st.sampled_from("abc"), st.sampled_from(CLASSES)
    ),
    max_size=120,
)


HISTORIES = int(os.environ.get("ORDER_HISTORIES", "300"))
"""100,000 take some minutes."""


@given(
    STEPS,
    st.sampled_from((0, 30, 8192)),
    st.sampled_from((1.0, 60.0)),
    st.sampled_from(("fair", "fair", "fair", "class")),
)
@settings(max_examples=HISTORIES, deadline=None)
def test_the_first_task_is_the_one_with_the_smallest_key(
    steps: Any, lead: int, horizon_s: float, order: Any
) -> None:
    history = History(Policy(order=order, urgent_lead_tokens=lead, horizon_s=horizon_s))
    for step in steps:
        history.do(*step)
        history.check()
