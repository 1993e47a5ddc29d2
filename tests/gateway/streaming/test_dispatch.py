"""Which batcher has which row, and what becomes of rows that nobody seems to have."""

import pytest

from gateway.streaming.dispatch import (
    AVOID_S,
    BATCHERS_MAX,
    BUSY_S,
    LAG_S,
    LOSSES_MAX,
    NO_BATCHER_S,
    QUERY_ROWS_MAX,
    RECENT,
    ROW_ID_CHARS_MAX,
    SEND_S,
    UNREAD_S,
    Dispatch,
    Outgoing,
)
from gateway.streaming.room import Room, SentRow
from gateway.streaming.row import Row
from sluice.errors import EngineFailed, ModelUnavailable, Overloaded, SluiceError
from sluice.internal.v1.frame_pb2 import (
    RETURN_CAUSE_NOT_ACCEPTED,
    RETURN_CAUSE_WORKER_LOST,
    TASK_END_RETURNED,
    Final,
    Frame,
    ReturnCause,
    TaskError,
    TaskRef,
)
from sluice.wire.codec import pack
from tests.gateway.kit.rows import Batchers, dispatch_to, new_row, said, sent_row

STALL_S = 0.75


def new_attempt(row_id: str) -> Row:
    return new_row(row_id, stall_s=STALL_S)


def given_back(
    row: SentRow,
    why: str = "the worker was lost",
    cause: "ReturnCause.ValueType" = RETURN_CAUSE_WORKER_LOST,
) -> Frame:
    """Of a row that its worker did not go on with."""
    final = Final(end=TASK_END_RETURNED, return_cause=cause)
    final.error.reason, final.error.message = EngineFailed.reason, why
    return Frame(request_id=row.task.request_id, attempt=row.task.attempt, final=final)


class Desk:
    """One row, two batchers, and a clock that ticks."""

    def __init__(self, *batchers: str, priority_class: str = "interactive") -> None:
        self.now = 100.0
        self.batchers = Batchers(*(batchers or ("b1", "b2")))
        self.dispatch = dispatch_to(stall_s=STALL_S)
        self.dispatch._batchers = self.batchers
        self.failed: list[SluiceError] = []
        self.dispatch.on_failed = lambda _, error: self.failed.append(error)
        self.attempt = new_attempt("r")
        self.row: SentRow = sent_row(self.attempt, self.now + 1000, priority_class)
        self.dispatch.send(self.row, self.now)

    def tick(self, seconds: float = STALL_S) -> Outgoing:
        """Lets time pass; returns what was sent meanwhile."""
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            self.dispatch.tick(self.now)
        return self.dispatch.drain()

    def hold_one_more(self, row_id: str) -> None:
        """Another row, which waits at the first batcher."""
        self.dispatch.send(sent_row(new_attempt(row_id), self.now + 1000), self.now)
        self.dispatch.heard("b1", self.now)
        self.dispatch.accepts("b1", row_id, 0, self.now, waits=True)

    def hold(self, batcher: str = "b1") -> bool:
        self.dispatch.heard(batcher, self.now)
        return self.dispatch.accepts(batcher, "r", self.row.task.attempt, self.now, waits=True)

    def tokens(self, count: int, batcher: str = "b1") -> None:
        """Tokens arrive."""
        self.dispatch.heard(batcher, self.now)
        start = self.attempt.next_index
        frame = Frame(
            request_id="r",
            attempt=self.row.task.attempt,
            start_index=start,
            token_ids=[97] * count,
        )
        assert self.dispatch.accepts(batcher, "r", frame.attempt, self.now)
        self.attempt.accept(frame, self.now)

    def returned(self, batcher: str = "b1", error: TaskError | None = None) -> None:
        frame = Frame(request_id="r", attempt=self.row.task.attempt)
        frame.final.end = TASK_END_RETURNED
        if error is not None:
            frame.final.error.CopyFrom(error)
        self.dispatch.returned(batcher, frame, self.now)

    def worker_lost(
        self,
        why: str = "the worker was lost",
        cause: "ReturnCause.ValueType" = RETURN_CAUSE_WORKER_LOST,
    ) -> None:
        """Its batcher gives the row back."""
        frame = given_back(self.row, why, cause)
        self.dispatch.returned(self.row.batcher or "b1", frame, self.now)

    def sent_to(self) -> list[tuple[str, int, int]]:
        """Batcher, attempt and known tokens of the tasks that were sent since."""
        return [
            (batcher, row.task.attempt, len(row.task.produced_token_ids))
            for batcher, row in self.dispatch.drain().tasks
        ]


