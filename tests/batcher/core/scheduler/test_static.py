"""Static batches: when one goes, why, and with which requests."""

import math
import random

import pytest

from batcher.core.scheduler.capacity import Capacity, UsableCapacity
from batcher.core.scheduler.entry import BatchCause, BatchLimit
from batcher.core.scheduler.queue import Queue
from sluice.settings.batching import PRESETS, Policy
from tests.batcher.core.scheduler.kit import (
    BULK_AGING_S,
    PRESSING,
    batch_of,
    busy,
    come_back,
    fill,
    learn,
    limited_batch,
    policy,
    press,
    return_bulk,
)

# When.


def test_a_worker_that_would_idle_gets_what_there_is() -> None:
    queue = Queue(policy(wait_s=0.4, sends_to_idle=True))
    fill(queue, 5)
    assert batch_of(queue, 0.0, Capacity("w", 8)).cause is BatchCause.WORKER_IDLE


def test_a_busy_worker_gets_a_batch_when_the_window_is_over() -> None:
    queue = Queue(policy(wait_s=0.02, sends_to_idle=True))
    fill(queue, 5, now=1.0)
    decision = queue.next_batch(1.0, [busy()])
    assert decision.batch is None
    assert decision.wake_at == 1.02
    batch = batch_of(queue, 1.02, busy())
    assert (batch.cause, batch.limit) == (BatchCause.WINDOW_OVER, BatchLimit.ALL_WAITING)


@pytest.mark.parametrize("why", PRESSING)
def test_what_presses_does_not_wait(why: str) -> None:
    queue = Queue(policy("length", wait_s=0.4, classes={"bulk": {"aging_s": BULK_AGING_S}}))
    assert batch_of(queue, press(queue, why), busy()).cause is BatchCause.URGENT


@pytest.mark.parametrize(
    ("task", "goes"),
    [("standard", False), ("bulk", False), ("interactive", True), ("returned", True)],
)
def test_running_batches_hold_back_only_what_can_wait(task: str, goes: bool) -> None:
    queue = Queue(policy(batches_running_max=1))
    if task == "returned":
        return_bulk(queue, 1.0)
    else:
        fill(queue, 5, priority_class=task)
    assert (queue.next_batch(2.0, [busy(batches_running=1)]).batch is not None) == goes


def test_running_batches_let_urgent_requests_go_alone() -> None:
    queue = Queue(policy(batches_running_max=2))
    fill(queue, 5, 5, priority_class="standard")
    fill(queue, 5)
    batch = batch_of(queue, 1.0, busy(batches_running=2))
    assert (len(batch.entries), batch.limit) == (1, BatchLimit.WORKER_BATCHES)
    assert queue.next_batch(1.0, [busy(batches_running=2)]).batch is None
    assert len(batch_of(queue, 1.0, busy(batches_running=1)).entries) == 2


def test_running_batches_let_returned_ones_pass_standard() -> None:
    queue = Queue(policy(batches_running_max=1))
    fill(queue, 5, priority_class="bulk")
    (row,) = batch_of(queue, 1.0, busy()).entries
    fill(queue, 5, priority_class="standard", now=1.0)
    again = come_back(queue, row, 1, 1.0)
    assert batch_of(queue, 1.01, busy(batches_running=1)).entries == [again]


def test_running_batches_leave_the_order_of_unlimited_ones() -> None:
    queue = Queue(policy(batches_running_max=1, classes={"bulk": {"aging_s": 2.0}}))
    again = return_bulk(queue, 1.0)
    fill(queue, 5, now=1.0)
    rows = batch_of(queue, 3.0, busy(batches_running=1)).entries
    assert [r.priority_class for r in rows] == ["bulk", "interactive"], "bulk is overdue"
    assert rows[0] is again


def test_interactive_window_holds_under_the_limit_too() -> None:
    queue = Queue(policy(batches_running_max=1, wait_s=0.4))
    fill(queue, 5, priority_class="bulk")
    fill(queue, 5, now=1.0)
    full = busy(batches_running=1)
    assert queue.next_batch(1.0, [full]) == (None, 1.4)
    assert len(batch_of(queue, 1.4, full).entries) == 1


