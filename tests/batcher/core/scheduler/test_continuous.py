"""Which worker gets the first row, which rows go with it, and why no more."""

import pytest

from batcher.core.scheduler.capacity import Capacity, UsableCapacity
from batcher.core.scheduler.entry import BatchCause
from batcher.core.scheduler.queue import Queue
from sluice.settings.batching import Policy
from tests.batcher.core.scheduler.kit import (
    batch_of,
    busy,
    fill,
    policy,
)
from tests.support.settings import tuned


def test_a_free_slot_is_enough() -> None:
    queue = Queue(Policy())
    fill(queue, 5)
    batch = batch_of(queue, 0.0, busy())
    assert (batch.cause, len(batch.entries)) == (BatchCause.SLOT_FREE, 1)


@pytest.mark.parametrize(("waiting", "cause"), [(4, BatchCause.FULL), (3, BatchCause.SLOT_FREE)])
def test_continuous_full_is_its_own_size(waiting: int, cause: BatchCause) -> None:
    queue = Queue(Policy(max_rows=4))
    fill(queue, *[5] * waiting)
    batch = batch_of(queue, 0.0, busy(free_slots=3))
    assert (batch.cause, len(batch.entries)) == (cause, 3)


def test_continuous_ignores_what_static_policies_wait_for() -> None:
    static = {"batch_tokens_max": 10, "padding_max": 0.0, "batches_running_max": 1, "wait_s": 5.0}
    queue = Queue(policy("continuous", latency_target_s=1.0, **static))
    fill(queue, *[10] * 5)
    batch = batch_of(queue, 0.0, Capacity("w", 8, batches_running=1))
    assert (batch.cause, len(batch.entries)) == (BatchCause.WORKER_IDLE, 5)


def full_of_bulk(urgent_rows: int = 3) -> Capacity:
    """No slot is free, but bulk rows would give theirs."""
    return busy(free_slots=0, running=16, urgent=[UsableCapacity(urgent_rows)] * 2)


@pytest.mark.parametrize(
    ("priority_class", "rows"), [("interactive", 3), ("standard", 3), ("bulk", None)]
)
def test_less_urgent_rows_give_way(priority_class: str, rows: int | None) -> None:
    queue = Queue(Policy())
    fill(queue, *[5] * 4, priority_class=priority_class)
    batch = queue.next_batch(0.0, [full_of_bulk()]).batch
    assert (batch and len(batch.entries)) == rows


def test_companion_uses_the_capacity_of_its_own_class() -> None:
    queue = Queue(Policy())
    for name in ("interactive", "standard", "bulk"):
        fill(queue, 5, 5, priority_class=name)
    worker = busy(free_slots=0, running=16, urgent=[UsableCapacity(9), UsableCapacity(3)])
    assert len(batch_of(queue, 0.0, worker).entries) == 3
    assert [queue.order.classes[name].waiting for name in ("standard", "bulk")] == [1, 2]


def test_a_free_slot_is_better_than_a_taken_one() -> None:
    queue = Queue(Policy())
    fill(queue, 5, priority_class="interactive")
    free = busy(free_slots=1, running=15)._replace(worker="free")
    assert queue.next_batch(0.0, [full_of_bulk(), free]).batch.worker == "free"  # type: ignore[union-attr]


def test_where_bulk_gives_way_it_leaves_no_slot_free() -> None:
    for urgent, rows in (((), 4), ([UsableCapacity(8)] * 2, 8)):
        queue = Queue(Policy())
        fill(queue, 5, priority_class="interactive")
        batch_of(queue, 0.0, Capacity("w", 1))
        fill(queue, *[5] * 20, priority_class="bulk")
        batch = batch_of(queue, 0.1, busy(free_slots=8, running=8, urgent=urgent))
        assert len(batch.entries) == rows


def test_nothing_goes_before_what_fits_nowhere() -> None:
    queue = Queue(Policy())
    fill(queue, 500)
    fill(queue, 5, priority_class="bulk")
    assert queue.next_batch(0.0, [busy(free_tokens=100)]).batch is None
    assert len(batch_of(queue, 0.0, Capacity("w", 8, free_tokens=100)).entries) == 1