def test_a_row_goes_to_a_batcher_with_the_time_that_is_left() -> None:
    desk = Desk()
    assert desk.sent_to() == [("b1", 0, 0)]
    assert desk.row.task.timeout_ms == 1_000_000


def test_no_row_ends_before_its_deadline_because_a_part_of_a_millisecond_was_cut() -> None:
    row = sent_row(new_attempt("short"), 101.0004)
    Desk().dispatch.send(row, 100.0)
    assert row.task.timeout_ms == 1001


def test_a_silent_row_is_asked_about_and_an_answer_is_all_it_takes() -> None:
    desk = Desk()
    desk.hold()
    desk.tokens(2)
    desk.dispatch.drain()
    (message,) = [m for _, m in desk.tick(STALL_S + 0.05).control]
    (asked,) = message.query.tasks
    assert (asked.request_id, asked.next_index, message.gateway) == ("r", 2, "g")
    for _ in range(10):
        desk.hold()
        assert not desk.tick().tasks


def test_a_batcher_that_answers_nothing_loses_its_rows_to_another() -> None:
    desk = Desk()
    desk.hold()
    desk.tokens(2)
    desk.dispatch.drain()
    assert not desk.tick(3 * STALL_S - 0.1).tasks
    ((batcher, row),) = desk.tick(0.3).tasks
    assert (batcher, row.task.attempt, list(row.task.produced_token_ids)) == ("b2", 1, [97, 97])
    # The earlier owner comes back: its frames are fenced out, and it is told.
    assert not desk.dispatch.accepts("b1", "r", 0, desk.now)
    assert said(desk.dispatch.drain()) == {"cancel": ["r"]}
    desk.tokens(1, "b2")


def test_a_batcher_that_sends_other_words_is_alive() -> None:
    desk = Desk()
    desk.hold()
    desk.tokens(1)
    for _ in range(3):
        desk.tick()
        desk.dispatch.heard("b1", desk.now)
    assert desk.row.batcher == "b1"


def test_a_batcher_that_does_not_know_the_row_has_lost_it() -> None:
    desk = Desk()
    desk.hold()
    desk.tokens(1)
    desk.dispatch.drain()
    desk.dispatch.unknown("b1", [TaskRef(request_id="r", attempt=0)], desk.now)
    assert desk.sent_to() == [("b1", 1, 1)]
    desk.dispatch.unknown("b1", [TaskRef(request_id="r", attempt=0)], desk.now)  # an older word
    assert desk.sent_to() == []


def test_a_batcher_that_has_forgotten_one_row_is_asked_about_those_that_wait() -> None:
    desk = Desk("b1")
    desk.hold()
    desk.hold_one_more("waits")
    desk.dispatch.drain()
    desk.dispatch.unknown("b1", [TaskRef(request_id="r", attempt=0)], desk.now)
    assert said(desk.tick(0.05)) == {"task": ["r"], "ask": ["waits"]}


def test_all_rows_of_a_silent_batcher_are_lost_with_the_first() -> None:
    desk = Desk("b1")
    desk.tokens(1)
    desk.hold_one_more("waits")
    desk.batchers.names = ("b1", "b2")
    desk.dispatch.drain()
    assert said(desk.tick(2.9 * STALL_S)) == {"ask": ["r"]}
    assert said(desk.tick(0.5 * STALL_S)) == {"task": ["r", "waits"]}


def test_rows_of_a_silent_batcher_that_are_due_together_are_sent_again_and_not_asked_about() -> (
    None
):
    desk = Desk("b1")
    desk.dispatch.send(sent_row(new_attempt("other"), desk.now + 1000), desk.now)
    desk.batchers.names = ("b1", "b2")
    desk.dispatch.drain()
    assert said(desk.tick(2.9 * STALL_S)) == {"ask": ["r", "other"]}
    assert said(desk.tick(0.5 * STALL_S)) == {"task": ["r", "other"]}


def test_a_batcher_that_nobody_has_subscribed_for_is_gone_at_once() -> None:
    desk = Desk()
    desk.tokens(1)
    desk.dispatch.drain()
    desk.dispatch.gone("b1", desk.now)
    assert desk.sent_to() == [("b2", 1, 1)]