# Full, and what a worker has no room for.


def test_full_is_the_size_of_the_policy() -> None:
    queue = Queue(policy("window", max_rows=4))
    fill(queue, 5, 5, 5)
    assert queue.next_batch(0.0, [busy(free_slots=2)]).batch is None, "two rows are free, not full"
    fill(queue, 5)
    batch = batch_of(queue, 0.0, busy(free_slots=2))
    assert (batch.cause, len(batch.entries)) == (BatchCause.FULL, 2)


def test_full_counts_the_adaptive_size_and_tokens() -> None:
    queue = Queue(policy("adaptive", max_rows=4, wait_s=5.0))
    fill(queue, 5)
    assert batch_of(queue, 0.0, busy()).cause is BatchCause.FULL, "the size begins with 1"
    queue = Queue(policy("window", batch_tokens_max=100))
    fill(queue, 60)
    assert queue.next_batch(0.0, [busy()]).batch is None
    fill(queue, 40)
    assert batch_of(queue, 0.0, busy()).cause is BatchCause.FULL


@pytest.mark.parametrize("name", ["window", "length"])
@pytest.mark.parametrize(("waiting", "at"), [(4, 0.05), (8, 0.0)])
def test_rest_of_a_due_batch_needs_no_window(name: str, waiting: int, at: float) -> None:
    queue = Queue(policy(name, wait_s=0.05, max_rows=8, sends_to_idle=False))
    fill(queue, *[5] * waiting, now=0.0)
    causes = []
    for sent in range(waiting):
        (late,) = fill(queue, 5, now=at, priority_class="bulk")
        assert queue.next_batch(at, [busy(free_slots=0)]).batch is None
        batch = batch_of(queue, at + sent / 1000, busy(free_slots=1))
        assert len(batch.entries) == 1, "never more than the grant"
        causes.append(batch.cause)
        queue.cancel(late)
    assert set(causes) == {BatchCause.WINDOW_OVER if at else BatchCause.FULL}
    fill(queue, 5, now=1.0)
    assert queue.next_batch(1.0, [busy()]) == (None, 1.05), "a new one has a window"


def test_rest_of_a_batch_ends_with_its_tasks() -> None:
    queue = Queue(policy("window", wait_s=0.05, max_rows=8))
    _, other = fill(queue, 5, 5)
    batch_of(queue, 0.05, busy(free_slots=1))
    queue.cancel(other)
    fill(queue, 5, now=0.06)
    assert queue.next_batch(0.06, [busy()]) == (None, pytest.approx(0.11))


# Windows.


@pytest.mark.parametrize("order", ["fair", "class", "arrival"])
@pytest.mark.parametrize("name", ["window", "length"])
def test_window_closes_before_a_deadline(name: str, order: str) -> None:
    queue = Queue(policy(name, order=order, urgency=0.0, wait_s=10.0, sends_to_idle=False))
    learn(queue, "interactive", 1.5)
    fill(queue, 5, now=0.0)
    fill(queue, 5, now=0.5, deadline=6.0)
    decision = queue.next_batch(0.5, [busy()])
    assert decision == (None, 4.5), "not of the first in order alone"
    assert len(batch_of(queue, 4.5, busy()).entries) == 2


def test_window_halves_the_time_to_a_deadline_at_first() -> None:
    queue = Queue(policy("window", wait_s=10.0))
    fill(queue, 5, now=1.0, deadline=3.0)
    assert queue.next_batch(1.0, [busy()]).wake_at == 2.0
    assert len(batch_of(queue, 2.0, busy()).entries) == 1


def test_window_wakes_when_a_class_is_overdue() -> None:
    queue = Queue(policy("window", wait_s=10.0, classes={"bulk": {"aging_s": 3.0}}))
    fill(queue, 5, priority_class="bulk")
    fill(queue, 5, priority_class="interactive")
    assert queue.next_batch(0.0, [busy()]).wake_at == 3.0
    assert batch_of(queue, 3.0, busy()).cause is BatchCause.URGENT


