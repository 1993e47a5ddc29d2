"""Order of the waiting requests of one model: `Order.first` has the smallest key.

Parts of the key:

1. The class. Overdue classes come first, the longest overdue before the others: a class is overdue
   if it has waiting requests and none was taken for its `aging_s`. Then interactive, standard, bulk.
2. Requests that a batcher already had and lost or returned, by deadline.
3. Urgent requests, by deadline: the time left is below `urgency` times the service time of the
   class, and the tenant is at most `urgent_lead_tokens` ahead of its fair share.
4. The tenant's virtual time: the tenant that got the fewest tokens for its weight comes first.
5. The deadline, at most `horizon_s` after the request reached its gateway, so that a distant
   deadline does not wait behind everything that arrives much later.
6. The order of arrival.

`order: class` leaves out 3 to 5, `order: arrival` leaves out 1 as well.

Fair shares are start-time fair queueing, in tokens. Every tenant has a virtual time: the tokens it
was given, divided by its weight. A tenant without waiting requests earns no credit: when it
returns, it starts where the others are. The estimated cost of a request is charged when it is taken, and
corrected when its answer has ended (P. Goyal, H. Vin, H. Cheng, "Start-time Fair Queueing", 1996;
for tokens of language models: Y. Sheng et al., "Fairness in Serving Large Language Models", 2024).

With n requests of t tenants, `add`, `take`, `cancel` and `first` take O(log n) and move O(t)
entries of a short list, amortized: entries of requests that no longer wait stay in the heaps until
they reach the front or fill most of a heap.
"""

import math
from collections.abc import Callable, Mapping
from itertools import chain

from batcher.core.scheduler.class_order import ClassOrder
from batcher.core.scheduler.entry import QueueEntry
from sluice.settings.batching import Policy
from sluice.wire.subjects import CLASSES, RANKS, URGENT_CLASS


def is_unlimited(entry: QueueEntry) -> bool:
    """Return whether a request ignores limits on running batches: interactive and returned ones do.

    A request that is tried for the last time counts as returned.
    """
    return entry.returned or entry.priority_class == URGENT_CLASS


class Order:
    """All waiting requests of a model, class by class. Times are monotonic seconds.

    Attributes:
        policy: the policy of the model.
        classes: by name, most urgent first.
        waiting: number of waiting requests.
    """

    def __init__(
        self, policy: Policy, weights: Mapping[str, float], estimate: Callable[[QueueEntry], None]
    ) -> None:
        """Create an empty order.

        Args:
            policy: the policy of the model.
            weights: the tenants whose weight is not 1.
            estimate: sets the costs of a request when it starts to wait and, if they were guesses, again
                when it is taken.
        """
        self.policy = policy
        self.classes = {name: ClassOrder(name, policy, weights) for name in CLASSES}
        self.waiting = 0
        self._estimate = estimate
        self._numbers = 0

    @property
    def by_class(self) -> bool:
        """Whether classes make a difference."""
        return self.policy.order != "arrival"

    def change(self, policy: Policy, weights: Mapping[str, float]) -> list[QueueEntry]:
        """Continue under another policy: waiting times, fair shares and service times stay.

        Returns:
            The waiting requests in order of arrival.
        """
        self.policy = policy
        waiting = [members.change(policy, weights) for members in self.classes.values()]
        return sorted(chain.from_iterable(waiting), key=lambda entry: entry.number)

    def add(self, entry: QueueEntry, now: float) -> None:
        """Add a request."""
        entry.waiting_since = now  # Before the number: other threads look at tasks that have one.
        self._numbers = entry.number = self._numbers + 1
        self.waiting += 1
        self._estimate(entry)
        self.classes[entry.priority_class].add(entry, now)

    def cancel(self, entry: QueueEntry) -> None:
        """Remove a waiting request."""
        self.waiting -= 1
        self.classes[entry.priority_class].cancel(entry)

    def first(self, now: float) -> QueueEntry | None:
        """Return the request with the smallest key, or None if none waits."""
        if not self.by_class:
            waiting = [members.first(now) for members in self.classes.values() if members.waiting]
            return min(waiting, key=lambda entry: self.key(entry, now), default=None)
        chosen: ClassOrder | None = None
        overdue_since = math.inf
        for members in self.classes.values():
            if members.waiting:
                overdue_at = members.overdue_at
                # Part 1 of the key: the class that is overdue longest, else the most urgent one with requests.
                if overdue_at <= now and overdue_at < overdue_since:
                    chosen, overdue_since = members, overdue_at
                elif chosen is None:
                    chosen = members
        return None if chosen is None else chosen.first(now)

    def first_unlimited(self, now: float) -> QueueEntry | None:
        """Return the first request that ignores limits on running batches; see `is_unlimited`."""
        first = self.first(now)
        if first is None or is_unlimited(first):
            return first
        for name, members in self.classes.items():
            if members.waiting and name == URGENT_CLASS:
                return members.first(now)
            if (entry := members.first_returned()) is not None:
                return entry
        return None

    def take(self, entry: QueueEntry, now: float) -> None:
        """Remove a request that goes to a worker, and charge it to its tenant."""
        self.waiting -= 1
        members = self.classes[entry.priority_class]
        members.take(entry, now)
        # Answers of the tenant may have ended since it arrived: charge what is known now.
        if entry.guessed:
            self._estimate(entry)
        members.charge(entry, entry.cost_tokens)
        entry.sent_at, entry.waited_s = now, now - entry.waiting_since

    def key(self, entry: QueueEntry, now: float) -> tuple[float, ...]:
        """Return the sort key of a request, without part 1 (all of one class share it)."""
        return self.classes[entry.priority_class].key(entry, now)

    def reserve_until(self, priority_class: str) -> float:
        """Return until when the class leaves capacity free for more urgent requests, if no more of them arrive."""
        if not self.by_class:
            return -math.inf
        # Classes are listed from the most to the least urgent.
        more_urgent = CLASSES[: RANKS[priority_class]]
        seen_at = max((self.classes[name].seen_at for name in more_urgent), default=-math.inf)
        return seen_at + self.policy.spare_s

    def before(self, priority_class: str, tenant: str) -> dict[str, float]:
        """Return, by class, the share of waiting requests that goes before a new request of this class and tenant."""
        if not self.by_class:
            return dict.fromkeys(CLASSES, 1.0)
        shares = dict.fromkeys(CLASSES[: RANKS[priority_class]], 1.0)
        shares[priority_class] = self.classes[priority_class].share_before(tenant)
        return shares