def test_without_another_batcher_the_row_stays_where_it_was() -> None:
    desk = Desk("b1")
    desk.tokens(3)
    desk.dispatch.gone("b1", desk.now)
    outgoing = desk.tick(8.0)
    assert outgoing.tasks[1:] == []  # but the first one
    assert said(outgoing)["ask"]
    desk.hold()  # it is back, and still has the row
    assert desk.tick().tasks == []
    assert desk.row.task.attempt == 0


def test_a_new_batcher_gets_the_rows_of_its_predecessor_as_soon_as_it_is_there() -> None:
    desk = Desk("b1")
    desk.tokens(3)
    desk.dispatch.gone("b1", desk.now)
    desk.tick(5.0)
    desk.batchers.names = ("b3",)
    desk.tick(0.15)
    assert (desk.row.batcher, desk.row.task.attempt) == ("b3", 1)


def test_silence_proves_nothing_while_this_gateway_was_cut_off() -> None:
    desk = Desk()
    desk.tokens(1)
    desk.dispatch.drain()
    for _ in range(20):
        assert not desk.tick(0.5).tasks
        desk.dispatch.restart(desk.now)  # NATS did not answer
    assert desk.row.batcher == "b1"


def test_silence_proves_nothing_while_this_gateway_was_stopped() -> None:
    desk = Desk()
    desk.tokens(1)
    desk.dispatch.drain()
    for _ in range(5):
        desk.now += 8.0
        desk.dispatch.tick(desk.now)
        desk.hold()
    assert not desk.dispatch.drain().tasks


def test_answers_that_came_while_this_gateway_was_stopped_are_waited_for() -> None:
    desk = Desk()
    desk.hold()
    desk.tokens(1)
    desk.dispatch.drain()
    assert not desk.tick(3 * STALL_S - 0.1).tasks, "asked twice"
    desk.now += 8.0
    desk.dispatch.tick(desk.now)
    assert not desk.dispatch.drain().tasks
    desk.hold()
    assert not desk.tick(STALL_S).tasks


def test_a_row_that_is_lost_again_and_again_without_a_token_becomes_a_dead_letter() -> None:
    """With batchers and with workers, in any order; its last try is marked."""
    desk = Desk("b1")
    for number in range(LOSSES_MAX):
        ((_, row),) = desk.dispatch.drain().tasks
        assert row.task.last_try == (number == LOSSES_MAX - 1)
        desk.hold()
        if number % 2:
            desk.worker_lost("not enough memory")
        else:
            desk.dispatch.unknown("b1", [TaskRef(request_id="r", attempt=number)], desk.now)
    ((row, reason),) = desk.dispatch.drain().dead
    assert row is desk.row
    assert "5 times in succession" in reason
    assert isinstance(desk.failed[0], EngineFailed)
    assert "r" not in desk.dispatch
    assert desk.dispatch.resent == {("m", "interactive", what): 2 for what in ("worker", "batcher")}
    assert desk.dispatch.given_up == {("m", "interactive"): 1}


@pytest.mark.parametrize(
    ("lag_s", "after_s", "priority_class", "asked", "coalesce_ms"),
    [
        (2 * LAG_S, 0.5, "interactive", None, 20),
        (LAG_S, 0.0, "interactive", None, None),
        (2 * LAG_S, BUSY_S, "interactive", None, None),
        (2 * LAG_S, 0.5, "interactive", 0, 0),
        (2 * LAG_S, 0.5, "bulk", None, None),
    ],
)
def test_while_its_gateway_is_busy_an_urgent_answer_comes_in_fewer_messages(
    lag_s: float, after_s: float, priority_class: str, asked: int | None, coalesce_ms: int | None
) -> None:
    dispatch = Dispatch("g", Batchers("b1"), STALL_S, interval_ms=20)
    dispatch.late(lag_s, 100.0)
    dispatch.late(0.0, 100.0 + after_s)
    row = sent_row(new_attempt("r"), 1000.0, priority_class)
    if asked is not None:
        row.task.coalesce_ms = asked
    dispatch.send(row, 100.0 + after_s)
    ((_, sent),) = dispatch.drain().tasks
    assert (sent.task.coalesce_ms if sent.task.HasField("coalesce_ms") else None) == coalesce_ms