def test_windows_differ_by_class() -> None:
    classes = {"interactive": {"wait_s": 0.005}, "bulk": {"wait_s": 4.0}}
    queue = Queue(policy("window", wait_s=0.5, classes=classes))
    wakes = []
    for name in ("bulk", "standard", "interactive"):
        fill(queue, 5, priority_class=name)
        wakes.append(queue.next_batch(0.0, [busy()]).wake_at)
    assert wakes == [4.0, 0.5, 0.005]
    assert len(batch_of(queue, 0.005, busy()).entries) == 3, "those that wait go along"


def test_window_of_the_oldest_counts_not_of_the_first() -> None:
    queue = Queue(policy("window", wait_s=0.5))
    fill(queue, 5, priority_class="standard", now=0.0)
    fill(queue, 5, priority_class="interactive", now=0.4)
    batch = batch_of(queue, 0.5, busy())
    assert [row.priority_class for row in batch.entries] == ["interactive", "standard"]


def test_window_s_says_what_a_new_request_waits() -> None:
    queue = Queue(policy("window", wait_s=0.5, classes={"bulk": {"wait_s": 4.0}}))
    assert [queue.window_s(name, 0.0) for name in ("standard", "bulk")] == [0.5, 4.0]
    fill(queue, 5, priority_class="standard", now=1.0)
    assert [queue.window_s(name, 1.2) for name in ("standard", "bulk")] == pytest.approx([0.3, 0.3])
    assert queue.window_s("bulk", 9.0) == 0.0
    assert Queue(Policy()).window_s("bulk", 0.0) == 0.0


# Simple batchers.


def test_a_worker_to_which_a_batch_is_on_its_way_does_not_idle() -> None:
    queue = Queue(policy(wait_s=0.4, sends_to_idle=True))
    fill(queue, 1)
    assert queue.next_batch(0.0, [Capacity("w", 8, batches_in_flight=1)]).batch is None
    assert queue.next_batch(0.0, [Capacity("w", 8)]).batch is not None


def test_fixed_waits_for_its_size_even_if_the_worker_idles() -> None:
    queue, idle = Queue(policy("fixed", max_rows=3)), Capacity("w", 8)
    fill(queue, 5, 5)
    assert queue.next_batch(0.0, [idle]).wake_at == 0.1
    fill(queue, 5, 5)
    batch = batch_of(queue, 0.05, idle)
    assert (batch.cause, len(batch.entries)) == (BatchCause.FULL, 3)
    assert queue.next_batch(0.05, [idle]).batch is None, "a batch still runs"


def test_window_sends_what_has_come_when_it_is_over() -> None:
    queue = Queue(policy("window"))
    fill(queue, 5, now=1.0)
    fill(queue, 5, 5, now=1.03)
    assert queue.next_batch(1.04, [Capacity("w", 8)]).wake_at == 1.05
    batch = batch_of(queue, 1.05, Capacity("w", 8))
    assert (batch.cause, len(batch.entries)) == (BatchCause.WINDOW_OVER, 3)


def test_priority_has_windows_by_class() -> None:
    queue = Queue(policy("priority"))
    fill(queue, 5, priority_class="bulk")
    assert queue.next_batch(0.0, [busy()]).wake_at == 0.5
    fill(queue, 5, now=0.1)
    assert queue.next_batch(0.1, [busy()]).wake_at == pytest.approx(0.105)


@pytest.mark.parametrize("name", PRESETS)
def test_every_policy_takes_deadlines_before_arrival(name: str) -> None:
    queue = Queue(policy(name, max_rows=1, batches_running_max=None))
    fill(queue, 5, priority_class="bulk", tenant="a")
    fill(queue, 5, deadline=9.0)
    fill(queue, 5, deadline=8.0)
    rows = [batch_of(queue, 1.0, busy()).entries[0] for _ in range(3)]
    assert [row.deadline for row in rows] == [8.0, 9.0, math.inf]