def test_bulk_leaves_rows_free_while_more_urgent_tasks_come() -> None:
    queue = Queue(tuned(Policy, spare_s=5.0))
    fill(queue, *[5] * 20, priority_class="bulk")
    assert len(batch_of(queue, 0.0, busy(free_slots=12)).entries) == 12
    fill(queue, 5, now=1.0)
    assert len(batch_of(queue, 1.0, busy(free_slots=12, running=20)).entries) == 4
    assert queue.next_batch(1.0, [busy(free_slots=8, running=24)]).batch is None
    assert len(batch_of(queue, 6.0, busy(free_slots=8, running=24)).entries) == 5


# The worker.


def chosen(
    *workers: Capacity, prompt: int = 100, queue: Queue | None = None, prefix: int = 0
) -> str | None:
    """The worker of a row of ``prompt`` tokens that may need 200 of the cache."""
    if queue is None:
        queue = Queue(tuned(Policy, waiting_tokens_max=1000))
    fill(queue, prompt, max_tokens=200 - min(prompt, 100), prefix=prefix)
    batch = queue.next_batch(0.0, workers).batch
    return batch.worker if batch else None


def working(worker: str, **values: float) -> Capacity:
    return Capacity(worker, **{"free_slots": 4, "running": 4, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("worker", "room"),
    [
        (working("w"), True),
        (working("w", free_slots=0), False),
        (working("w", free_tokens=199), False),
        (working("w", free_tokens=200), True),
        (working("w", waiting_tokens=900), True),
        (working("w", waiting_tokens=901), False),
        (working("w", running=0, free_tokens=5), True),  # Idle: it says itself what does not fit.
    ],
)
def test_a_worker_without_room_gets_nothing(worker: Capacity, room: bool) -> None:
    assert chosen(worker) == ("w" if room else None)


@pytest.mark.parametrize(
    ("priority_class", "goes"), [("interactive", True), ("standard", False), ("bulk", False)]
)
def test_only_the_urgent_class_ignores_unacknowledged_batches(
    priority_class: str, goes: bool
) -> None:
    queue = Queue(Policy())
    fill(queue, 5, priority_class=priority_class)
    batch = queue.next_batch(0.0, [working("w", batches_in_flight=4)]).batch
    assert (batch is not None) == goes


def test_overlong_prompt_goes_to_a_worker_without_waiting_ones() -> None:
    assert chosen(working("w"), prompt=5000) == "w"
    assert chosen(working("w", waiting_tokens=1), prompt=5000) is None


def test_placement_prefers_the_fewest_prompt_tokens_in_front() -> None:
    behind = working("behind", waiting_tokens=500, running=1)
    assert chosen(behind, working("soon")) == "soon"


def test_of_equal_ones_the_emptier_one_is_taken() -> None:
    full = Capacity("full", 1, running=7)
    empty = Capacity("empty", 7, running=1)
    assert chosen(full, empty) == "empty"


@pytest.mark.parametrize(("waiting", "worker"), [(90, "knows"), (150, "soon")])
def test_placement_prefers_a_cached_prefix_within_its_saving(waiting: int, worker: str) -> None:
    queue = Queue(tuned(Policy, waiting_tokens_max=1000))
    assert chosen(working("knows"), queue=queue, prefix=1) == "knows"
    knows, soon = working("knows", waiting_tokens=waiting), working("soon")
    assert chosen(soon, knows, queue=queue, prefix=2) == "soon"
    assert chosen(soon, knows, queue=queue, prefix=1) == worker


def test_rows_are_left_free_but_never_more_than_a_quarter() -> None:
    queue = Queue(Policy())
    fill(queue, 5)
    batch_of(queue, 0.0, Capacity("w", 1))
    fill(queue, *[5] * 4, priority_class="bulk")
    assert queue.next_batch(0.1, [Capacity("large", 2, running=30)]).batch is None
    assert len(batch_of(queue, 0.1, Capacity("small", 2, running=1)).entries) == 2
