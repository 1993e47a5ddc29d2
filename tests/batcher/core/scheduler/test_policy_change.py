"""Changes of the policy while tasks wait and run: they reset neither fair shares nor waiting times."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.entry import QueueEntry
from batcher.core.scheduler.queue import Queue
from sluice.settings.batching import PRESETS, Policy
from sluice.wire.subjects import CLASSES
from tests.batcher.core.scheduler.kit import batch_of, busy, fill
from tests.support.settings import tuned

WEIGHTS = {"b": 2.0}


class History:
    """A queue that hands out a task at a time, and the order in which it does."""

    def __init__(self) -> None:
        self.policy = tuned(Policy, max_rows=1, urgent_lead_tokens=50)
        self.queue = Queue(self.policy, WEIGHTS)
        self.running: list[QueueEntry] = []
        self.sent: list[str] = []
        self.now = 0.0
        self.added = 0

    def do(self, act: str, number: int, tenant: str, name: str) -> None:
        self.now += number / 50
        match act:
            case "add":
                self.added += 1
                deadline = self.now + 500 if number % 3 else math.inf
                task = QueueEntry(f"{self.added}", name, deadline, tenant=tenant)
                task.prompt_tokens = task.prefill_tokens = 1 + number
                task.max_tokens = 40
                self.queue.add(task, self.now)
            case "send":
                batch = self.queue.next_batch(self.now, [Capacity("w", 1)]).batch
                entries = batch.entries if batch else []
                self.sent += [entry.request_id for entry in entries]
                self.running += entries
            case "finish" if self.running:
                entry = self.running.pop(number % len(self.running))
                self.queue.finish(entry, number % 40, self.now)

    def change_and_back(self, policy: Policy, weights: dict[str, float]) -> None:
        self.queue.reconfigure(policy, weights)
        self.queue.reconfigure(self.policy, WEIGHTS)


ACTS = st.tuples(
    st.sampled_from(("add", "add", "send", "send", "finish", "change")),
    st.integers(0, 100),
    st.sampled_from("abc"),
    st.sampled_from(CLASSES),
)
POLICIES = st.builds(
    tuned,
    st.just(Policy),
    name=st.sampled_from(sorted(PRESETS)),
    order=st.sampled_from(("fair", "class", "arrival")),
    horizon_s=st.sampled_from((0.5, 60.0)),
)


@given(st.lists(ACTS, max_size=150), POLICIES, st.sampled_from(({}, {"a": 8.0})))
@settings(max_examples=200, deadline=None)
def test_policy_change_resets_no_fair_share(
    acts: list[Any], policy: Policy, weights: dict[str, float]
) -> None:
    calm, changed = History(), History()
    for act in [*acts, *[("send", 1, "a", "bulk")] * 50]:
        calm.do(*act)
        changed.do(*act)
        if act[0] == "change":
            changed.change_and_back(policy, weights)
    assert changed.sent == calm.sent


def test_policy_change_keeps_what_a_tenant_is_ahead() -> None:
    queue = Queue(Policy(max_rows=1))
    fill(queue, 1000, tenant="a")
    fill(queue, 10, tenant="b")
    batch_of(queue, 0.0, busy())
    fill(queue, *[10] * 3, tenant="a")
    fill(queue, *[10] * 3, tenant="b")
    queue.reconfigure(Policy(name="window", max_rows=1), {})
    tenants = [batch_of(queue, 1.0, busy()).entries[0].tenant for _ in range(7)]
    assert tenants == ["b", "b", "b", "b", "a", "a", "a"]


def test_policy_change_keeps_tokens_ahead_when_weights_change() -> None:
    queue = Queue(Policy())
    fill(queue, 90, tenant="a", max_tokens=10)
    batch_of(queue, 0.0, busy())
    queue.reconfigure(Policy(), {"a": 4.0})
    assert queue.order.classes["interactive"].tenants.flows["a"].virtual_time == 100 / 4


def test_policy_change_keeps_overdue_classes() -> None:
    queue = Queue(Policy(max_rows=1))
    fill(queue, 5, 5, priority_class="bulk", now=0.0)
    batch_of(queue, 1.0, busy())
    queue.reconfigure(Policy(max_rows=1, order="class"), {})
    fill(queue, 5, now=10.0)
    assert batch_of(queue, 10.9, busy()).entries[0].priority_class == "interactive"
    fill(queue, 5, now=11.0)
    assert batch_of(queue, 11.0, busy()).entries[0].priority_class == "bulk", "sent 10 s after"


def test_policy_change_keeps_the_adaptive_size() -> None:
    queue = Queue(Policy(name="adaptive", latency_target_s=1.0, wait_s=0.0))
    for _ in range(3):
        for row in (fill(queue, *[5] * 4), batch_of(queue, 0.0, Capacity("w", 9)))[1].entries:
            queue.finish(row, 5, 0.1)
    queue.reconfigure(Policy(name="adaptive", latency_target_s=1.0, wait_s=0.1, max_rows=3), {})
    fill(queue, *[5] * 9)
    assert len(batch_of(queue, 1.0, Capacity("w", 9)).entries) == 3


@pytest.mark.parametrize("name", PRESETS)
def test_policy_change_keeps_workers_of_prompts(name: str) -> None:
    queue = Queue(Policy())
    workers = [Capacity(worker, 4, running=1) for worker in ("w1", "w2")]
    fill(queue, 100, prefix=7)
    known = queue.next_batch(0.0, workers).batch
    assert known is not None
    queue.reconfigure(Policy(name=name, max_rows=1), {})
    fill(queue, 100, prefix=7)
    batch = queue.next_batch(9.0, list(reversed(workers))).batch
    assert batch is not None
    assert batch.worker == known.worker == "w1"
