"""Rows wait in the gateway while no batcher has room for them; what a batcher grants is neither made nor lost."""

from collections import Counter

import pytest

from gateway.streaming.dispatch import NO_BATCHER_S, Dispatch
from gateway.streaming.room import Room, SentRow
from sluice.internal.v1.frame_pb2 import TaskRef
from tests.gateway.kit.rows import Batchers, sent_row
from tests.gateway.streaming.test_dispatch import STALL_S, given_back, new_attempt

ROWS = 4


class Door:
    """A gateway that sends many rows, and its batchers."""

    def __init__(self, *batchers: str, rows: float = ROWS, size: float = 1e9) -> None:
        self.batchers = Batchers(*(batchers or ("b1",)))
        self.batchers.room = Room(rows, size)
        self.dispatch = Dispatch("g", self.batchers, STALL_S)
        self.now = 100.0
        self._numbers = 0

    def send(self, count: int, tenant: str = "a", priority_class: str = "bulk") -> list[SentRow]:
        rows = []
        for _ in range(count):
            self._numbers += 1
            row = sent_row(new_attempt(f"r{self._numbers}"), self.now + 1e4, priority_class)
            row.task.tenant = tenant
            self.dispatch.send(row, self.now)
            rows.append(row)
        return rows

    def sent(self) -> list[SentRow]:
        self.dispatch.fill(self.now)
        return [row for _, row in self.dispatch.drain().tasks]

    def frame(self, row: SentRow) -> None:
        """Its batcher sends a frame of the row."""
        assert self.dispatch.accepts(row.batcher, row.task.request_id, row.task.attempt, self.now)

    def given(self, running: list[SentRow]) -> Counter[str]:
        """The tenants of the next 300 rows that are sent, each when the first of ``running`` has begun."""
        running, given = list(running), Counter[str]()
        for _ in range(300):
            self.frame(running.pop(0))
            running += (more := self.sent())
            given.update(row.task.tenant for row in more)
        return given

    @property
    def waiting(self) -> int:
        return sum(self.dispatch.waiting.values())


def test_rows_beyond_the_room_wait_in_order_and_go_when_a_frame_comes() -> None:
    door = Door()
    rows = door.send(10)
    assert (door.sent(), door.waiting) == (rows[:ROWS], 6)
    for number in range(6):
        door.dispatch.accepts("b1", rows[number].task.request_id, 0, door.now, waits=True)
        assert door.sent() == [], "taken is not begun"
        door.frame(rows[number])
        door.frame(rows[number])
        assert door.sent() == [rows[ROWS + number]]
    assert door.waiting == 0


def test_what_is_cancelled_gives_its_room_back_or_leaves_the_line() -> None:
    door = Door()
    rows = door.send(7)
    door.sent()
    door.dispatch.cancel(rows[4].task.request_id)
    door.dispatch.cancel(rows[0].task.request_id)
    assert door.sent() == [rows[5]]


def test_interactive_rows_never_wait_and_are_counted_by_their_class_alone() -> None:
    door = Door(rows=0)
    rows = door.send(20, priority_class="interactive")
    assert door.sent() == rows
    door = Door()
    door.send(ROWS)
    assert len(door.send(ROWS, priority_class="standard")) == len(door.sent()) - ROWS


def test_room_is_bytes_too_and_a_large_row_goes_alone() -> None:
    (row,) = Door(size=1).send(1)
    door = Door(size=2 * row.size)
    rows = door.send(3)
    assert door.sent() == rows[:2]
    assert Door(size=1).send(1)[0].batcher


def test_two_batchers_have_room_each() -> None:
    door = Door("b1", "b2")
    rows = door.send(3 * ROWS)
    assert len(door.sent()) == 2 * ROWS
    assert Counter(row.batcher for row in rows) == {"b1": ROWS, "b2": ROWS, "": ROWS}


