"""Expected waits of new requests, from free slots, the requests in front and those in workers.

1. While a worker grants a slot that no waiting request takes, a new request of the class does not wait.
2. Otherwise it waits for a slot. Requests in workers free theirs one by one; waiting requests in
   front of it take the first ones: those of more urgent classes, and of its own class the share
   that goes before its tenant.
3. Less urgent requests that can be preempted hold no slots.
4. More urgent requests keep arriving at the recent rate, and take their part of the slots.
5. While nothing is measured (`batcher.core.scheduler.speed`) the wait is unknown and reported as 0.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final

from batcher.core.scheduler.capacity import Capacity, capacity_of
from batcher.core.scheduler.entry import Batch, Decision, QueueEntry
from batcher.core.scheduler.order import Order
from batcher.core.scheduler.speed import ClassSpeed, Occupancy, Slots, Speeds
from sluice.internal.v1 import control_pb2
from sluice.wire.subjects import RANKS, URGENT_CLASS

NO_TENANT: Final = ""
"""A tenant with nothing waiting; no request has this name."""
BUSY_MAX: Final = 0.75
"""Upper bound of the share of slots that more urgent classes are expected to take."""
TENANTS_REPORTED: Final = 64
"""Tenants per class whose expected wait is reported: those with the most waiting."""


class ExpectedWaits:
    """Expected waits of one model's queue.

    Attributes:
        speeds: of its workers, as measured.
    """

    def __init__(self, order: Order, window_s: Callable[[str, float], float]) -> None:
        """Create it; `window_s` returns how long the policy lets a new request of a class wait for others."""
        self._order, self._window_s = order, window_s
        self.speeds = Speeds()
        self._occupancy = Occupancy()
        self._sent: dict[QueueEntry, None] = {}
        """Requests in workers, in order of their batches."""
        self._is_blocked = False
        """Whether requests wait for capacity, as of the last decision."""

    # Events.

    def on_decision(self, decision: Decision, now: float) -> None:
        """Handle a decision: its batch has gone to a worker, or no batch was formed."""
        # A task that waits for a policy's window does not wait for capacity.
        self._is_blocked = decision.batch is None and decision.wake_at is None
        self._occupancy.watch(now)
        for entry in decision.batch.entries if decision.batch else ():
            self.speeds.begin(entry, now)
            self._sent[entry] = None
            self._occupancy.add(entry.priority_class, 1)

    def watch(self, now: float, *, has_capacity: bool) -> None:
        """Record whether workers grant more, once nothing more can be sent."""
        self._is_blocked = self._is_blocked and self._order.waiting > 0
        self.speeds.watch(now, is_full=self._is_blocked or not has_capacity)
        self._occupancy.watch(now)

    def on_left(self, entry: QueueEntry, now: float) -> None:
        """Handle a request that left its worker."""
        self._occupancy.watch(now)
        del self._sent[entry]
        self._occupancy.add(entry.priority_class, -1)

    # Reports.

    def class_reports(
        self, now: float, capacities: Sequence[Capacity], closed_s: float = 0.0
    ) -> Iterator[control_pb2.ClassReport]:
        """Yield the state of each class, most urgent first.

        Args:
            now: monotonic seconds.
            capacities: capacities of the live workers.
            closed_s: how long no worker will compute, in seconds.
        """
        for name, members in self._order.classes.items():
            free, waits_s = self.free_slots(name, capacities), dict[str, float]()
            if not free:
                slots = self._slots(name, capacities, now)
                for tenant in (NO_TENANT, *members.busiest(TENANTS_REPORTED)):
                    waits_s[tenant] = self._wait_s(name, tenant, slots, now)
            wait_s = waits_s.pop(NO_TENANT, 0.0)
            speed = self.speeds.of_class(name, now) or ClassSpeed()
            yield control_pb2.ClassReport(
                priority_class=name,
                queued=members.waiting,
                queued_tokens=members.tokens,
                expected_wait_ms=(closed_s + wait_s) * 1e3,
                tenant_wait_ms={
                    tenant: 1e3 * (closed_s + tenant_s)
                    for tenant, tenant_s in waits_s.items()
                    if tenant_s > wait_s
                },
                free_rows=free,
                first_token_ms=speed.base_s * 1e3,
                prompt_token_ms=speed.prompt_token_s * 1e3,
                token_ms=speed.token_s * 1e3,
            )

    def tokens_per_s(self, now: float) -> float:
        """Return the token rate while all granted capacity is used; 0 otherwise, or while unknown."""
        return self.speeds.tokens_per_s(len(self._sent), now) if self.speeds.is_full else 0.0

    def free_slots(self, priority_class: str, capacities: Sequence[Capacity]) -> int:
        """Return how many new requests of the class could be sent at once."""
        rank = RANKS[priority_class]
        classes = list(self._order.classes.values())[: rank + 1]
        waiting = sum(members.waiting for members in classes)
        if waiting and self._is_blocked:
            return 0
        free = sum(max(0, capacity_of(worker, rank).free_slots) for worker in capacities)
        return max(0, int(free) - waiting)

    # Inside.

    def _wait_s(self, priority_class: str, tenant: str, slots: Slots, now: float) -> float:
        own = self.speeds.of_class(priority_class, now)
        if own is None:
            return 0.0
        entries = seconds = 0.0
        for name, share in self._order.before(priority_class, tenant).items():
            members, speed = self._order.classes[name], self.speeds.of_class(name, now) or own
            answers = max(0, members.tokens - members.prefill_tokens)
            entries += share * members.waiting
            seconds += share * speed.time_s(members.waiting, members.prefill_tokens, answers)
        wait_s = slots.wait_s(entries, seconds / entries if entries else 0.0)
        if len(slots):
            # Requests of more urgent classes keep arriving meanwhile, and go first.
            busy = self._occupancy.before(priority_class) / len(slots)
            wait_s /= 1 - min(busy, BUSY_MAX)
        return max(wait_s, self._window_s(priority_class, now))

    def _slots(self, priority_class: str, capacities: Sequence[Capacity], now: float) -> Slots:
        """Return the slots of live workers that a request of the class waits for."""
        rank, workers = RANKS[priority_class], {capacity.worker for capacity in capacities}
        preempts = any(capacity.urgent for capacity in capacities)
        # With a limit on running batches, the next batch goes only when a whole one has ended.
        policy = self._order.policy
        is_limited = policy.batches_running_max is not None and priority_class != URGENT_CLASS
        left_s = defaultdict[Batch[QueueEntry], list[float]](list)
        for entry in self._sent:
            assert entry.batch is not None, "it was sent"
            # Otherwise the worker was lost, or gets no more requests.
            is_live = entry.batch.worker in workers
            # Less urgent requests hold no slot where they can be preempted.
            if is_live and (not preempts or RANKS[entry.priority_class] <= rank):
                left_s[entry.batch].append(self._left_s(entry, priority_class, now))
        if is_limited:
            return Slots([max(own_s) for own_s in left_s.values() for _ in own_s])
        return Slots(chain.from_iterable(left_s.values()))

    def _left_s(self, entry: QueueEntry, priority_class: str, now: float) -> float:
        """Return how long a request in a worker keeps its slot, in seconds.

        One that takes longer than expected is assumed to take as long again, at most until `max_tokens`.
        """
        speeds = self.speeds
        speed = speeds.of_class(entry.priority_class, now) or speeds.of_class(priority_class, now)
        if speed is None:
            return 0.0
        prompt, spent_s = entry.prefill_tokens, now - entry.sent_at
        expected_s = speed.time_s(1, prompt, entry.cost_tokens - prompt)
        longest_s = speed.time_s(1, prompt, entry.prompt_tokens + entry.max_tokens - prompt)
        if spent_s < expected_s:
            return expected_s - spent_s
        return min(spent_s, max(0.0, longest_s - spent_s))
