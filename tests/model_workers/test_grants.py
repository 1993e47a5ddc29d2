"""What a worker grants its batchers: room by class, divided among those that have rows for it, as totals."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_workers.grants import Grants, class_capacities
from sluice.internal.v1 import worker_pb2

CLASSES = 3
HEARTBEAT_S = 0.25


def load_of(
    rows: tuple[int, ...], slots: int = 16, places: int = 48, free_blocks: int = 0, tokens: int = 0
) -> worker_pb2.WorkerLoad:
    """The load of an engine with so many rows of each class, each with ``tokens`` in the cache."""
    running = sum(rows)
    return worker_pb2.WorkerLoad(
        slots=slots,
        running=min(slots, running),
        waiting=max(0, running - slots),
        max_tasks=places,
        block_tokens=10 if free_blocks else 0,
        free_blocks=free_blocks,
        classes=tuple(worker_pb2.ClassLoad(running=n, running_tokens=n * tokens) for n in rows),
    )


@pytest.mark.parametrize(
    ("rows", "slots", "places", "room"),
    [
        ((0, 0, 0), 16, 48, (16, 16, 16)),
        ((0, 0, 16), 16, 48, (15, 15, 0)),  # one slot stays with bulk
        ((4, 6, 6), 16, 48, (11, 5, 0)),
        ((4, 12, 0), 16, 48, (11, 0, 0)),
        ((16, 0, 9), 16, 48, (0, 0, 0)),
        ((0, 0, 46), 16, 48, (2, 2, 0)),  # as many places are left
        ((0, 0, 32), 32, 64, (30, 30, 0)),
        ((0, 0, 1), 1, 33, (0, 0, 0)),  # a single slot is never taken
        ((0, 0, 3), 16, 48, (15, 15, 13)),
        ((15, 0, 1), 16, 48, (0, 0, 0)),
        ((28, 0, 2), 32, 64, (2, 2, 2)),  # these two slots stay with bulk
    ],
)
def test_class_capacity_includes_less_urgent_slots(
    rows: tuple[int, ...], slots: int, places: int, room: tuple[int, ...]
) -> None:
    assert tuple(one.tasks for one in class_capacities(load_of(rows, slots, places))) == room


def test_tokens_of_less_urgent_rows_are_room_too() -> None:
    rooms = class_capacities(load_of((1, 1, 14), free_blocks=5, tokens=20))
    assert [one.tokens for one in rooms] == [50 + 300, 50 + 280, 50]
    assert class_capacities(load_of((1, 1, 14)))[0].tokens == math.inf


def test_without_preemption_all_classes_share_free_slots() -> None:
    load = worker_pb2.WorkerLoad(slots=8, running=5, waiting=1)
    assert [one.tasks for one in class_capacities(load)] == [2, 2, 2]


@given(
    rows=st.tuples(*[st.integers(0, 40)] * 3), slots=st.integers(1, 64), waiting=st.integers(0, 64)
)
def test_nobody_gets_more_than_there_is(rows: tuple[int, ...], slots: int, waiting: int) -> None:
    places, present = slots + waiting, sum(rows)
    rooms = class_capacities(load_of(rows, slots, places))
    assert rooms[0].tasks >= rooms[1].tasks >= rooms[2].tasks >= 0
    for room in rooms:
        assert room.tasks <= max(0, places - present)
    for rank in (0, 1):
        taken = sum(rows[: rank + 1])
        assert rooms[rank].tasks <= max(0, slots - taken), "a slot for each that is sent"


def batch(
    batcher: str, rows: int, waiting: tuple[int, ...] = (), tokens: int = 0
) -> worker_pb2.Batch:
    return worker_pb2.Batch(
        batcher=batcher,
        tasks=[worker_pb2.BatchedTask(cache_tokens=tokens) for _ in range(rows)],
        queued=waiting,
    )


def test_a_grant_counts_what_came_over_the_channel_in_all() -> None:
    grants = Grants()
    grants.open("b", 1, HEARTBEAT_S)
    grants.take(batch("b", 3, tokens=20), 0.0)
    assert grants.give(load_of((0, 0, 3), free_blocks=9), 0.0)["b"].tasks == [
        3 + 15,
        3 + 15,
        3 + 13,
    ]
    assert grants.give(load_of((0, 0, 3), free_blocks=9), 0.0)["b"].tokens[2] == 60 + 90
    grants.open("b", 2, HEARTBEAT_S)
    assert grants.give(load_of((0, 0, 0)), 0.0)["b"].tasks == [16, 16, 16]


def test_nobody_has_room_beside_a_row_that_is_computed_alone() -> None:
    grants = Grants()
    grants.open("a", 1, HEARTBEAT_S)
    grants.open("b", 1, HEARTBEAT_S)
    grants.take(batch("a", 3), 0.0)
    grants.withdrawn = True
    given = grants.give(load_of((0, 0, 0)), 0.0)
    assert {name: list(grant.tasks) for name, grant in given.items()} == {
        "a": [3, 3, 3],
        "b": [0, 0, 0],
    }
    grants.withdrawn = False
    assert grants.give(load_of((0, 0, 0)), 0.0)["b"].tasks[2] == 8


def test_the_room_is_theirs_who_have_rows_for_it() -> None:
    grants = Grants()
    grants.open("a", 1, HEARTBEAT_S)
    grants.open("b", 1, HEARTBEAT_S)
    both = grants.give(load_of((0, 0, 0)), 0.0)
    assert (both["a"].tasks[2], both["b"].tasks[2]) == (8, 8)
    grants.set_queued("a", (0, 0, 5), 0.0)
    asked = grants.give(load_of((0, 0, 0)), 0.0)
    assert (asked["a"].tasks[2], asked["b"].tasks[2]) == (8, 8), "five wait, the rest is anybody's"
    grants.set_queued("a", (0, 0, 50), 0.0)
    asked = grants.give(load_of((0, 0, 0)), 0.0)
    assert (asked["a"].tasks[2], asked["b"].tasks[2]) == (16, 0)
    assert (asked["a"].tasks[0], asked["b"].tasks[0]) == (8, 8), "no interactive row waits"
    grants.set_queued("a", (0, 0, 0), 0.0)
    grants.close("b")
    assert grants.give(load_of((0, 0, 0)), 0.0)["a"].tasks == [16, 16, 16]


def test_capacity_of_a_silent_batcher_goes_to_others() -> None:
    grants = Grants()
    for name in "ab":
        grants.open(name, 1, HEARTBEAT_S)
    grants.take(batch("a", 2, waiting=(0, 0, 50)), 0.5)
    grants.set_queued("b", (0, 0, 50), 1.0)
    known = grants.give(load_of((0, 0, 2)), 0.5 + 3 * HEARTBEAT_S)
    assert (known["a"].tasks[2], known["b"].tasks[2]) == (2 + 7, 7)
    silent = grants.give(load_of((0, 0, 2)), 0.6 + 3 * HEARTBEAT_S)
    assert (silent["a"].tasks[2], silent["b"].tasks[2]) == (2, 14)
    grants.set_queued("a", (0, 0, 5), 2.0)
    back = grants.give(load_of((0, 0, 2)), 2.0)
    assert back["a"].tasks[2] > 2


def test_idle_batchers_get_no_share_of_tokens() -> None:
    grants = Grants()
    for name in "ab":
        grants.open(name, 1, HEARTBEAT_S)
    grants.set_queued("a", (0, 0, 1), 0.0)
    assert grants.give(load_of((0, 0, 0), free_blocks=9), 0.0)["a"].tokens[2] == 90
    grants.set_queued("b", (0, 0, 1), 0.0)
    assert grants.give(load_of((0, 0, 0), free_blocks=9), 0.0)["a"].tokens[2] == 45


def test_batchers_with_rows_that_wait_have_as_many_here() -> None:
    grants = Grants()
    for name in "ab":
        grants.open(name, 1, HEARTBEAT_S)
        grants.set_queued(name, (0, 0, 100), 0.0)
    grants.take(batch("a", 10, waiting=(0, 0, 90)), 0.0)
    given_ = grants.give(load_of((0, 0, 10)), 0.0, "a" * 10)
    assert (given_["a"].tasks[2] - 10, given_["b"].tasks[2]) == (0, 6)
    given_ = grants.give(load_of((0, 0, 4)), 0.0, "a" * 4)
    assert (given_["a"].tasks[2] - 10, given_["b"].tasks[2]) == (4, 8)
    grants.take(batch("a", 1, waiting=(0, 0, 0)), 0.0)
    assert grants.give(load_of((0, 0, 4)), 0.0, "a" * 4)["a"].tasks[2] == 11, (
        "nothing waits there now"
    )


def test_first_urgent_task_needs_no_grant() -> None:
    grants = Grants()
    for name in "abc":
        grants.open(name, 1, HEARTBEAT_S)
    grants.set_queued("a", (7, 0, 0), 0.0)
    full = grants.give(load_of((16, 0, 0)), 0.0)
    assert [full[name].tasks[0] for name in "abc"] == [0, 1, 1]
    given_ = grants.give(load_of((16, 0, 0)), 0.0, "b" * (16 // 3))
    assert [given_[name].tasks[0] for name in "abc"] == [0, 0, 1]
    no_place = grants.give(load_of((48, 0, 0)), 0.0)
    assert [no_place[name].tasks[0] for name in "abc"] == [0, 0, 0]


@given(st.data())
def test_together_batchers_get_what_there_is_and_not_more(data: st.DataObject) -> None:
    grants, names = Grants(), "abcd"[: data.draw(st.integers(1, 4))]
    waiting = {name: data.draw(st.tuples(*[st.integers(0, 3)] * CLASSES)) for name in names}
    rows = data.draw(st.tuples(*[st.integers(0, 8)] * CLASSES))
    for name in names:
        grants.open(name, 1, HEARTBEAT_S)
        grants.set_queued(name, waiting[name], 0.0)
    rooms, given_ = class_capacities(load_of(rows)), grants.give(load_of(rows), 0.0)
    for rank in (1, 2):
        assert sum(given_[name].tasks[rank] for name in names) == rooms[rank].tasks
        wanted = {name: sum(waiting[name][: rank + 1]) for name in names}
        unmet = any(given_[name].tasks[rank] < wanted[name] for name in names)
        for name in names if unmet else ():
            assert given_[name].tasks[rank] <= wanted[name], "it would have more than waits there"
    spare = len(names) if len(names) > 1 else 0
    assert rooms[0].tasks <= sum(given_[name].tasks[0] for name in names) <= rooms[0].tasks + spare


def test_who_is_not_known_changes_nothing() -> None:
    grants = Grants()
    grants.take(batch("ghost", 3), 0.0)
    grants.set_queued("ghost", (1, 1, 1), 0.0)
    grants.close("ghost")
    assert grants.give(load_of((0, 0, 0)), 0.0) == {}
    assert grants.epoch("ghost") == 0
