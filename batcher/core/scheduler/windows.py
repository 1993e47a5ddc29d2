"""The batching windows of waiting tasks: when the next one closes.

A window opens with a task and is as long as the policy says for its class. It closes earlier where the task's deadline
would be missed otherwise: the service time of the class before it, or, before that is known, half of the time to it.
"""

import math

from batcher.core.scheduler.class_order import ClassOrder, drop_stale, push
from batcher.core.scheduler.order import Order
from batcher.core.scheduler.task import Entry, QueuedTask
from sluice.settings.batching import Policy
from sluice.wire.subjects import CLASSES


class Windows:
    """Windows of all tasks that wait in an order."""

    def __init__(self, policy: Policy, order: Order) -> None:
        self._order = order
        self._lengths_s = {name: policy.window_s(name) for name in CLASSES}
        self._oldest: dict[str, list[Entry]] = {name: [] for name in CLASSES}
        """Heaps by the time at which a task began to wait."""
        self._deadlines: dict[str, list[Entry]] = {name: [] for name in CLASSES}
        """Heaps by deadline."""

    def open(self, task: QueuedTask) -> None:
        """Open the window of a task that has begun to wait."""
        name = task.priority_class
        waiting = self._order.classes[name].waiting
        push(self._oldest[name], (task.waiting_since, task.number, task), waiting)
        if task.deadline != math.inf:
            push(self._deadlines[name], (task.deadline, task.number, task), waiting)

    def length_s(self, priority_class: str) -> float:
        """Return the length of a window of the class, seconds."""
        return self._lengths_s[priority_class]

    def closes_at(self) -> float:
        """Return when the first window closes; infinite: no task waits."""
        return min(map(self._class_closes_at, self._order.classes))

    def task_closes_at(self, task: QueuedTask) -> float:
        """Return when the window of one task closes."""
        members = self._order.classes[task.priority_class]
        end = task.waiting_since + self._lengths_s[task.priority_class]
        return min(end, _latest_start(task, members))

    def _class_closes_at(self, name: str) -> float:
        oldest, deadlines = self._oldest[name], self._deadlines[name]
        drop_stale(oldest)
        drop_stale(deadlines)
        if not oldest:
            return math.inf
        end = oldest[0][0] + self._lengths_s[name]
        if not deadlines:
            return end
        return min(end, _latest_start(deadlines[0][2], self._order.classes[name]))


def _latest_start(task: QueuedTask, members: ClassOrder) -> float:
    """Return when a task must be sent to meet its deadline."""
    return task.deadline - (members.service_s or (task.deadline - task.waiting_since) / 2)
