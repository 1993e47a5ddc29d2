"""The order of the queue, checked against a list that is sorted anew for every decision."""

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.entry import BatchLimit, QueueEntry
from batcher.core.scheduler.queue import Queue
from sluice.settings.batching import Policy
from sluice.wire.subjects import CLASSES
from tests.batcher.core.scheduler.kit import come_back
from tests.support.settings import tuned


def taken(queue: Queue, now: float = 0.0, capacity: int = 100) -> list[str]:
    batch = queue.next_batch(now, [Capacity("w", capacity)]).batch
    return [row.request_id for row in batch.entries] if batch else []


def test_an_empty_queue_has_nothing_to_do_and_never_wakes() -> None:
    decision = Queue(Policy(max_rows=8)).next_batch(0.0, [Capacity("w", 8)])
    assert decision == (None, None)


def test_order_is_class_then_deadline_then_arrival() -> None:
    queue = Queue(Policy(max_rows=8))
    for name, priority_class, deadline in (
        ("bulk", "bulk", 1.0),
        ("later", "interactive", 9.0),
        ("soon", "interactive", 5.0),
        ("never", "interactive", math.inf),
        ("never too", "interactive", math.inf),
        ("standard", "standard", 2.0),
    ):
        queue.add(QueueEntry(name, priority_class, deadline), 0.0)
    assert taken(queue) == ["soon", "later", "never", "never too", "standard", "bulk"]


def test_what_comes_back_goes_before_what_is_new_in_its_class() -> None:
    queue = Queue(Policy(max_rows=8))
    queue.add(lost := QueueEntry("lost", "standard", 50.0), 0.0)
    assert taken(queue) == ["lost"]
    queue.add(QueueEntry("new", "standard", 5.0), 1.0)
    queue.add(QueueEntry("urgent", "interactive"), 1.0)
    come_back(queue, lost, 3, 2.0)
    assert taken(queue, 2.5) == ["urgent", "lost", "new"]


def test_only_guessed_costs_are_estimated_again_on_take() -> None:
    queue = Queue(Policy())

    def add(name: str, answers: int, tokens: int) -> None:
        queue.add(QueueEntry(name, "bulk", prompt_tokens=10, max_tokens=100), 0.0)
        for number in range(answers):
            request_id = f"{name} {number}"
            queue.add(QueueEntry(request_id, "interactive", max_tokens=100), 0.0)
            assert taken(queue, capacity=1) == [request_id]
            queue.finish(request_id, tokens, 0.0)

    add("guessed", 50, 20)
    add("known", 50, 70)
    batch = queue.next_batch(0.0, [Capacity("w", 2)]).batch
    assert batch is not None
    guessed, known = (row.cache_tokens for row in batch.entries)
    assert known < 50 < guessed < 110


def test_batch_has_the_wait_of_each_request() -> None:
    queue = Queue(Policy(max_rows=8))
    queue.add(a := QueueEntry("a", "bulk"), 1.0)
    queue.next_batch(2.0, [Capacity("w", 1)])
    queue.add(QueueEntry("b", "bulk"), 3.0)
    come_back(queue, a, 0, 5.0)
    batch = queue.next_batch(6.0, [Capacity("w", 2)]).batch
    assert batch is not None
    assert [(row.request_id, row.waited_s) for row in batch.entries] == [("a", 1.0), ("b", 3.0)]


@pytest.mark.parametrize(
    ("waiting", "capacity", "rows", "limit"),
    [
        (3, 9, 3, BatchLimit.ALL_WAITING),
        (4, 4, 4, BatchLimit.ALL_WAITING),
        (5, 4, 4, BatchLimit.WORKER_ROWS),
        (9, 2, 2, BatchLimit.WORKER_ROWS),
        (9, 9, 4, BatchLimit.ROWS),
    ],
)
def test_a_batch_says_why_it_is_not_larger(
    waiting: int, capacity: int, rows: int, limit: BatchLimit
) -> None:
    queue = Queue(Policy(max_rows=4))
    for number in range(waiting):
        queue.add(QueueEntry(str(number), "bulk"), 0.0)
    batch = queue.next_batch(0.0, [Capacity("w", capacity)]).batch
    assert batch is not None
    assert (len(batch.entries), batch.limit) == (rows, limit)


