"""What a new task is expected to wait, by what waits before it and what workers do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.core.scheduler.capacity import Capacity, UsableCapacity
from batcher.core.scheduler.entry import QueueEntry
from batcher.core.scheduler.queue import Queue
from batcher.core.scheduler.speed import REQUESTS_MIN
from sluice.internal.v1.control_pb2 import ClassReport
from sluice.settings.batching import Policy
from sluice.wire.subjects import CLASSES
from tests.batcher.core.scheduler.kit import NUMBERS, expected_wait_s, fill

SLOTS = 4
TOKEN_S = 0.1
IDLE_S = 60.0


class Mill:
    """A worker with slots that computes each token of an answer in `TOKEN_S`, prompts at once."""

    def __init__(
        self, policy: Policy | None = None, weights: dict[str, float] | None = None
    ) -> None:
        self.queue = Queue(policy or Policy(), weights)
        self.waits = self.queue.waits
        self.now = 0.0
        self.rows: dict[str, float] = {}
        """When each request in the worker ends."""
        self.entries: dict[str, QueueEntry] = {}

    @property
    def capacities(self) -> list[Capacity]:
        free = UsableCapacity(SLOTS - len(self.rows))
        return [Capacity("w", *free, running=len(self.rows))]

    def add(self, *answers: int, name: str = "standard", tenant: str = "a") -> None:
        """Tasks whose answers have so many tokens, each as long as it may be."""
        for tokens in answers:
            fill(
                self.queue,
                1,
                priority_class=name,
                now=self.now,
                tenant=tenant,
                max_tokens=tokens,
                min_tokens=tokens,
            )
        self.send()

    def send(self) -> None:
        while len(self.queue):
            decision = self.queue.next_batch(self.now, self.capacities)
            if decision.batch is None:
                break
            for row in decision.batch.entries:
                self.rows[row.request_id] = self.now + TOKEN_S * row.max_tokens
                self.entries[row.request_id] = row
        self.waits.watch(self.now, has_capacity=self.capacities[0].free_slots > 0)

    def finish(self) -> None:
        """Computes all rows."""
        while self.rows:
            self.run(min(self.rows.values()))
        self.send()

    def run(self, until: float) -> None:
        """Computes rows until a time."""
        while self.rows and min(self.rows.values()) <= until:
            request_id = min(self.rows, key=self.rows.__getitem__)
            self.now = self.rows.pop(request_id)
            task = self.entries.pop(request_id)
            rest_s = TOKEN_S * (task.max_tokens - 1)
            self.queue.finish(task, task.max_tokens, self.now, decode_s=rest_s)
            self.send()
        self.now = until

    def wait_s(self, name: str = "standard", tenant: str = "new") -> float:
        return expected_wait_s(self.queue, name, self.now, self.capacities, tenant)

    def report(self, name: str = "standard", closed_s: float = 0.0) -> ClassReport:
        reports = self.waits.class_reports(self.now, self.capacities, closed_s)
        return next(one for one in reports if one.priority_class == name)


def learned(policy: Policy | None = None, weights: dict[str, float] | None = None) -> Mill:
    """One whose workers were full of long answers of another tenant, of each class, a minute ago."""
    mill = Mill(policy, weights)
    for name in CLASSES:
        mill.add(*[50] * (REQUESTS_MIN + SLOTS), name=name, tenant="other")
        mill.finish()
    mill.run(mill.now + IDLE_S)
    mill.send()
    return mill


def test_nothing_waits_while_a_slot_is_free() -> None:
    mill = learned()
    for name in CLASSES:
        report = mill.report(name)
        assert (report.free_rows, report.expected_wait_ms) == (SLOTS, 0.0)
    assert mill.waits.tokens_per_s(mill.now) == 0.0, "a rate of full slots alone"
    mill.add(*[500] * (SLOTS - 1))
    assert (mill.report().free_rows, mill.wait_s()) == (1, 0.0)
    mill.add(500)
    assert mill.report().free_rows == 0
    assert mill.wait_s() == pytest.approx(50.0, rel=0.03)


def test_without_a_measurement_no_wait_is_known() -> None:
    mill = Mill()
    mill.add(*[50] * 40)
    assert (mill.report().free_rows, mill.wait_s(), mill.waits.tokens_per_s(0.0)) == (0, 0.0, 0.0)


def test_short_request_behind_full_slots_keeps_the_rate() -> None:
    mill = learned()
    for _ in range(3):
        mill.add(*[900] * SLOTS)
        mill.run(mill.now + 0.3)
        mill.add(1)
        assert mill.wait_s() == pytest.approx(89.7, rel=0.01)
        mill.finish()
    mill.add(*[200] * (SLOTS + 1))
    rate = mill.waits.tokens_per_s(mill.now)
    assert rate == pytest.approx(SLOTS / TOKEN_S, rel=0.1)
    assert mill.wait_s() == pytest.approx(20.0, rel=0.02)


@given(
    running=st.lists(st.integers(1, 60), min_size=SLOTS, max_size=SLOTS),
    waiting=st.integers(0, 30),
    tokens=st.integers(1, 60),
)
def test_the_wait_is_that_of_the_next_task(running: list[int], waiting: int, tokens: int) -> None:
    mill = learned()
    mill.add(*running)
    mill.add(*[tokens] * waiting)
    expected_s, began = mill.wait_s(tenant="a"), mill.now
    mill.add(1)
    mine = f"t{next(NUMBERS) - 1}"
    while mine not in mill.rows:
        mill.run(min(mill.rows.values()))
    assert expected_s == pytest.approx(mill.now - began, rel=0.05, abs=0.05)


def test_other_tenants_wait_for_their_share() -> None:
    mill = learned(weights={"heavy": 3.0})
    mill.add(*[100] * SLOTS)
    mill.add(*[10] * 40, tenant="flood")
    mill.add(*[10] * 4, tenant="b")
    mill.add(*[10] * 4, tenant="heavy")
    first_s, per_task_s = 10.0, 10 * TOKEN_S / SLOTS
    assert mill.wait_s(tenant="new") == pytest.approx(first_s, rel=0.02)
    # 4 tasks of its own, and as many of others by their weights: 5 to 1, and 5 to 3.
    assert mill.wait_s(tenant="b") == pytest.approx(first_s + 20 * per_task_s, rel=0.1)
    assert mill.wait_s(tenant="heavy") == pytest.approx(first_s + 20 / 3 * per_task_s, rel=0.1)
    assert mill.wait_s(tenant="flood") == pytest.approx(first_s + 48 * per_task_s, rel=0.1)
    waits_ms = dict(mill.report().tenant_wait_ms)
    assert waits_ms["flood"] == pytest.approx(1e3 * mill.wait_s(tenant="flood"))


def test_less_urgent_tasks_stand_before_nobody() -> None:
    mill = learned()
    mill.add(*[100] * SLOTS, name="interactive")
    mill.add(*[100] * 20, name="bulk")
    mill.add(*[100] * 4)
    assert mill.wait_s("interactive") == pytest.approx(10.0, rel=0.02)
    assert mill.wait_s("standard", "a") == pytest.approx(20.0, rel=0.05)
    assert mill.wait_s("bulk", "a") == pytest.approx(10.0 + 60.0, rel=0.05)


def test_steady_urgent_work_goes_on_taking_slots() -> None:
    mill = learned()
    mill.add(*[100] * SLOTS)
    calm_s = mill.wait_s()
    mill.finish()
    for _ in range(60):  # half of the slots, for a minute
        mill.add(*[10] * (SLOTS // 2), name="interactive")
        mill.run(mill.now + 10 * TOKEN_S)
        mill.send()
    mill.add(*[100] * SLOTS)
    assert mill.wait_s() == pytest.approx(2 * calm_s, rel=0.1)


def test_a_burst_of_urgent_work_is_no_steady_load() -> None:
    mill = learned()
    mill.add(*[20] * SLOTS, name="interactive")
    mill.run(mill.now + 20 * TOKEN_S)
    mill.add(*[100] * SLOTS)
    assert mill.wait_s() < 1.15 * 100 * TOKEN_S


def test_rows_that_give_way_hold_no_slots() -> None:
    mill = learned()
    mill.add(*[900] * SLOTS, name="bulk")
    full, preempts = (
        Capacity("w", 0),
        Capacity("w", 0, urgent=[UsableCapacity(SLOTS), UsableCapacity(SLOTS)]),
    )
    queue, now = mill.queue, mill.now
    assert expected_wait_s(queue, "interactive", now, [full]) == pytest.approx(90.0)
    assert expected_wait_s(queue, "interactive", now, [preempts]) == 0.0
    assert queue.waits.free_slots("interactive", [preempts]) == SLOTS
    assert expected_wait_s(queue, "bulk", now, [preempts]) == pytest.approx(90.0, rel=0.03)


def test_slots_of_a_worker_that_is_gone_count_no_more() -> None:
    mill = learned()
    mill.add(*[100] * SLOTS)
    assert expected_wait_s(mill.queue, "standard", mill.now, [Capacity("other", 0)]) == 0.0
    assert expected_wait_s(mill.queue, "standard", mill.now, []) == 0.0


def test_request_beyond_its_expectation_keeps_its_slot_longer() -> None:
    mill = learned()
    fill(mill.queue, *[1] * SLOTS, priority_class="standard", now=mill.now, max_tokens=300)
    mill.send()
    expected_s = 50 * TOKEN_S  # as its workload's answers were
    assert mill.wait_s() == pytest.approx(expected_s, rel=0.05)
    mill.now += 2 * expected_s
    assert mill.wait_s() == pytest.approx(2 * expected_s, rel=0.03)
    mill.now += 29.0 - 2 * expected_s
    assert mill.wait_s() == pytest.approx(1.0, rel=0.05)


def test_a_remote_server_that_closes_adds_its_time() -> None:
    mill = learned()
    assert mill.report(closed_s=7.0).expected_wait_ms == 7000


def test_rows_of_a_whole_batch_give_back_their_slots_together() -> None:
    mill = learned(Policy.model_validate({"name": "length", "wait_s": 0.0}))
    mill.add(10, 20, 30, 40)
    assert mill.wait_s() == pytest.approx(4.0, rel=0.05)


def test_a_window_is_part_of_the_wait() -> None:
    mill = learned(Policy.model_validate({"name": "window", "wait_s": 2.0, "max_rows": SLOTS}))
    mill.add(1)
    assert mill.report().free_rows == SLOTS - 1, "it waits for company, not for a slot"
    mill.run(mill.now + 3.0)
    mill.send()
    mill.add(*[10] * 3)
    mill.now += 3.0
    mill.send()
    assert mill.wait_s() >= 2.0
