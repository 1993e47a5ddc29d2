"""A queue and its workers, driven by one seed, with checks after every decision.

It draws a policy, tenants, tasks and faults: workers that stall, die and come back, cancels, a clock that jumps.
It keeps its own books, and compares:

- a task is handed out only while it waits, never twice at a time, and never after its deadline;
- every task ends: handed out and finished, cancelled, or expired at its deadline;
- no batch is beyond what the policy and the worker allow;
- what the queue says of itself is true.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Any

from batcher.core.scheduler.capacity import Capacity, UsableCapacity
from batcher.core.scheduler.entry import Batch, BatchCause, QueueEntry
from batcher.core.scheduler.order import is_unlimited
from batcher.core.scheduler.placement import BATCHES_IN_FLIGHT_MAX
from batcher.core.scheduler.queue import Queue
from model_workers.grants import class_capacities
from sluice.internal.v1 import worker_pb2
from sluice.settings.batching import PRESETS, Policy
from sluice.wire.subjects import CLASSES, RANKS, URGENT_CLASS
from tests.batcher.core.scheduler.kit import come_back, order_key
from tests.support.settings import tuned

SLOTS = 8
PLACES = 12
CACHE_TOKENS = 2000
TENANTS = {"a": 1.0, "b": 2.0, "c": 0.5}


@dataclass
class Known:
    """A task as the harness knows it."""

    task: QueueEntry
    answer: int
    since: float
    produced: int
    worker: "WorkerConnection | None" = None

    @property
    def waits(self) -> bool:
        return self.worker is None

    @property
    def prefill(self) -> int:
        return self.task.prompt_tokens + self.produced


@dataclass
class WorkerConnection:
    """Rows it computes, with their reservations, and batches it has not answered."""

    name: str
    alive: bool = True
    stalled_until: float = 0.0
    rows: dict[str, QueueEntry] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    preempts: bool = True
    unanswered: list[int] = field(default_factory=list)
    batches: dict[int, set[str]] = field(default_factory=dict)
    life: int = 0

    def capacity(self) -> Capacity:
        """What its grants leave: rows that were sent are in its load at once."""
        fresh = [row for name, row in self.rows.items() if self.is_new(name)]
        load = worker_pb2.WorkerLoad(
            slots=SLOTS,
            running=len(self.rows),
            max_tasks=PLACES,
            block_tokens=1,
            free_blocks=max(0, CACHE_TOKENS - sum(row.cache_tokens for row in self.rows.values())),
            classes=map(self.load_of, range(len(CLASSES))) if self.preempts else (),
        )
        waiting = sum(row.prefill_tokens for row in fresh)
        *urgent, last = (
            UsableCapacity(free.tasks, free.tokens, waiting) for free in class_capacities(load)
        )
        return Capacity(
            self.name,
            *last,
            running=len(self.rows),
            batches_in_flight=len(self.unanswered),
            batches_running=sum(map(bool, self.batches.values())),
            urgent=urgent if self.preempts else (),
        )

    def load_of(self, rank: int) -> worker_pb2.ClassLoad:
        names = [name for name in self.rows if self.ranks[name] == rank]
        cache = sum(self.rows[name].cache_tokens for name in names)
        return worker_pb2.ClassLoad(running=len(names), running_tokens=cache)

    def is_new(self, request_id: str) -> bool:
        return any(request_id in self.batches[number] for number in self.unanswered)


class QueueFuzz:
    """Everything, and the clock."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.policy = drawn_policy(self.chance)
        self.queue = Queue(self.policy, TENANTS)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = 0
        self.batches = 0
        self.tasks: dict[str, Known] = {}
        preempts = self.chance.random() < 0.7
        self.workers = [
            WorkerConnection(f"w{n}", preempts=preempts) for n in range(self.chance.randrange(1, 4))
        ]
        self.plan()

    def plan(self) -> None:
        chance = self.chance
        for _ in range(chance.randrange(20, 120)):
            self.at(chance.random() * 20, self.arrive)
        for _ in range(chance.randrange(4)):
            self.at(chance.random() * 25, self.kill)
        for _ in range(chance.randrange(4)):
            self.at(chance.random() * 25, self.stall)
        for _ in range(chance.randrange(3)):
            self.at(chance.random() * 25, self.jump)
        if chance.random() < 0.3:
            self.at(chance.random() * 25, self.reconfigure)

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        self.numbers += 1
        heappush(self.events, (self.now + delay_s, self.numbers, act))

    def run(self) -> None:
        """Plays until every task has ended."""
        while self.events or self.tasks:
            assert self.events, f"nothing will happen any more, but {sorted(self.tasks)} are left"
            at, _, act = heappop(self.events)
            self.now = max(self.now, at)
            assert self.now < 1000, sorted(self.tasks)
            act()
            self.decide()

    # What happens.

    def arrive(self) -> None:
        chance = self.chance
        answer = chance.randrange(1, 120)
        produced = chance.choice([0, 0, 0, chance.randrange(answer)])
        task = QueueEntry(
            f"t{self.numbers}",
            chance.choice(CLASSES),
            chance.choice([math.inf, self.now + chance.random() * 30]),
            tenant=chance.choice(["a", "a", "a", "b", "c"]),
            workload=chance.choice(["", "short"]),
            prompt_tokens=int(min(900.0, chance.lognormvariate(4.5, 1.0))) + 1,
            max_tokens=answer + chance.randrange(200),
            produced_tokens=produced,
            prefix=chance.choice([0, 1, 2]),
        )
        self.numbers += 1
        self.tasks[task.request_id] = Known(task, answer, self.now, produced)
        self.queue.add(task, self.now)
        if chance.random() < 0.1:
            self.at(chance.random() * 5, lambda: self.cancel(task.request_id))

    def cancel(self, request_id: str) -> None:
        known = self.tasks.pop(request_id, None)
        if known is None:
            return
        if known.worker is None:
            self.queue.cancel(known.task)
        else:
            self.queue.finish(known.task, known.produced, self.now, whole=False)
            self.lands(known.worker, request_id)

    def lands(self, worker: WorkerConnection, request_id: str) -> None:
        del worker.rows[request_id]
        for number in [n for n, members in worker.batches.items() if request_id in members]:
            worker.batches[number].discard(request_id)
            if not worker.batches[number] and number not in worker.unanswered:
                del worker.batches[number]

    def finish(self, worker: WorkerConnection, life: int, request_id: str) -> None:
        if life != worker.life or request_id not in worker.rows:
            return
        if worker.stalled_until > self.now:
            self.at(worker.stalled_until - self.now, lambda: self.finish(worker, life, request_id))
            return
        known = self.tasks.pop(request_id)
        self.queue.finish(known.task, known.answer, self.now, whole=self.chance.random() < 0.9)
        self.lands(worker, request_id)

    def answer(self, worker: WorkerConnection, life: int, number: int) -> None:
        if life == worker.life:
            worker.unanswered.remove(number)
            if not worker.batches[number]:
                del worker.batches[number]

    def kill(self) -> None:
        worker = self.chance.choice(self.workers)
        worker.alive, worker.life = False, worker.life + 1
        lost, worker.rows = worker.rows, {}
        worker.unanswered.clear()
        worker.batches.clear()
        for request_id in lost:
            known = self.tasks[request_id]
            known.produced = self.chance.randrange(known.produced, known.answer + 1)
            known.worker, known.since = None, self.now
            known.task = come_back(self.queue, known.task, known.produced, self.now)
        self.at(self.chance.random() * 5, lambda: self.revive(worker))

    def revive(self, worker: WorkerConnection) -> None:
        worker.alive = True

    def stall(self) -> None:
        self.chance.choice(self.workers).stalled_until = self.now + self.chance.random() * 5

    def jump(self) -> None:
        self.now += self.chance.random() * 15

    def reconfigure(self) -> None:
        self.policy = drawn_policy(self.chance)
        self.queue.reconfigure(self.policy, TENANTS)

    # Decisions, and what must be true of them.

    def decide(self) -> None:
        while True:
            self.expire()
            capacities = [worker.capacity() for worker in self.workers if worker.alive]
            wanted = self.first_in_order()
            decision = self.queue.next_batch(self.now, capacities)
            if decision.batch is None:
                break
            (capacity,) = [r for r in capacities if r.worker == decision.batch.worker]
            self.check_batch(decision.batch, capacity)
            self.check_first(decision.batch, capacity, wanted)
            self.send(decision.batch)
            self.check_books()
        has_capacity = any(capacity.free_slots > 0 for capacity in capacities)
        self.queue.waits.watch(self.now, has_capacity=has_capacity)
        self.check_books()
        self.check_alive(decision.wake_at, capacities)
        if decision.wake_at is not None:
            self.at(max(0.0, decision.wake_at - self.now), lambda: None)

    def first_in_order(self) -> QueueEntry | None:
        """The task with the smallest key."""
        waiting = [known.task for known in self.tasks.values() if known.waits]
        key = partial(order_key, self.queue.order, self.policy, now=self.now)
        return min(waiting, key=lambda task: key(task=task), default=None)

    def is_limited(self, capacity: Capacity) -> bool:
        """Whether the policy lets the worker have no more batches."""
        most = None if self.policy.is_continuous else self.policy.batches_running_max
        return most is not None and capacity.batches_running >= most

    def check_first(
        self, batch: Batch[QueueEntry], capacity: Capacity, wanted: QueueEntry | None
    ) -> None:
        """Under every policy a batch begins with the first task in order.

        There are two exceptions: what a limit on running batches does not hold back, and a full bucket of the class.
        """
        assert wanted is not None
        first = batch.entries[0]
        if first is wanted or self.is_limited(capacity):
            return
        assert self.policy.has_padding
        assert batch.cause in (BatchCause.FULL, BatchCause.WINDOW_OVER)
        assert self.policy.order == "arrival" or first.priority_class == wanted.priority_class
        assert not wanted.returned

    def room(self, capacity: Capacity, members: list[Known]) -> UsableCapacity | Capacity:
        """What the class of the most urgent row may take of a worker."""
        policy, rank = self.policy, min(RANKS[known.task.priority_class] for known in members)
        by_class = policy.order != "arrival"
        return capacity.urgent[rank] if by_class and rank < len(capacity.urgent) else capacity

    def expire(self) -> None:
        for name in [k for k, t in self.tasks.items() if t.waits and t.task.deadline <= self.now]:
            self.queue.cancel(self.tasks.pop(name).task)

    def check_batch(self, batch: Batch[QueueEntry], capacity: Capacity) -> None:
        policy, rows = self.policy, batch.entries
        members = [self.tasks[row.request_id] for row in rows]
        assert len({row.request_id for row in rows}) == len(rows) > 0
        for row, known in zip(rows, members, strict=True):
            assert known.waits, row
            assert row.prefill_tokens == known.prefill
            assert (
                known.prefill
                <= row.cache_tokens
                <= known.task.prompt_tokens + known.task.max_tokens
            )
            assert row.waited_s == self.now - known.since
        tokens = sum(row.prefill_tokens for row in rows)
        cells = len(rows) * max(row.prefill_tokens for row in rows)
        assert batch.tokens == tokens
        assert batch.cache_tokens == sum(row.cache_tokens for row in rows)
        assert math.isclose(batch.padding_share, 1 - tokens / cells, abs_tol=1e-9)
        assert batch.longest_wait.waited_s == max(row.waited_s for row in rows)
        room = self.room(capacity, members)
        assert len(rows) <= min(policy.max_rows, room.free_slots)
        if rows[0].priority_class != URGENT_CLASS:
            assert capacity.batches_in_flight < BATCHES_IN_FLIGHT_MAX
        if self.is_limited(capacity):
            assert all(map(is_unlimited, rows))
        if len(rows) > 1 and not policy.is_continuous:
            assert batch.padding_share <= policy.padding_max + 1e-9
            assert (cells if policy.has_padding else tokens) <= policy.batch_tokens_max
        if len(rows) > 1 or capacity.waiting_tokens:
            assert capacity.waiting_tokens + tokens <= policy.waiting_tokens_max
        if len(rows) > 1 or not capacity.idle:
            assert batch.cache_tokens <= room.free_tokens

    def send(self, batch: Batch[QueueEntry]) -> None:
        worker = next(w for w in self.workers if w.name == batch.worker)
        self.batches += 1
        number, life = self.batches, worker.life
        worker.unanswered.append(number)
        worker.batches[number] = {row.request_id for row in batch.entries}
        self.at(self.chance.random() * 0.2, lambda: self.answer(worker, life, number))
        for row in batch.entries:
            known = self.tasks[row.request_id]
            worker.ranks[row.request_id] = RANKS[known.task.priority_class]
            known.worker = worker
            worker.rows[row.request_id] = row
            took_s = 0.05 + 0.02 * (known.answer - known.produced) * self.chance.random()
            self.at(took_s, partial(self.finish, worker, life, row.request_id))

    def check_books(self) -> None:
        assert len(self.queue) == sum(self.count(name) for name in CLASSES)
        capacities = [worker.capacity() for worker in self.workers if worker.alive]
        for report in self.queue.waits.class_reports(self.now, capacities):
            name, wait_ms = report.priority_class, report.expected_wait_ms
            assert 0 <= wait_ms < math.inf
            assert not (wait_ms and report.free_rows)
            assert self.queue.order.classes[name].waiting == self.count(name)
            most = sum(
                known.task.prompt_tokens + known.task.max_tokens
                for known in self.tasks.values()
                if known.waits and known.task.priority_class == name
            )
            assert self.count(name) <= self.queue.order.classes[name].tokens <= most

    def check_alive(self, wake_at: float | None, capacities: list[Capacity]) -> None:
        """With a worker that has nothing to do, what waits goes, or it is known when."""
        if len(self.queue) and any(
            capacity.idle and capacity.free_slots for capacity in capacities
        ):
            assert wake_at is not None

    def count(self, priority_class: str) -> int:
        return sum(
            known.waits and known.task.priority_class == priority_class
            for known in self.tasks.values()
        )


def drawn_policy(chance: random.Random) -> Policy:
    name = chance.choice([*PRESETS, "continuous", "continuous", "continuous"])
    values: dict[str, Any] = {
        "name": name,
        "max_rows": chance.choice([1, 2, 4, 16]),
        "waiting_tokens_max": chance.choice([50.0, 400.0, math.inf]),
        "classes": {"standard": {"aging_s": 0.5}, "bulk": {"aging_s": chance.choice([1, 3])}},
        "urgent_lead_tokens": chance.choice([0, 500, 8192]),
        "horizon_s": chance.choice([0.5, 60.0]),
    }
    values["batches_running_max"] = chance.choice([None, None, 1, 3])
    values["order"] = chance.choice(["fair", "fair", "class", "arrival"])
    values["classes"]["bulk"]["wait_s"] = chance.choice([None, 0.0, 5.0])
    if chance.random() < 0.3:
        values["padding_max"] = chance.choice([0.0, 0.05, 0.4])
    if chance.random() < 0.3:
        values["batch_tokens_max"] = chance.choice([100, 500])
    return tuned(Policy, **values)
