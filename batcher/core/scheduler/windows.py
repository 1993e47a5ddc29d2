"""Batching windows of waiting requests: when the next one closes.

A window opens with a request and lasts as long as the policy says for its class. It closes earlier
if the request would otherwise miss its deadline: by the service time of the class or, while that is
unknown, at half of the time left.
"""

import math

from batcher.core.scheduler.class_order import ClassOrder, drop_stale, push_item
from batcher.core.scheduler.entry import HeapItem, QueueEntry
from batcher.core.scheduler.order import Order
from sluice.settings.batching import Policy
from sluice.wire.subjects import CLASSES


class BatchWindows:
    """Windows of all requests that wait in an order."""

    def __init__(self, policy: Policy, order: Order) -> None:
        self._order = order
        self._policy = policy
        self._oldest: dict[str, list[HeapItem]] = {name: [] for name in CLASSES}
        """Heaps by the time at which a request started to wait."""
        self._deadlines: dict[str, list[HeapItem]] = {name: [] for name in CLASSES}
        """Heaps by deadline."""

    def open(self, entry: QueueEntry) -> None:
        """Open the window of a request that starts to wait."""
        name = entry.priority_class
        waiting = self._order.classes[name].waiting
        push_item(self._oldest[name], (entry.waiting_since, entry.number, entry), waiting)
        if entry.deadline != math.inf:
            push_item(self._deadlines[name], (entry.deadline, entry.number, entry), waiting)

    def closes_at(self) -> float:
        """Return when the first window closes; infinite if no request waits."""
        return min(map(self._class_closes_at, self._order.classes))

    def entry_closes_at(self, entry: QueueEntry) -> float:
        """Return when the window of one request closes."""
        members = self._order.classes[entry.priority_class]
        end = entry.waiting_since + self._policy.window_s(entry.priority_class)
        return min(end, _latest_start(entry, members))

    def _class_closes_at(self, name: str) -> float:
        oldest, deadlines = self._oldest[name], self._deadlines[name]
        drop_stale(oldest)
        drop_stale(deadlines)
        if not oldest:
            return math.inf
        # The oldest request closes the window, unless a deadline needs it earlier.
        end = oldest[0][0] + self._policy.window_s(name)
        if not deadlines:
            return end
        return min(end, _latest_start(deadlines[0][2], self._order.classes[name]))


def _latest_start(entry: QueueEntry, members: ClassOrder) -> float:
    """Return when a request must be sent to meet its deadline."""
    return entry.deadline - (members.service_s or (entry.deadline - entry.waiting_since) / 2)
