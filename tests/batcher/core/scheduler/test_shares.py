"""Fair shares and priorities of a worker that is never idle, in simulated time."""

import math
import random
from heapq import heappop, heappush

import pytest

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.entry import QueueEntry
from batcher.core.scheduler.queue import Queue
from sluice.settings.batching import Policy
from tests.support.settings import tuned

SLOTS = 16
STEADY_S = 10.0
"""Shares are measured from here on: answer lengths have been learned by then."""


class Mill:
    """One worker, and tenants that send at a rate; counts the tokens each was served."""

    def __init__(self, policy: Policy, weights: dict[str, float], seed: int) -> None:
        self.chance = random.Random(seed)
        self.queue = Queue(policy, weights)
        self.arrivals: list[tuple[float, str, QueueEntry]] = []
        self.running: list[tuple[float, str]] = []
        self.answers: dict[str, int] = {}
        self.tasks: dict[str, QueueEntry] = {}
        self.served: dict[str, int] = {}
        self.now = 0.0

    def tenant(
        self,
        name: str,
        *,
        rate: float,
        answer: int,
        priority_class: str = "standard",
        until_s: float = 60.0,
        start_s: float = 0.0,
        max_tokens: int = 512,
    ) -> None:
        at, number = start_s, 0
        while (at := at + self.chance.expovariate(rate)) < until_s:
            number += 1
            key = f"{name}{number}"
            self.answers[key] = min(max_tokens, self.lognormal(answer))
            task = QueueEntry(
                key,
                priority_class,
                at + 300,
                tenant=name,
                workload="w",
                prompt_tokens=self.lognormal(100),
                max_tokens=max_tokens,
            )
            heappush(self.arrivals, (at, key, task))

    def lognormal(self, median: int) -> int:
        return int(self.chance.lognormvariate(math.log(median), 1.0)) + 1

    def run(self, until_s: float = 60.0) -> dict[str, int]:
        while self.now < until_s:
            arrives_at = self.arrivals[0][0] if self.arrivals else math.inf
            ends_at = self.running[0][0] if self.running else math.inf
            self.now = min(arrives_at, ends_at)
            if arrives_at <= ends_at:
                self.add(heappop(self.arrivals)[2])
            else:
                self.finish(heappop(self.running)[1])
            self.send()
        return self.served

    def add(self, task: QueueEntry) -> None:
        self.tasks[task.request_id] = task
        self.queue.add(task, self.now)

    def finish(self, key: str) -> None:
        task = self.tasks.pop(key)
        self.queue.finish(task, self.answers[key], self.now)
        if self.now > STEADY_S:
            cost = task.prompt_tokens + self.answers[key]
            self.served[task.tenant] = self.served.get(task.tenant, 0) + cost

    def send(self) -> None:
        while True:
            used = len(self.running)
            capacity = Capacity("w", SLOTS - used, running=used)
            batch = self.queue.next_batch(self.now, [capacity]).batch
            if batch is None:
                return
            for row in batch.entries:
                took_s = 0.001 * row.prefill_tokens + 0.01 * self.answers[row.request_id]
                heappush(self.running, (self.now + took_s, row.request_id))


def policy(**values: object) -> Policy:
    return tuned(Policy, **{"waiting_tokens_max": math.inf, **values})


@pytest.mark.parametrize(("weights", "ratio"), [({}, 1.0), ({"a": 2.0}, 2.0), ({"b": 3.0}, 1 / 3)])
def test_shares_are_by_weight_though_one_sends_ten_times_as_much(
    weights: dict[str, float], ratio: float
) -> None:
    mill = Mill(policy(), weights, seed=1)
    mill.tenant("a", rate=100, answer=100)
    mill.tenant("b", rate=10, answer=150)
    served = mill.run()
    assert served["a"] / served["b"] == pytest.approx(ratio, rel=0.1)


def test_without_shares_who_sends_more_gets_more() -> None:
    mill = Mill(policy(order="class"), {}, seed=1)
    mill.tenant("a", rate=100, answer=100)
    mill.tenant("b", rate=10, answer=100)
    served = mill.run()
    assert served["a"] > 5 * served["b"]


def test_tenant_is_charged_for_actual_not_allowed_answers() -> None:
    mill = Mill(policy(), {}, seed=2)
    mill.tenant("careful", rate=30, answer=60, max_tokens=128)
    mill.tenant("careless", rate=30, answer=60, max_tokens=4096)
    served = mill.run()
    assert served["careful"] / served["careless"] == pytest.approx(1, rel=0.1)


def test_who_was_away_has_saved_nothing_up() -> None:
    mill = Mill(policy(), {}, seed=3)
    mill.tenant("always", rate=30, answer=100)
    mill.tenant("late", rate=30, answer=100, start_s=35.0)
    mill.run(35.0)
    mill.served.clear()
    served = mill.run(60.0)
    assert served["late"] / served["always"] == pytest.approx(1, rel=0.15)


def test_shares_hold_where_lengths_matter() -> None:
    mill = Mill(policy(name="length", max_rows=8, batches_running_max=None), {"a": 2.0}, seed=4)
    mill.tenant("a", rate=100, answer=100)
    mill.tenant("b", rate=30, answer=100)
    served = mill.run()
    assert served["a"] / served["b"] == pytest.approx(2.0, rel=0.1)


def test_no_class_is_starved_by_a_flood_of_more_urgent_ones() -> None:
    mill = Mill(policy(classes={"bulk": {"aging_s": 2.0}}), {}, seed=5)
    mill.tenant("chat", rate=60, answer=100, priority_class="interactive")
    mill.tenant("job", rate=5, answer=100, priority_class="bulk")
    served = mill.run()
    assert len(mill.queue) > 1000, "not a flood"
    assert 15 * 100 < served["job"] < 0.1 * served["chat"]
