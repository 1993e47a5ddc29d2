"""`Order` beside an oracle: the key of its docstring, computed for every task."""

import math
import os
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.core.scheduler.entry import QueueEntry
from batcher.core.scheduler.order import Order
from sluice.settings.batching import PRESETS, Policy
from sluice.wire.subjects import CLASSES
from tests.batcher.core.scheduler.kit import order_key
from tests.support.settings import tuned

WEIGHTS = {"b": 2.0, "c": 0.5}


class History:
    def __init__(self, *policies: Policy) -> None:
        self.policies = policies
        self.policy = policies[0]
        self.order = Order(self.policy, WEIGHTS, self.estimate)
        self.waiting: dict[str, QueueEntry] = {}
        self.taken: dict[str, QueueEntry] = {}
        self.now = 0.0
        self.made = 0

    def estimate(self, task: QueueEntry) -> None:
        """A task costs more when it goes than when it came, where that was a guess."""
        task.guessed = task.max_tokens % 2 == 0
        task.cost_tokens = task.max_tokens + (9 if task.charged == 0 and task.number == 0 else 0)

    def do(self, act: str, number: int, tenant: str, name: str) -> None:
        pick = lambda tasks: tasks.pop(sorted(tasks)[number % len(tasks)])  # noqa: E731
        match act:
            case "add":
                deadline = math.inf if number % 3 == 0 else self.now + number / 8
                task = QueueEntry(f"{self.made:04}", name, deadline, tenant=tenant)
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
            case "change":
                self.policy = self.policies[number % len(self.policies)]
                self.order.change(self.policy, WEIGHTS if number % 2 else {"a": 3.0})

    def check(self) -> None:
        assert self.order.waiting == len(self.waiting)
        found = self.order.first(self.now)
        tasks = self.waiting.values()
        wanted = min(
            tasks, key=lambda t: order_key(self.order, self.policy, t, self.now), default=None
        )
        assert found is wanted, (found and found.request_id, wanted and wanted.request_id)
        for name, members in self.order.classes.items():
            costs = [task.cost_tokens for task in tasks if task.priority_class == name]
            assert (members.waiting, members.tokens) == (len(costs), sum(costs))


ACTS = ("add", "add", "add", "take", "take", "cancel", "come back", "settle", "wait", "change")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(ACTS), st.integers(0, 200), st.sampled_from("abc"), st.sampled_from(CLASSES)
    ),
    max_size=120,
)


HISTORIES = int(os.environ.get("ORDER_HISTORIES", "300"))
"""100,000 take some minutes."""


POLICIES = st.builds(
    tuned,
    st.just(Policy),
    name=st.sampled_from(sorted(PRESETS)),
    order=st.sampled_from(("fair", "fair", "fair", "class", "arrival")),
    urgent_lead_tokens=st.sampled_from((0, 30, 8192)),
    horizon_s=st.sampled_from((1.0, 60.0)),
)


@given(STEPS, st.lists(POLICIES, min_size=1, max_size=3))
@settings(max_examples=HISTORIES, deadline=None)
def test_order_prefers_the_smallest_key(steps: Any, policies: list[Policy]) -> None:
    history = History(*policies)
    for step in steps:
        history.do(*step)
        history.check()