@pytest.mark.parametrize(
    ("lag_s", "before_s", "priority_class", "waits_s"),
    [
        (2 * LAG_S, 0.1 * SEND_S, "interactive", [0.0, 0.75 * SEND_S, 1.5 * SEND_S, 0.0]),
        (2 * LAG_S, 0.6 * SEND_S, "interactive", [0.0, 0.0, 0.0, 0.0]),
        (2 * LAG_S, 0.1 * SEND_S, "bulk", [0.0, 0.0, 0.0, 0.0]),
        (LAG_S, 0.1 * SEND_S, "interactive", [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_urgent_rows_that_come_often_leave_a_busy_gateway_together(
    lag_s: float, before_s: float, priority_class: str, waits_s: list[float]
) -> None:
    dispatch = Dispatch("g", Batchers("b1"), STALL_S, interval_ms=20)
    dispatch.late(lag_s, 100.0)
    now = often(dispatch, 99.0, before_s)
    waits = list[float]()
    dispatch.on_later = lambda wait_s, _: waits.append(wait_s)
    for later_s in (0.0, SEND_S / 4, SEND_S / 4, 3 * SEND_S):
        now += later_s
        for name in ("first", "second"):
            dispatch.send(sent_row(new_attempt(f"{name} {now}"), 1000.0, priority_class), now)
        assert len(dispatch.drain().tasks) == 2
    assert waits == pytest.approx(waits_s)


def often(dispatch: Dispatch, now: float, between_s: float) -> float:
    """As many interactive rows as tell how often they come, so far apart; a moment after the last pause."""
    for number in range(RECENT):
        dispatch.send(sent_row(new_attempt(f"before {number}")), now)
        dispatch.drain()
        now += between_s
    return now + 2 * SEND_S


def test_what_is_not_an_urgent_row_keeps_none_from_leaving_a_busy_gateway() -> None:
    dispatch, waits = Dispatch("g", Batchers("b1"), STALL_S, interval_ms=20), list[float]()
    dispatch.late(2 * LAG_S, 100.0)
    often(dispatch, 99.9, SEND_S / 10)
    dispatch.on_later = lambda wait_s, _: waits.append(wait_s)
    for priority_class in ("bulk", "interactive"):
        dispatch.send(sent_row(new_attempt(priority_class), 1000.0, priority_class), 100.0)
        dispatch.drain()
    assert waits == [0.0, 0.0]


def unread(name: str, priority_class: str = "bulk", coalesce_ms: int = 3_600_000) -> SentRow:
    """A row whose answer travels whole."""
    row = sent_row(new_attempt(name), 1000.0, priority_class)
    row.task.coalesce_ms = coalesce_ms
    return row


def test_bulk_rows_that_nobody_reads_a_part_of_leave_together() -> None:
    dispatch, due = Dispatch("g", Batchers("b1"), STALL_S), list[tuple[float, object]]()
    dispatch.on_later = lambda wait_s, call: due.append((wait_s, call))
    for name in ("first", "second"):
        dispatch.send(unread(name), 100.0)
    assert due == [(UNREAD_S, dispatch.on_due)]
    assert [row.task.request_id for _, row in dispatch.drain().tasks] == ["first", "second"]
    dispatch.send(unread("third"), 100.0)
    assert [wait_s for wait_s, _ in due] == [UNREAD_S] * 2


@pytest.mark.parametrize(
    ("priority_class", "coalesce_ms"), [("interactive", 3_600_000), ("standard", 3_600_000), ("bulk", 250)]
)  # fmt: skip
def test_a_row_that_somebody_waits_for_leaves_at_once_and_takes_others_along(
    priority_class: str, coalesce_ms: int
) -> None:
    dispatch, waits = Dispatch("g", Batchers("b1"), STALL_S), list[float]()
    dispatch.on_later = lambda wait_s, _: waits.append(wait_s)
    dispatch.send(unread("whole"), 100.0)
    dispatch.send(unread("read", priority_class, coalesce_ms), 100.0)
    assert waits == [UNREAD_S, 0.0]
    assert len(dispatch.drain().tasks) == 2


def test_without_an_interval_a_busy_gateway_sends_a_message_a_token() -> None:
    dispatch, woken = Dispatch("g", Batchers("b1"), STALL_S, interval_ms=0), list[str]()
    dispatch.late(2 * LAG_S, 100.0)
    row = sent_row(new_attempt("r"))
    dispatch.send(row, 100.0)
    dispatch.wake(lambda: woken.append("r"), "r", 100.0)
    dispatch.on_later = lambda wait_s, _: woken.append(f"{wait_s:g}")
    dispatch.drain()
    for name in ("s", "t"):
        dispatch.send(sent_row(new_attempt(name)), 100.0)
        dispatch.drain()
    assert woken == ["r", "0", "0"]
    assert not row.task.HasField("coalesce_ms")


def test_a_row_whose_worker_was_lost_goes_on_at_once_with_what_it_has() -> None:
    desk = Desk("b1")
    desk.row.task.coalesce_ms = 250
    desk.tokens(2)
    desk.dispatch.drain()
    desk.now += 3.0
    desk.worker_lost()
    assert desk.sent_to() == [("b1", 1, 2)]
    task = desk.row.task
    assert (task.age_ms, task.charged_tokens, task.coalesce_ms, task.last_try) == (
        3000,
        5,
        0,
        False,
    )
    assert task.timeout_ms == 997_000


def test_a_row_that_a_worker_did_not_take_is_innocent_and_stays_on_its_last_try() -> None:
    desk = Desk("b1")
    for _ in range(LOSSES_MAX - 1):
        desk.hold()
        desk.worker_lost()
    for _ in range(3 * LOSSES_MAX):
        assert desk.row.task.last_try
        desk.worker_lost(cause=RETURN_CAUSE_NOT_ACCEPTED)
    assert not desk.failed
    desk.tokens(1)
    desk.worker_lost(cause=RETURN_CAUSE_NOT_ACCEPTED)
    assert not desk.row.task.last_try
    desk.worker_lost()
    assert not desk.failed


def test_a_batcher_that_lived_with_a_row_was_not_ended_by_it() -> None:
    desk = Desk("b1")
    for number in range(3 * LOSSES_MAX):
        desk.hold()
        desk.tick(5 * STALL_S)
        desk.hold()  # the answer to a question
        desk.dispatch.unknown("b1", [TaskRef(request_id="r", attempt=number)], desk.now)
    assert not desk.failed


def test_what_a_row_outlived_once_says_nothing_of_the_next_batcher() -> None:
    desk = Desk("b1")
    desk.hold()
    desk.tick(5 * STALL_S)
    for number in range(LOSSES_MAX + 1):
        assert not desk.failed
        desk.hold()
        desk.dispatch.unknown("b1", [TaskRef(request_id="r", attempt=number)], desk.now)
    assert desk.failed


def test_a_row_that_a_worker_had_waits_for_one_although_its_batcher_never_said_so() -> None:
    desk = Desk("b1")
    desk.batchers.names = ()
    desk.worker_lost()
    desk.tick(2 * NO_BATCHER_S)
    assert not desk.failed


def test_nothing_is_asked_about_a_row_that_has_no_batcher() -> None:
    desk = Desk("b1")
    desk.tokens(1)
    desk.dispatch.drain()
    desk.dispatch.ask("r")
    desk.batchers.names = ()
    desk.worker_lost()
    assert said(desk.dispatch.drain()) == {}


def test_a_row_that_a_full_worker_did_not_take_needs_no_room() -> None:
    desk = Desk("b1", priority_class="bulk")
    desk.dispatch.send(sent_row(new_attempt("other"), desk.now + 1000, "bulk"), desk.now)
    desk.batchers.room = Room(0, 0)
    desk.dispatch.drain()
    full = given_back(desk.row, cause=RETURN_CAUSE_NOT_ACCEPTED)
    full.final.error.reason = Overloaded.reason
    desk.dispatch.returned("b1", full, desk.now)
    assert desk.sent_to() == [("b1", 1, 0)]


def test_the_next_attempt_is_above_those_that_an_older_batcher_counted() -> None:
    desk = Desk("b1")
    assert desk.dispatch.accepts("b1", "r", 3, desk.now)
    desk.attempt.accept(Frame(request_id="r", attempt=3, token_ids=[97]), desk.now)
    desk.dispatch.drain()
    desk.dispatch.unknown("b1", [TaskRef(request_id="r", attempt=0)], desk.now)
    assert desk.sent_to() == [("b1", 4, 1)]


def test_late_words_about_a_row_that_waits_elsewhere_change_nothing() -> None:
    desk = Desk("b1")
    desk.hold()
    desk.batchers.names = ()
    desk.worker_lost()
    assert not desk.dispatch.accepts("b1", "r", 0, desk.now)
    desk.worker_lost()
    assert (desk.row.losses, desk.dispatch.waiting) == (1, {("m", "interactive"): 1})


def test_a_thousand_rows_of_a_worker_keep_their_order_and_none_is_refused() -> None:
    desk = Desk("b1", priority_class="bulk")
    desk.batchers.room = Room(2000, 1e9)
    rows = [desk.row]
    for number in range(1, 1000):
        row = sent_row(new_attempt(f"r{number}"), desk.now + 1000, "bulk")
        row.task.tenant = "ab"[number % 2]
        desk.dispatch.send(row, desk.now)
        rows.append(row)
    desk.dispatch.drain()
    desk.batchers.names, desk.batchers.room = (), Room(0, 0)
    for row in rows:
        desk.dispatch.returned("b1", given_back(row), desk.now)
    new = sent_row(new_attempt("new"), desk.now + 1000, "bulk")
    new.task.tenant = "a"
    desk.dispatch.send(new, desk.now)
    desk.now += 3 * NO_BATCHER_S  # the worker loads for a while
    desk.batchers.names = ("b1",)
    desk.dispatch.tick(desk.now)
    desk.dispatch.tick(desk.now)
    sent = [row for _, row in desk.dispatch.drain().tasks]
    for tenant in ("", "a", "b"):
        assert [row for row in sent if row.task.tenant == tenant] == [
            row for row in rows if row.task.tenant == tenant
        ]
    assert desk.dispatch.waiting == {("m", "bulk"): 1}, "a new one needs room"
    assert not desk.failed


def test_a_token_between_two_losses_makes_the_row_innocent() -> None:
    desk = Desk("b1")
    for number in range(3 * LOSSES_MAX):
        desk.tokens(1)
        desk.dispatch.unknown("b1", [TaskRef(request_id="r", attempt=number)], desk.now)
    assert not desk.failed


def test_a_row_that_never_reached_a_batcher_is_innocent() -> None:
    desk = Desk("b1")
    for number in range(3 * LOSSES_MAX):
        desk.dispatch.unknown("b1", [TaskRef(request_id="r", attempt=number)], desk.now)
    assert not desk.failed


def test_what_took_a_row_with_it_once_is_not_counted_for_the_next_batcher_which_never_had_it() -> (
    None
):
    desk = Desk("b1", "b2", "b3")
    desk.hold()
    desk.dispatch.gone("b1", desk.now)
    assert desk.row.losses == 1
    desk.dispatch.gone("b2", desk.now)
    assert (desk.row.losses, desk.row.batcher) == (1, "b3")


def next_batcher(desk: Desk, row_id: str) -> str:
    """The batcher that gets another row now."""
    row = sent_row(new_attempt(row_id), desk.now + 1000)
    desk.dispatch.send(row, desk.now)
    return row.batcher


def test_a_batcher_that_gave_a_row_back_gets_no_other_for_a_second_whatever_it_says() -> None:
    desk = Desk()
    desk.returned()
    desk.dispatch.heard("b1", desk.now)
    assert next_batcher(desk, "r1") == "b2"
    desk.now += AVOID_S
    assert next_batcher(desk, "r2") == "b1"


def test_a_lost_batcher_gets_rows_again_once_it_is_heard_of() -> None:
    desk = Desk()
    desk.dispatch.gone("b1", desk.now)
    desk.now += 60.0
    assert next_batcher(desk, "r1") == "b2"
    desk.dispatch.heard("b1", desk.now)
    assert next_batcher(desk, "r2") == "b1"
    desk.dispatch.gone("b1", desk.now)
    desk.dispatch.restart(desk.now)
    assert next_batcher(desk, "r3") == "b1", "it was this gateway that was cut off"


def test_rows_that_are_given_back_go_elsewhere_however_often() -> None:
    desk = Desk()
    desk.hold()
    for number in range(3 * LOSSES_MAX):
        desk.now += 2.0
        desk.returned(desk.row.batcher)
        assert desk.row.task.attempt == number + 1
    assert {batcher for batcher, _, _ in desk.sent_to()} == {"b1", "b2"}
    assert not desk.failed


def test_a_row_that_no_batcher_has_room_for_waits_until_one_has() -> None:
    desk = Desk(priority_class="standard")
    desk.batchers.room = Room(1, 1e9)
    full = TaskError(reason=Overloaded.reason, message="no room")
    desk.dispatch.drain()
    desk.returned("b1", full)
    assert desk.dispatch.waiting == {("m", "standard"): 1}
    assert desk.dispatch.waited_s(desk.now + 7) == {("m", "standard"): 7}
    assert desk.tick(0.1).tasks == [("b2", desk.row)]
    desk.returned("b2", full)
    for _ in range(round(2 * NO_BATCHER_S)):
        desk.tick(1.0)
        if desk.row.batcher:
            desk.dispatch.heard(desk.row.batcher, desk.now)
            desk.returned(desk.row.batcher, full)
    assert not desk.failed
    assert desk.row.task.attempt > 10


def test_a_row_that_no_batcher_takes_waits_for_a_stated_time() -> None:
    desk = Desk("b1")
    desk.returned("b1")
    desk.batchers.names = ()
    desk.tick(NO_BATCHER_S - 1.0)
    assert not desk.failed
    desk.tick(2.0)
    assert isinstance(desk.failed[0], ModelUnavailable)
    assert desk.failed[0].retry_after_s


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_row_that_was_taken_waits_until_its_deadline(tokens: int) -> None:
    desk = Desk("b1")
    desk.hold()
    if tokens:
        desk.tokens(tokens)
    desk.returned("b1")
    desk.batchers.names = ()
    desk.tick(3 * NO_BATCHER_S)
    assert not desk.failed
    desk.batchers.names = ("b2",)
    desk.tick(0.2)
    assert desk.row.batcher == "b2"


def test_a_cancel_goes_to_the_batcher_that_has_the_row_and_names_its_attempt() -> None:
    desk = Desk()
    desk.hold()
    desk.dispatch.drain()
    desk.dispatch.cancel("r")
    ((batcher, message),) = desk.dispatch.drain().control
    (ref,) = message.cancel.tasks
    assert (batcher, ref.request_id, ref.attempt) == ("b1", "r", 0)
    assert not desk.hold()  # it did not hear
    assert said(desk.dispatch.drain()) == {"cancel": ["r"]}


@pytest.mark.parametrize("priority_class", ["interactive", "bulk"])
def test_that_there_is_room_for_a_row_is_told_once(priority_class: str) -> None:
    desk, taken = Desk(), list[int]()
    row = sent_row(new_attempt("s"), desk.now + 1000, priority_class)
    row.on_taken = lambda: taken.append(1)
    desk.dispatch.send(row, desk.now)
    assert taken == [1]
    desk.dispatch.returned("b1", given_back(row), desk.now)
    desk.dispatch.forget("s")
    assert taken == [1]


def test_an_attempt_that_no_owner_can_have_is_not_the_owners() -> None:
    desk = Desk()
    desk.hold()
    assert not desk.dispatch.accepts("b1", "r", 2**32 - 1, desk.now)
    frame = Frame(request_id="r", attempt=2**32 - 1)
    frame.final.end = TASK_END_RETURNED
    desk.dispatch.drain()
    desk.dispatch.returned("b1", frame, desk.now)
    assert not desk.dispatch.drain().tasks


def test_a_batcher_that_speaks_of_many_unknown_rows_is_told_in_messages_that_fit() -> None:
    desk = Desk()
    desk.dispatch.drain()
    for number in range(2 * QUERY_ROWS_MAX + 1):
        desk.dispatch.accepts("b3", f"{number:0{ROW_ID_CHARS_MAX}}", 1, desk.now)
    desk.dispatch.accepts("b3", "x" * (ROW_ID_CHARS_MAX + 1), 1, desk.now)
    messages = [pack(message) for _, message in desk.dispatch.drain().control]
    assert len(messages) == 3


def test_batchers_that_come_and_go_leave_nothing_behind() -> None:
    desk = Desk()
    for number in range(3 * BATCHERS_MAX):
        desk.dispatch.heard(f"b{number}", desk.now)
        desk.dispatch.heard("b1", desk.now)
    assert len(desk.dispatch._heard_at) == BATCHERS_MAX
    assert "b1" in desk.dispatch._heard_at
