"""Who of a class goes next, and in which order classes go."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.entry import QueueEntry
from batcher.core.scheduler.queue import Queue
from sluice.settings.batching import Policy
from tests.batcher.core.scheduler.kit import come_back
from tests.support.settings import tuned


def policy(**values: object) -> Policy:
    return tuned(Policy, **{"waiting_tokens_max": math.inf, **values})


def task(name: str, priority_class: str = "standard", **values: object) -> QueueEntry:
    return QueueEntry(name, priority_class, **values)  # type: ignore[arg-type]


def taken(queue: Queue, now: float, count: int) -> list[str]:
    batch = queue.next_batch(now, [Capacity("w", count)]).batch
    return [row.request_id for row in batch.entries] if batch else []


def learn_service(queue: Queue, service_s: float, priority_class: str = "standard") -> None:
    """Makes answers of the class take so long."""
    queue.add(learn := task("learn", priority_class), 0.0)
    assert taken(queue, 0.0, 1) == ["learn"]
    queue.finish(learn, 1, service_s)
    assert queue.order.classes[priority_class].service_s == service_s


def test_returned_requests_go_first_by_deadline() -> None:
    queue = Queue(policy(urgency=2.0))
    learn_service(queue, 1.0)
    back = {
        name: task(name, tenant="a", deadline=deadline, max_tokens=9)
        for name, deadline in (("back late", 90.0), ("back soon", 80.0), ("back last", math.inf))
    }
    for one in back.values():
        queue.add(one, 1.0)
    assert len(taken(queue, 1.0, 3)) == 3
    queue.add(task("other's turn", tenant="b", deadline=50.0), 2.0)
    queue.add(task("urgent", tenant="b", deadline=2.5), 2.0)
    queue.add(task("interactive", "interactive"), 2.0)
    for name in ("back last", "back late", "back soon"):
        come_back(queue, back[name], 3, 2.0)
    order = ["interactive", "back soon", "back late", "back last", "urgent", "other's turn"]
    assert taken(queue, 2.0, 6) == order


def test_what_came_back_is_charged_once() -> None:
    queue = Queue(policy())
    queue.add(lost := task("lost", tenant="a", prompt_tokens=100, max_tokens=50), 0.0)
    assert taken(queue, 0.0, 1) == ["lost"]
    again = come_back(queue, lost, 20, 1.0)
    assert again.charged == 120
    assert taken(queue, 1.0, 1) == ["lost"]
    queue.finish(again, 50, 2.0)
    assert queue.order.classes["standard"].tenants.flows["a"].virtual_time == 150
    other = Queue(policy())
    lost = task("lost", tenant="a", prompt_tokens=100, max_tokens=50, charged=120)
    other.add(lost, 0.0)
    assert taken(other, 0.0, 1) == ["lost"]
    other.finish(lost, 50, 2.0)
    assert other.order.classes["standard"].tenants.flows["a"].virtual_time == 30


def test_the_time_that_a_task_waited_elsewhere_counts() -> None:
    queue = Queue(policy(horizon_s=10.0, classes={"bulk": {"aging_s": 30.0}}))
    queue.add(task("young", deadline=math.inf), 100.0)
    queue.add(task("old", deadline=math.inf, age_s=5.0), 101.0)
    assert taken(queue, 101.0, 2) == ["old", "young"]
    queue.add(task("urgent", "interactive"), 102.0)
    queue.add(task("bulk", "bulk", age_s=29.0), 102.0)
    assert taken(queue, 102.0, 1) == ["urgent"]
    queue.add(task("urgent too", "interactive"), 103.0)
    assert taken(queue, 103.0, 2) == ["bulk", "urgent too"], "it is overdue"
    queue.add(task("bulk too", "bulk", age_s=60.0), 104.0)
    queue.add(task("urgent again", "interactive"), 104.0)
    assert taken(queue, 104.0, 2) == ["urgent again", "bulk too"], "bulk was sent a second ago"


def test_a_task_with_time_left_waits_for_its_tenants_turn() -> None:
    queue = Queue(policy(urgency=2.0))
    learn_service(queue, 1.0)
    queue.add(task("before", tenant="b"), 1.0)
    assert taken(queue, 1.0, 1) == ["before"]
    queue.add(task("first", tenant="a", deadline=100.0), 1.0)
    queue.add(task("in time", tenant="b", deadline=3.1), 1.0)
    assert taken(queue, 1.0, 2) == ["first", "in time"]


def test_a_tenant_gets_ahead_by_urgent_tasks_only_so_far() -> None:
    queue = Queue(policy(urgency=1e9, urgent_lead_tokens=250))
    learn_service(queue, 1.0)
    for number in range(9):
        queue.add(task(f"u{number}", tenant="a", prompt_tokens=99, deadline=50.0 + number), 1.0)
        queue.add(task(f"n{number}", tenant="b", prompt_tokens=99), 1.0)
    order = taken(queue, 1.0, 18)
    lead = [sum(1 if name[0] == "u" else -1 for name in order[:n]) for n in range(19)]
    assert max(lead[:10]) == 3, "each is 100 tokens"
    assert [name for name in order if name[0] == "u"] == [f"u{n}" for n in range(9)]


@given(
    rows=st.integers(1, 4),
    step_s=st.floats(0.1, 1.0),
    standard_s=st.floats(0.5, 3.0),
    bulk_s=st.floats(0.5, 6.0),
)
def test_class_waits_at_most_its_aging_and_other_overdue_turns(
    rows: int, step_s: float, standard_s: float, bulk_s: float
) -> None:
    """The bound of docs/concepts/batching.md, under a flood of interactive tasks."""
    agings = {"standard": {"aging_s": standard_s}, "bulk": {"aging_s": bulk_s}}
    queue = Queue(policy(classes=agings))
    for number in range(300):
        for name in ("interactive", "standard", "bulk"):
            queue.add(task(f"{name} {number}", name), 0.0)
    served: dict[str, list[float]] = {"standard": [0.0], "bulk": [0.0]}
    for number in range(60):
        for name in taken(queue, number * step_s, rows):
            served.get(name.split()[0], []).append(number * step_s)
    for name, aging_s in (("standard", standard_s), ("bulk", bulk_s)):
        gaps = [after - before for before, after in pairwise([*served[name], 59 * step_s])]
        assert max(gaps) <= aging_s + 2 * step_s + 1e-9


def test_an_overdue_class_sends_one_row_before_more_urgent_ones() -> None:
    queue = Queue(policy(classes={"bulk": {"aging_s": 2.0}}))
    for number in range(8):
        queue.add(task(f"i{number}", "interactive"), 0.0)
        queue.add(task(f"b{number}", "bulk"), 0.0)
    assert taken(queue, 1.9, 3) == ["i0", "i1", "i2"]
    assert taken(queue, 2.0, 3) == ["b0", "i3", "i4"]


@pytest.mark.parametrize(
    ("order", "names"), [("arrival", ["bulk", "late", "soon"]), ("class", ["late", "soon", "bulk"])]
)
def test_policy_may_ignore_deadlines_and_classes(order: str, names: list[str]) -> None:
    queue = Queue(policy(order=order))
    queue.add(task("bulk", "bulk", tenant="a"), 0.0)
    queue.add(task("late", "interactive", tenant="b", deadline=9.0), 0.0)
    queue.add(task("soon", "interactive", tenant="a", deadline=5.0), 0.0)
    assert (queue.order.classes["bulk"].waiting, queue.order.classes["interactive"].waiting) == (
        1,
        2,
    )
    assert taken(queue, 1.0, 3) == names


def test_an_empty_queue_has_nothing_to_do_and_never_wakes() -> None:
    assert Queue(policy()).next_batch(0.0, [Capacity("w", 8)]) == (None, None)


def test_only_guessed_costs_are_estimated_again_on_take() -> None:
    queue = Queue(policy())

    def add(name: str, answers: int, tokens: int) -> None:
        queue.add(task(name, "bulk", prompt_tokens=10, max_tokens=100), 0.0)
        for number in range(answers):
            request_id = f"{name} {number}"
            queue.add(known := task(request_id, "interactive", max_tokens=100), 0.0)
            assert taken(queue, 0.0, 1) == [request_id]
            queue.finish(known, tokens, 0.0)

    add("guessed", 50, 20)
    add("known", 50, 70)
    batch = queue.next_batch(0.0, [Capacity("w", 2)]).batch
    assert batch is not None
    guessed, known = (row.cache_tokens for row in batch.entries)
    assert known < 50 < guessed < 110


def test_batch_has_the_wait_of_each_request() -> None:
    queue = Queue(policy())
    queue.add(a := task("a", "bulk"), 1.0)
    queue.next_batch(2.0, [Capacity("w", 1)])
    queue.add(task("b", "bulk"), 3.0)
    come_back(queue, a, 0, 5.0)
    batch = queue.next_batch(6.0, [Capacity("w", 2)]).batch
    assert batch is not None
    assert [(row.request_id, row.waited_s) for row in batch.entries] == [("a", 1.0), ("b", 3.0)]