def test_cancelled_tasks_are_gone_wherever_they_were() -> None:
    queue = Queue(Policy(max_rows=4))
    for name in ("waits", "out", "stays"):
        queue.add(QueueEntry(name, "bulk"), 0.0)
    queue.next_batch(0.0, [Capacity("w", 0)])
    assert taken(queue, capacity=1) == ["waits"]
    queue.cancel("waits")
    queue.cancel("out")
    queue.cancel("unknown")
    assert queue.order.classes["bulk"].waiting == 1
    queue.add(QueueEntry("out", "bulk"), 1.0)
    assert taken(queue) == ["stays", "out"]


HORIZON_S = 2.0


def strict(max_rows: int) -> Policy:
    """Classes go by rank alone."""
    never = {"aging_s": math.inf}
    return tuned(
        Policy,
        max_rows=max_rows,
        horizon_s=HORIZON_S,
        urgency=0.0,
        spare_s=0.0,
        classes={"standard": never, "bulk": never},
    )


@dataclass
class Known:
    task: QueueEntry
    number: int
    since: float
    returned: bool = False

    def order(self) -> tuple[int, bool, float, int]:
        rank = CLASSES.index(self.task.priority_class)
        due = min(self.task.deadline, self.since + HORIZON_S)
        return rank, not self.returned, self.task.deadline if self.returned else due, self.number


class Model:
    """The queue as a list that is sorted for every decision."""

    def __init__(self) -> None:
        self.waiting: list[Known] = []
        self.out: list[Known] = []
        self.numbers = 0

    def expire(self, now: float) -> set[str]:
        late = {known.task.request_id for known in self.waiting if known.task.deadline <= now}
        self.waiting = [known for known in self.waiting if known.task.request_id not in late]
        return late

    def take(self, count: int) -> list[str]:
        self.waiting.sort(key=Known.order)
        rows, self.waiting = self.waiting[:count], self.waiting[count:]
        self.out += rows
        return [known.task.request_id for known in rows]


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 120), max_rows=st.integers(1, 6))
def test_any_history_takes_tasks_in_the_order_of_the_rules(
    seed: int, steps: int, max_rows: int
) -> None:
    chance = random.Random(seed)
    queue, model, now = Queue(strict(max_rows)), Model(), 0.0
    for _ in range(steps):
        now += chance.random()
        match chance.choice(["add", "add", "next", "requeue", "finish", "cancel"]):
            case "add":
                model.numbers += 1
                due = now + chance.choice([1.0, 3.0, 3.0, math.inf])
                task = QueueEntry(str(model.numbers), chance.choice(CLASSES), due)
                queue.add(task, now)
                model.waiting.append(Known(task, model.numbers, now))
            case "next":
                capacity = chance.randrange(8)
                for late in model.expire(now):
                    queue.cancel(late)
                decision = queue.next_batch(now, [Capacity("w", capacity)])
                rows = decision.batch.entries if decision.batch else ()
                assert [row.request_id for row in rows] == model.take(min(capacity, max_rows))
                assert decision.wake_at is None
            case "requeue" if model.out:
                known = model.out.pop(chance.randrange(len(model.out)))
                model.numbers += 1
                known.returned, known.number = True, model.numbers
                model.waiting.append(known)
                known.task = come_back(queue, known.task, 1, now)
            case "finish" if model.out:
                queue.finish(model.out.pop(0).task.request_id, 1, now)
            case "cancel" if model.waiting:
                known = model.waiting.pop(chance.randrange(len(model.waiting)))
                queue.cancel(known.task.request_id)
        assert len(queue) == len(model.waiting)