@pytest.mark.parametrize("weights", [{}, {"late": 3.0}])
def test_a_tenant_that_comes_late_has_its_share_at_once_and_then_its_turns(
    weights: dict[str, float],
) -> None:
    door = Door(rows=40)
    door.dispatch.use_weights(weights)
    many = door.send(400, "many")
    assert len(door.sent()) == 40
    late = door.send(400, "late")
    share = weights.get("late", 1.0) / (1 + weights.get("late", 1.0))
    begun = door.sent()
    assert set(begun) <= set(late)
    assert len(begun) == round(40 * share), "on top of what the other has taken"
    # From now on what is freed is shared.
    given = door.given([*many[:40], *begun])
    assert given["late"] / given.total() == pytest.approx(share, abs=0.1)


def test_other_weights_hold_for_rows_that_wait() -> None:
    door = Door(rows=40)
    running = door.send(500, "many")[:40]
    running += door.send(500, "late")[:20]
    door.sent()
    door.dispatch.use_weights({"late": 3.0})
    given = door.given(running)
    assert given["late"] / given.total() == pytest.approx(0.75, abs=0.1)


def test_a_lost_row_goes_elsewhere_without_new_room_and_keeps_its_place() -> None:
    door = Door("b1", "b2")
    rows = door.send(4 * ROWS)
    door.sent()
    lost = [row for row in rows if row.batcher == "b1"]
    for row in lost:
        door.dispatch.accepts("b1", row.task.request_id, 0, door.now, waits=True)
    door.dispatch.gone("b1", door.now)
    assert door.sent() == lost
    assert {row.batcher for row in lost} == {"b2"}
    door.now += 0.1
    door.dispatch.tick(door.now)
    assert door.sent() == [], "b2 has more than its room"


def test_without_a_batcher_a_row_waits_a_stated_time_and_with_a_full_one_until_its_deadline() -> (
    None
):
    door = Door()
    failed: list[str] = []
    door.dispatch.on_failed = lambda row_id, *_: failed.append(row_id)
    door.send(ROWS + 1)
    for _ in range(round(3 * NO_BATCHER_S)):
        door.now += 0.5
        door.dispatch.heard("b1", door.now)
        door.dispatch.restart(door.now)  # rows at the batcher are not what this is about
        door.dispatch.tick(door.now)
    assert (failed, door.waiting) == ([], 1)
    door.batchers.names = ()
    for _ in range(round(2 * NO_BATCHER_S) + 2):
        door.now += 0.5
        door.dispatch.restart(door.now)
        door.dispatch.tick(door.now)
    assert failed == [f"r{ROWS + 1}"]


def test_time_without_a_batcher_is_counted_anew_when_one_was_there() -> None:
    door = Door()
    failed: list[str] = []
    door.dispatch.on_failed = lambda row_id, *_: failed.append(row_id)
    door.send(ROWS + 1)
    for names in ((), ("b1",), ()):
        door.batchers.names = names
        for _ in range(round(1.5 * NO_BATCHER_S)):
            door.now += 0.5
            door.dispatch.restart(door.now)
            door.dispatch.tick(door.now)
        assert (failed, door.waiting) == ([], 1)


def test_rows_that_were_sent_before_go_before_others_of_their_tenant_in_their_order() -> None:
    door = Door()
    first, second, third, *_ = door.send(ROWS)
    (new,) = door.send(1)
    door.sent()
    door.batchers.names = ()
    for row in (first, second):
        door.dispatch.returned("b1", given_back(row), door.now)
    door.dispatch.cancel(first.task.request_id)
    door.dispatch.returned("b1", given_back(third), door.now)
    door.batchers.names, door.batchers.room = ("b1",), Room(9, 1e9)
    door.dispatch.tick(door.now)
    assert door.sent() == [second, third, new]


def test_lost_late_and_doubled_words_of_batchers_make_no_room() -> None:
    door = Door()
    rows = door.send(3 * ROWS)
    door.sent()
    for _ in range(3):
        door.frame(rows[0])
    door.dispatch.unknown("b1", [TaskRef(request_id=rows[1].task.request_id)], door.now)
    again = door.sent()
    assert again == [rows[1], rows[ROWS]]
    taken = [row for row in rows if row.room_at]
    assert len(taken) == ROWS
