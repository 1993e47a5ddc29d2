"""What a new task would wait: free rows, the tasks before it, and the rows in workers whose slots it waits for.

1. While a worker grants a row that no waiting task takes, a new task of the class waits for nothing.
2. Else it waits for a slot. The rows in workers give theirs back one by one; waiting tasks that go before it take the
   first ones. These are the tasks of more urgent classes, and of its own class the share that goes before its tenant.
3. Where less urgent rows give way to the class, they hold no slots.
4. More urgent tasks go on coming while it waits, as many as lately: they take their part of the slots.
5. While nothing is measured (`batcher.core.scheduler.speed`) the wait is not known, and is said to be 0.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from batcher.core.scheduler.capacity import Capacity, room_of
from batcher.core.scheduler.order import Order
from batcher.core.scheduler.speed import Occupancy, Peak, RowSpeed, Slots, Speeds
from batcher.core.scheduler.task import Batch, Decision, QueuedTask
from sluice.internal.v1 import control_pb2
from sluice.settings.batching import Policy
from sluice.wire.subjects import RANKS, URGENT_CLASS

NOBODY: Final = ""
"""A tenant that has nothing waiting: no task is of it."""
BUSY_MAX: Final = 0.75
"""Upper bound of the share of slots that more urgent classes are expected to take from a wait."""
TENANTS_REPORTED: Final = 64
"""Tenants of a class whose expected wait is reported: those with the most waiting."""


class ExpectedWaits:
    """Expected waits of one model's queue.

    Attributes:
        is_full: whether all that workers grant is used.
    """

    def __init__(
        self, order: Order, policy: Policy, window_s: Callable[[str, float], float]
    ) -> None:
        """``window_s``: how long the policy lets a new task of a class wait for others."""
        self._order, self._policy, self._window_s = order, policy, window_s
        self._speeds = Speeds()
        self._peak = Peak()
        self._occupancy = Occupancy()
        self._sent: dict[str, QueuedTask] = {}
        """Tasks that workers have."""
        self._is_blocked = False
        """Whether tasks wait for capacity, as the last decision says."""

    def change(self, policy: Policy) -> None:
        """Continue under another policy: what is measured stays."""
        self._policy = policy

    @property
    def is_full(self) -> bool:
        """Whether all that workers grant is used."""
        return self._speeds.is_full

    # Events.

    def decided(self, decision: Decision, now: float) -> None:
        """Take a decision: a batch went to a worker, or none could."""
        # A task that waits for a policy's window does not wait for capacity.
        self._is_blocked = decision.batch is None and decision.wake_at is None
        self._occupancy.watch(now)
        for task in decision.batch.rows if decision.batch else ():
            self._speeds.begin(task, now)
            self._sent[task.request_id] = task
            self._occupancy.add(task.priority_class, 1)
            self._peak.see(len(self._sent), now)

    def watch(self, now: float, *, has_room: bool) -> None:
        """Note, once nothing more can be sent, whether workers grant more rows."""
        self._is_blocked = self._is_blocked and self._order.waiting > 0
        self._speeds.watch(now, is_full=self._is_blocked or not has_room)
        self._occupancy.watch(now)

    def left(self, task: QueuedTask, now: float | None = None) -> None:
        """Forget a task that has left its worker, ``now`` if that is known."""
        if now is not None:
            self._occupancy.watch(now)
        del self._sent[task.request_id]
        self._occupancy.add(task.priority_class, -1)

    def measure(self, task: QueuedTask, tokens: int, decode_s: float, now: float) -> None:
        """Measure a task that has ended by itself; see `Speeds.end`."""
        self._speeds.end(task, tokens, decode_s, now)

    # Reports.

    def class_reports(
        self, now: float, capacities: Sequence[Capacity], closed_s: float = 0.0
    ) -> Iterator[control_pb2.ClassReport]:
        """Yield the state of each class, most urgent first; ``closed_s``: how long all workers compute nothing."""
        for name, members in self._order.classes.items():
            free, waits_s = self.free_rows(name, capacities), dict[str, float]()
            if not free:
                slots = self._slots(name, capacities, now)
                for tenant in (NOBODY, *members.busiest(TENANTS_REPORTED)):
                    waits_s[tenant] = self._wait_s(name, tenant, slots, now)
            wait_s = waits_s.pop(NOBODY, 0.0)
            speed = self._speeds.of_class(name, now) or RowSpeed()
            yield control_pb2.ClassReport(
                priority_class=name,
                queued=members.waiting,
                queued_tokens=members.tokens,
                expected_wait_ms=(closed_s + wait_s) * 1e3,
                tenant_wait_ms={
                    one: 1e3 * (closed_s + s) for one, s in waits_s.items() if s > wait_s
                },
                free_rows=free,
                first_token_ms=speed.base_s * 1e3,
                prompt_token_ms=speed.prompt_token_s * 1e3,
                token_ms=speed.token_s * 1e3,
            )

    def tokens_per_s(self, now: float) -> float:
        """Return the rate of the queue's rows while all granted capacity is used; 0: it is not, or not known."""
        return self._speeds.tokens_per_s(len(self._sent), now) if self.is_full else 0.0

    def free_rows(self, priority_class: str, capacities: Sequence[Capacity]) -> int:
        """Return how many new tasks of the class could be sent at once."""
        rank = RANKS[priority_class]
        waiting = sum([one.waiting for one in self._order.classes.values()][: rank + 1])
        if waiting and self._is_blocked:
            return 0
        free = sum(max(0, room_of(each, rank).free_rows) for each in capacities)
        return max(0, int(free) - waiting)

    def expected_wait(
        self,
        priority_class: str,
        now: float,
        capacities: Sequence[Capacity],
        tenant: str = NOBODY,
    ) -> float:
        """Return the expected wait of a new task, seconds; 0 also when it is not known."""
        if self.free_rows(priority_class, capacities):
            return 0.0
        slots = self._slots(priority_class, capacities, now)
        return self._wait_s(priority_class, tenant, slots, now)

    # Inside.

    def _wait_s(self, priority_class: str, tenant: str, slots: Slots, now: float) -> float:
        own = self._speeds.of_class(priority_class, now)
        if own is None:
            return 0.0
        tasks = seconds = 0.0
        for name, share in self._order.before(priority_class, tenant).items():
            members, speed = self._order.classes[name], self._speeds.of_class(name, now) or own
            answers = max(0, members.tokens - members.prefill_tokens)
            tasks += share * members.waiting
            seconds += share * speed.time_s(members.waiting, members.prefill_tokens, answers)
        wait_s = slots.wait_s(tasks, seconds / tasks if tasks else 0.0)
        if len(slots):
            # Tasks of more urgent classes go on coming meanwhile, and go first.
            busy = self._occupancy.before(priority_class) / len(slots)
            wait_s /= 1 - min(busy, BUSY_MAX)
        return max(wait_s, self._window_s(priority_class, now))

    def _slots(self, priority_class: str, capacities: Sequence[Capacity], now: float) -> Slots:
        """Return the slots of live workers that a task of the class waits for."""
        rank, workers = RANKS[priority_class], {each.worker for each in capacities}
        gives_way = self._policy.takes_slots and any(each.urgent for each in capacities)
        # The next batch of the class goes when one has ended.
        is_limited = self._policy.batches_running_max is not None and priority_class != URGENT_CLASS
        left_s = list[float]()
        for batch, tasks in self._batches().items():
            if batch.worker not in workers:
                continue  # it is lost, or gets no more rows
            mine = [t for t in tasks if not gives_way or RANKS[t.priority_class] <= rank]
            own_s = [self._left_s(task, priority_class, now) for task in mine]
            if own_s and is_limited:
                own_s = [max(own_s)] * len(own_s)
            left_s += own_s
        # Places that rows had a moment ago: a worker gives them back together, or just now.
        more = 0 if gives_way else self._peak.most(now) - len(left_s)
        return Slots([*left_s, *[min(left_s, default=0.0)] * more])

    def _left_s(self, task: QueuedTask, priority_class: str, now: float) -> float:
        """Return how long ``task``, which a worker has, keeps its slot.

        One that takes longer than expected is assumed to take as much again.
        """
        speeds = self._speeds
        speed = speeds.of_class(task.priority_class, now) or speeds.of_class(priority_class, now)
        if speed is None:
            return 0.0
        prompt, spent_s = task.prefill_tokens, now - task.sent_at
        expected_s = speed.time_s(1, prompt, task.cost_tokens - prompt)
        longest_s = speed.time_s(1, prompt, task.prompt_tokens + task.max_tokens - prompt)
        if spent_s < expected_s:
            return expected_s - spent_s
        return min(spent_s, max(0.0, longest_s - spent_s))

    def _batches(self) -> dict[Batch[QueuedTask], list[QueuedTask]]:
        """Return the tasks that workers have, by batch."""
        batches: dict[Batch[QueuedTask], list[QueuedTask]] = {}
        for task in self._sent.values():
            assert task.batch is not None, "it was sent"
            batches.setdefault(task.batch, []).append(task)
        return batches