@pytest.mark.parametrize("name", PRESETS)
def test_every_policy_counts_on_preemption(name: str) -> None:
    queue = Queue(policy(name))
    fill(queue, 5)
    worker = busy(free_slots=0, urgent=[UsableCapacity(3), UsableCapacity(3)])
    assert len(batch_of(queue, 1.0, worker).entries) == 1


@pytest.mark.parametrize("streams", [True, False])
def test_adaptive_size_follows_the_first_tokens(streams: bool) -> None:
    queue = Queue(policy("adaptive", latency_target_s=1.0, max_rows=4, wait_s=0.0))
    sizes, now = [], 0.0
    for took_s in (0.1, 0.1, 0.1, 0.1, 1.0, 2.0, 2.0, 0.1):
        fill(queue, *[5] * 4, now=now)
        rows = batch_of(queue, now, Capacity("w", 8)).entries
        sizes.append(len(rows))
        for row in rows:
            if streams:  # The answer goes on for long.
                queue.on_answered(row, now + took_s)
            queue.finish(row, 5, now + took_s + 30 * streams)
        now += took_s
    assert sizes == [1, 2, 3, 4, 4, 4, 3, 2]


def test_adaptive_size_ignores_what_was_cancelled() -> None:
    queue = Queue(policy("adaptive", latency_target_s=1.0, wait_s=0.0))
    for _ in range(4):
        fill(queue, 5)
        queue.finish(batch_of(queue, 0.0, busy()).entries[0], 0, 0.0, whole=False)
    fill(queue, 5, 5)
    assert len(batch_of(queue, 0.0, busy()).entries) == 1


# With which rows.


@pytest.mark.parametrize(
    ("values", "worker", "rows", "limit"),
    [
        ({}, busy(), 5, BatchLimit.ALL_WAITING),
        ({"max_rows": 3}, busy(), 3, BatchLimit.ROWS),
        ({}, busy(free_slots=2), 2, BatchLimit.WORKER_ROWS),
        ({"batch_tokens_max": 39}, busy(), 3, BatchLimit.TOKENS),
        ({"waiting_tokens_max": 59}, busy(waiting_tokens=10), 4, BatchLimit.WORKER_PREFILL),
        ({}, busy(free_tokens=50), 2, BatchLimit.WORKER_CACHE),
    ],
)
def test_a_batch_says_why_it_is_not_larger(
    values: dict[str, object], worker: Capacity, rows: int, limit: BatchLimit
) -> None:
    assert limited_batch(policy(**values), worker) == (rows, limit)


def test_a_row_beyond_the_budget_goes_alone() -> None:
    queue = Queue(policy(batch_tokens_max=50))
    fill(queue, 200, 10)
    assert [row.prefill_tokens for row in batch_of(queue, 1.0, busy()).entries] == [200]


def test_rows_of_about_one_length_go_together() -> None:
    queue = Queue(policy("length", padding_max=0.1, batches_running_max=None))
    fill(queue, 100, 1000, 105, 20, 95, 990)
    first, second, third = (batch_of(queue, 1.0, Capacity("w", 8)) for _ in range(3))
    assert sorted(row.prefill_tokens for row in first.entries) == [95, 100, 105]
    assert sorted(row.prefill_tokens for row in second.entries) == [990, 1000]
    assert [row.prefill_tokens for row in third.entries] == [20]
    assert first.limit is BatchLimit.PADDING
    assert first.padding_share == pytest.approx(1 - 300 / 315)


def test_less_urgent_requests_join_if_more_urgent_do_not_fit() -> None:
    queue = Queue(policy("length", padding_max=0.1))
    fill(queue, 100, 1000, 20)
    fill(queue, 105, 98, 30, priority_class="bulk")
    batch = batch_of(queue, 1.0, busy())
    assert sorted(row.prefill_tokens for row in batch.entries) == [98, 100, 105]
    assert batch.limit is BatchLimit.PADDING


def test_full_bucket_of_a_less_urgent_class_waits() -> None:
    queue = Queue(policy("length", max_rows=2, sends_to_idle=False))
    fill(queue, 1000, 1000, priority_class="bulk")
    assert batch_of(queue, 0.0, busy()).cause is BatchCause.FULL
    fill(queue, 1000, 1000, priority_class="bulk", now=1.0)
    fill(queue, 100, now=1.0)
    assert queue.next_batch(1.0, [busy()]) == (None, 1.1)
    assert batch_of(queue, 1.1, busy()).entries[0].prefill_tokens == 100


def test_full_bucket_goes_before_a_row_that_may_wait() -> None:
    queue = Queue(policy("length", max_rows=2, sends_to_idle=False))
    fill(queue, 100, 1000, 1000)
    batch = batch_of(queue, 0.05, busy())
    assert (batch.cause, batch.longest_wait.prefill_tokens) == (BatchCause.FULL, 1000)
    assert queue.next_batch(0.05, [busy()]).wake_at == 0.05 + 0.05
    assert batch_of(queue, 0.1, busy()).cause is BatchCause.WINDOW_OVER


def test_length_companions_are_in_order() -> None:
    queue = Queue(policy("length", max_rows=2, urgency=1.0))
    learn(queue, "interactive", 1.0)
    fill(queue, 100, tenant="b", now=0.0)
    fill(queue, 100, tenant="a", now=0.0, deadline=0.6)
    fill(queue, 100, tenant="a", now=0.0, deadline=0.5)
    rows = batch_of(queue, 0.0, Capacity("w", 8)).entries
    assert [row.deadline for row in rows] == [0.5, 0.6]


def test_the_token_budget_counts_padding() -> None:
    queue = Queue(policy("length", padding_max=0.5, batch_tokens_max=300))
    fill(queue, 100, 80, 80, 80)
    batch = batch_of(queue, 1.0, busy())
    assert (len(batch.entries), batch.limit) == (3, BatchLimit.TOKENS)


def padding_efficiency(name: str) -> tuple[float, float]:
    """Part of a padded batch that is tokens, and rows a batch, with 2,000 rows of lognormal lengths waiting."""
    chance, queue = random.Random(1), Queue(policy(name))
    tokens = cells = rows = 0

    def draw() -> int:
        return min(4096, max(1, int(chance.lognormvariate(math.log(200), 1.0))))

    fill(queue, *[draw() for _ in range(2000)])
    for number in range(150):
        now = 1.0 + number
        batch = batch_of(queue, now, Capacity("w", 32))
        lengths = [row.prefill_tokens for row in batch.entries]
        tokens, rows = tokens + sum(lengths), rows + len(lengths)
        cells += len(lengths) * max(lengths)
        for row in batch.entries:
            queue.finish(row, 5, now)
        fill(queue, *[draw() for _ in lengths], now=now)
    return tokens / cells, rows / 150


def test_by_length_hardly_anything_is_padding() -> None:
    efficiency, rows = padding_efficiency("length")
    assert efficiency >= 0.95
    assert rows >= 24
    assert padding_efficiency("window")[0] <= 0.4


# Changes.


@pytest.mark.parametrize("name", PRESETS)
def test_a_queue_goes_on_under_another_policy(name: str) -> None:
    queue = Queue(policy())
    fill(queue, *[10] * 6, priority_class="standard")
    first, second = batch_of(queue, 1.0, busy(free_slots=2)).entries
    queue.reconfigure(policy(name), {"default": 2.0})
    assert (len(queue), queue.order.classes["standard"].waiting) == (4, 4)
    come_back(queue, first, 1, 1.0)
    queue.finish(second, 3, 1.0)
    waited_s = []
    while len(queue):
        for row in batch_of(queue, 60.0, Capacity("w", 8)).entries:
            waited_s.append(row.waited_s)
            queue.finish(row, 3, 60.0)
    assert sorted(waited_s) == [59.0, 60.0, 60.0, 60.0, 60.0]
