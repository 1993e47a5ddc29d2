"""Which batcher has which run, and what becomes of runs that nobody seems to have."""

import pytest

from gateway.streaming import dispatch
from gateway.streaming.capacity import BatcherCapacity
from gateway.streaming.dispatch import Dispatch, Outgoing
from gateway.streaming.model_run import ModelRun
from sluice.errors import EngineFailed, ModelUnavailable, Overloaded, SluiceError
from sluice.internal.v1 import frame_pb2
from sluice.internal.v1.task_pb2 import Task
from sluice.wire.codec import pack
from tests.gateway.kit.runs import Batchers, new_run, words

STALL_S = 0.75


def given_back(
    run: ModelRun,
    why: str = "the worker was lost",
    cause: "frame_pb2.ReturnCause.ValueType" = frame_pb2.RETURN_CAUSE_WORKER_LOST,
) -> frame_pb2.Frame:
    """Of a run that its worker did not go on with."""
    final = frame_pb2.Final(end=frame_pb2.TASK_END_RETURNED, return_cause=cause)
    final.error.reason, final.error.message = EngineFailed.reason, why
    return frame_pb2.Frame(request_id=run.run_id, attempt=run.attempt_number, final=final)


class Desk:
    """One run, two batchers, and a clock that ticks."""

    def __init__(self, *batchers: str, priority_class: str = "interactive") -> None:
        self.now = 100.0
        self.batchers = Batchers(*(batchers or ("b1", "b2")))
        self.notified: list[ModelRun | None] = []
        self.dispatch = Dispatch("g", self.batchers, STALL_S, self.notified.append)
        self._failed: list[SluiceError] = []
        self.run = self.send("r", priority_class=priority_class)

    def send(self, run_id: str, **task: object) -> ModelRun:
        run = new_run(run_id, stall_s=STALL_S, deadline=self.now + 1000, **task)
        self.dispatch.send(run, self.now)
        return run

    @property
    def failed(self) -> list[SluiceError]:
        self._failed += [error for _, error in self.dispatch.take_failed()]
        return self._failed

    def tick(self, seconds: float = STALL_S) -> Outgoing:
        """Lets time pass; returns what was sent meanwhile."""
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            self.dispatch.tick(self.now)
        return self.dispatch.drain(self.now)

    def accept_another(self, run_id: str) -> None:
        """Another run, which waits at the first batcher."""
        self.send(run_id)
        self.dispatch.note_message("b1", self.now)
        self.dispatch.accepts("b1", run_id, 0, self.now, waits=True)

    def confirm(self, batcher: str = "b1") -> bool:
        self.dispatch.note_message(batcher, self.now)
        return self.dispatch.accepts(batcher, "r", self.run.attempt_number, self.now, waits=True)

    def tokens(self, count: int, batcher: str = "b1") -> None:
        """Tokens arrive."""
        self.dispatch.note_message(batcher, self.now)
        attempt, start = self.run.attempt_number, self.run.next_index
        frame = frame_pb2.Frame(
            request_id="r", attempt=attempt, start_index=start, token_ids=[97] * count
        )
        assert self.dispatch.accepts(batcher, "r", attempt, self.now)
        self.run.accept(frame, self.now)

    def forget(self, attempt: int = 0) -> None:
        """The first batcher does not know the run."""
        refs = [frame_pb2.TaskRef(request_id="r", attempt=attempt)]
        self.dispatch.take_unknown("b1", refs, self.now)

    def give_back(self, batcher: str = "b1", error: frame_pb2.TaskError | None = None) -> None:
        frame = frame_pb2.Frame(request_id="r", attempt=self.run.attempt_number)
        frame.final.end = frame_pb2.TASK_END_RETURNED
        if error is not None:
            frame.final.error.CopyFrom(error)
        self.dispatch.take_returned(batcher, frame, self.now)

    def lose_worker(
        self,
        why: str = "the worker was lost",
        cause: "frame_pb2.ReturnCause.ValueType" = frame_pb2.RETURN_CAUSE_WORKER_LOST,
    ) -> None:
        """Its batcher gives the run back."""
        frame = given_back(self.run, why, cause)
        self.dispatch.take_returned(self.run.batcher or "b1", frame, self.now)

    def sent_to(self) -> list[tuple[str, int, int]]:
        """Batcher, attempt and known tokens of the tasks that were sent since."""
        return [
            (batcher, run.task.attempt, len(run.task.produced_token_ids))
            for batcher, run in self.dispatch.drain(self.now).tasks
        ]


def test_run_goes_to_a_batcher_with_the_time_left() -> None:
    desk, short = Desk(), new_run("short", deadline=101.0004)
    assert desk.sent_to() == [("b1", 0, 0)]
    desk.dispatch.send(short, 100.0)
    assert (desk.run.task.timeout_ms, short.task.timeout_ms) == (1_000_000, 1001)


def test_silent_run_is_queried_and_an_answer_suffices() -> None:
    desk = Desk()
    desk.confirm()
    desk.tokens(2)
    desk.dispatch.drain(desk.now)
    (message,) = [m for _, m in desk.tick(STALL_S + 0.05).control]
    (asked,) = message.query.tasks
    assert (asked.request_id, asked.next_index, message.gateway) == ("r", 2, "g")
    for _ in range(10):
        desk.confirm()
        assert not desk.tick().tasks


def test_silent_batcher_loses_its_runs_to_another() -> None:
    desk = Desk()
    desk.confirm()
    desk.tokens(2)
    desk.dispatch.drain(desk.now)
    assert not desk.tick(3 * STALL_S - 0.1).tasks
    ((batcher, run),) = desk.tick(0.3).tasks
    assert (batcher, run.task.attempt, list(run.task.produced_token_ids)) == ("b2", 1, [97, 97])
    # The earlier owner comes back: its frames are fenced out, and it is told.
    assert not desk.dispatch.accepts("b1", "r", 0, desk.now)
    assert words(desk.dispatch.drain(desk.now)) == {"cancel": ["r"]}
    desk.tokens(1, "b2")


def test_batcher_that_sends_other_messages_is_alive() -> None:
    desk = Desk()
    desk.confirm()
    desk.tokens(1)
    for _ in range(3):
        desk.tick()
        desk.dispatch.note_message("b1", desk.now)
    assert desk.run.batcher == "b1"


def test_batcher_that_does_not_know_a_run_has_lost_it() -> None:
    desk = Desk()
    desk.confirm()
    desk.tokens(1)
    desk.dispatch.drain(desk.now)
    desk.forget()
    assert desk.sent_to() == [("b1", 1, 1)]
    desk.forget()  # an older message
    assert desk.sent_to() == []


def test_batcher_that_forgot_a_run_is_queried_for_others() -> None:
    desk = Desk("b1")
    desk.confirm()
    desk.accept_another("waits")
    desk.dispatch.drain(desk.now)
    desk.forget()
    assert words(desk.tick(0.05)) == {"task": ["r"], "query": ["waits"]}


@pytest.mark.parametrize("waits", [True, False])
def test_all_runs_of_a_silent_batcher_are_lost_with_one(waits: bool) -> None:
    desk = Desk("b1")
    if waits:
        desk.tokens(1)
        desk.accept_another("other")
    else:  # both are due at the same time
        desk.send("other")
    desk.batchers.names = ("b1", "b2")
    desk.dispatch.drain(desk.now)
    assert words(desk.tick(2.9 * STALL_S)) == {"query": ["r"] if waits else ["r", "other"]}
    assert words(desk.tick(0.5 * STALL_S)) == {"task": ["r", "other"]}


def test_run_stays_where_it_was_without_another_batcher() -> None:
    desk = Desk("b1")
    desk.tokens(3)
    desk.dispatch.lose_batcher("b1", desk.now)
    outgoing = desk.tick(8.0)
    assert outgoing.tasks[1:] == []  # but the first one
    assert words(outgoing)["query"]
    desk.confirm()  # it is back, and still has the run
    assert desk.tick().tasks == []
    assert desk.run.attempt_number == 0


def test_new_batcher_gets_the_runs_of_its_predecessor() -> None:
    desk = Desk("b1")
    desk.tokens(3)
    desk.dispatch.lose_batcher("b1", desk.now)
    desk.tick(5.0)
    desk.batchers.names = ("b3",)
    desk.tick(0.15)
    assert (desk.run.batcher, desk.run.attempt_number) == ("b3", 1)


def test_answers_from_during_a_suspension_are_waited_for() -> None:
    desk = Desk()
    desk.confirm()
    desk.tokens(1)
    desk.dispatch.drain(desk.now)
    assert not desk.tick(3 * STALL_S - 0.1).tasks, "queried twice"
    desk.now += 8.0
    desk.dispatch.tick(desk.now)
    assert not desk.dispatch.drain(desk.now).tasks
    desk.confirm()
    assert not desk.tick(STALL_S).tasks


def test_run_lost_often_without_a_token_is_a_dead_letter() -> None:
    """With batchers and with workers, in any order; its last try is marked."""
    desk = Desk("b1")
    for number in range(dispatch.LOSSES_MAX):
        ((_, run),) = desk.dispatch.drain(desk.now).tasks
        assert run.task.last_try == (number == dispatch.LOSSES_MAX - 1)
        desk.confirm()
        if number % 2:
            desk.lose_worker("not enough memory")
        else:
            desk.forget(number)
    (letter,) = desk.dispatch.drain(desk.now).dead
    assert Task.FromString(letter.task).request_id == "r"
    assert "5 workers or batchers in succession" in letter.reason
    assert isinstance(desk.failed[0], EngineFailed)
    assert "r" not in desk.dispatch
    assert desk.dispatch.resent == {("m", "interactive", lost): 2 for lost in ("worker", "batcher")}
    assert desk.dispatch.given_up == {("m", "interactive"): 1}


def test_notify_names_the_run_of_a_task() -> None:
    desk = Desk()
    assert desk.notified == [desk.run]
    desk.dispatch.release(desk.run)
    assert desk.notified == [desk.run, None]


def test_run_of_a_lost_worker_goes_on_with_its_tokens() -> None:
    desk = Desk("b1")
    desk.run.task.coalesce_ms = 250
    desk.tokens(2)
    desk.dispatch.drain(desk.now)
    desk.now += 3.0
    desk.lose_worker()
    assert desk.sent_to() == [("b1", 1, 2)]
    task = desk.run.task
    said = (task.age_ms, task.charged_tokens, task.coalesce_ms, task.last_try)
    assert said == (3000, 5, 0, False)
    assert task.timeout_ms == 997_000


def test_run_that_no_worker_took_stays_on_its_last_try() -> None:
    desk = Desk("b1")
    for _ in range(dispatch.LOSSES_MAX - 1):
        desk.confirm()
        desk.lose_worker()
    for _ in range(3 * dispatch.LOSSES_MAX):
        assert desk.run.task.last_try
        desk.lose_worker(cause=frame_pb2.RETURN_CAUSE_NOT_ACCEPTED)
    assert not desk.failed
    desk.tokens(1)
    desk.lose_worker(cause=frame_pb2.RETURN_CAUSE_NOT_ACCEPTED)
    assert not desk.run.task.last_try
    desk.lose_worker()
    assert not desk.failed


def test_survived_query_says_nothing_of_the_next_batcher() -> None:
    desk = Desk("b1")
    desk.confirm()
    desk.tick(5 * STALL_S)
    for number in range(dispatch.LOSSES_MAX + 1):
        assert not desk.failed
        desk.confirm()
        desk.forget(number)
    assert desk.failed


def test_run_without_batcher_is_not_queried() -> None:
    desk = Desk("b1")
    desk.tokens(1)
    desk.dispatch.drain(desk.now)
    desk.dispatch.query(desk.run)
    desk.batchers.names = ()
    desk.lose_worker()
    assert words(desk.dispatch.drain(desk.now)) == {}


def test_run_that_a_full_worker_refused_needs_no_capacity() -> None:
    desk = Desk("b1", priority_class="bulk")
    desk.send("other", priority_class="bulk")
    desk.batchers.capacity = BatcherCapacity(0, 0)
    desk.dispatch.drain(desk.now)
    full = given_back(desk.run, cause=frame_pb2.RETURN_CAUSE_NOT_ACCEPTED)
    full.final.error.reason = Overloaded.reason
    desk.dispatch.take_returned("b1", full, desk.now)
    assert desk.sent_to() == [("b1", 1, 0)]


@pytest.mark.parametrize("attempt", [0, 2, 3, 2**32 - 1])
def test_messages_of_another_attempt_are_fenced(attempt: int) -> None:
    desk = Desk("b1")
    desk.tokens(1)
    desk.forget()
    desk.dispatch.drain(desk.now)
    desk.tokens(1)  # the current attempt is 1
    assert not desk.dispatch.accepts("b1", "r", attempt, desk.now)
    ((_, message),) = desk.dispatch.drain(desk.now).control
    assert [(ref.request_id, ref.attempt) for ref in message.cancel.tasks] == [("r", attempt)]
    frame = frame_pb2.Frame(request_id="r", attempt=attempt)
    frame.final.end = frame_pb2.TASK_END_RETURNED
    desk.dispatch.take_returned("b1", frame, desk.now)
    desk.forget(attempt)
    assert not desk.dispatch.drain(desk.now).tasks
    assert (desk.run.batcher, desk.run.attempt_number) == ("b1", 1)


def test_late_messages_about_a_queued_run_change_nothing() -> None:
    desk = Desk("b1")
    desk.confirm()
    desk.batchers.names = ()
    desk.lose_worker()
    assert not desk.dispatch.accepts("b1", "r", 0, desk.now)
    desk.lose_worker()
    assert (desk.run.losses, desk.dispatch.queued) == (1, {("m", "interactive"): 1})


def test_thousand_runs_of_a_worker_keep_their_order() -> None:
    desk = Desk("b1", priority_class="bulk")
    desk.batchers.capacity = BatcherCapacity(2000, 1e9)
    runs = [desk.run]
    for number in range(1, 1000):
        runs.append(desk.send(f"r{number}", priority_class="bulk", tenant="ab"[number % 2]))
    desk.dispatch.drain(desk.now)
    desk.batchers.names, desk.batchers.capacity = (), BatcherCapacity(0, 0)
    for run in runs:
        desk.dispatch.take_returned("b1", given_back(run), desk.now)
    desk.send("new", priority_class="bulk", tenant="a")
    desk.now += 3 * dispatch.NO_BATCHER_S  # the worker loads for a while
    desk.batchers.names = ("b1",)
    desk.dispatch.tick(desk.now)
    desk.dispatch.tick(desk.now)
    sent = [run for _, run in desk.dispatch.drain(desk.now).tasks]
    for tenant in ("", "a", "b"):
        assert [run for run in sent if run.task.tenant == tenant] == [
            run for run in runs if run.task.tenant == tenant
        ]
    assert desk.dispatch.queued == {("m", "bulk"): 1}, "a new one needs capacity"
    assert not desk.failed


def test_batcher_that_never_had_a_run_counts_no_loss() -> None:
    desk = Desk("b1", "b2", "b3")
    desk.confirm()
    desk.dispatch.lose_batcher("b1", desk.now)
    assert desk.run.losses == 1
    desk.dispatch.lose_batcher("b2", desk.now)
    assert (desk.run.losses, desk.run.batcher) == (1, "b3")


def test_batcher_that_returned_a_run_is_avoided() -> None:
    desk = Desk()
    desk.give_back()
    desk.dispatch.note_message("b1", desk.now)
    assert desk.send("r1").batcher == "b2"
    desk.now += dispatch.AVOID_S
    assert desk.send("r2").batcher == "b1"


def test_lost_batcher_gets_runs_again_after_a_message() -> None:
    desk = Desk()
    desk.dispatch.lose_batcher("b1", desk.now)
    desk.now += 60.0
    assert desk.send("r1").batcher == "b2"
    desk.dispatch.note_message("b1", desk.now)
    assert desk.send("r2").batcher == "b1"
    desk.dispatch.lose_batcher("b1", desk.now)
    desk.dispatch.restart(desk.now)
    assert desk.send("r3").batcher == "b1", "it was this gateway that was cut off"


def test_run_waits_until_a_batcher_has_capacity() -> None:
    desk = Desk(priority_class="standard")
    desk.batchers.capacity = BatcherCapacity(1, 1e9)
    full = frame_pb2.TaskError(reason=Overloaded.reason, message="no room")
    desk.dispatch.drain(desk.now)
    desk.give_back("b1", full)
    assert desk.dispatch.queued == {("m", "standard"): 1}
    assert desk.dispatch.queued_s(desk.now + 7) == {("m", "standard"): 7}
    assert desk.tick(0.1).tasks == [("b2", desk.run)]
    desk.give_back("b2", full)
    for _ in range(round(2 * dispatch.NO_BATCHER_S)):
        desk.tick(1.0)
        if desk.run.batcher:
            desk.dispatch.note_message(desk.run.batcher, desk.now)
            desk.give_back(desk.run.batcher, full)
    assert not desk.failed
    assert desk.run.attempt_number > 10


def test_run_that_no_batcher_accepts_waits_a_stated_time() -> None:
    desk = Desk("b1")
    desk.give_back("b1")
    desk.batchers.names = ()
    desk.tick(dispatch.NO_BATCHER_S - 1.0)
    assert not desk.failed
    desk.tick(2.0)
    assert isinstance(desk.failed[0], ModelUnavailable)
    assert desk.failed[0].retry_after_s


@pytest.mark.parametrize("tokens", [0, 1])
def test_accepted_run_waits_until_its_deadline(tokens: int) -> None:
    desk = Desk("b1")
    desk.confirm()
    if tokens:
        desk.tokens(tokens)
    desk.give_back("b1")
    desk.batchers.names = ()
    desk.tick(3 * dispatch.NO_BATCHER_S)
    assert not desk.failed
    desk.batchers.names = ("b2",)
    desk.tick(0.2)
    assert desk.run.batcher == "b2"


def test_cancel_goes_to_the_owner_and_names_the_attempt() -> None:
    desk = Desk()
    desk.confirm()
    desk.dispatch.drain(desk.now)
    desk.dispatch.release(desk.run)
    ((batcher, message),) = desk.dispatch.drain(desk.now).control
    (ref,) = message.cancel.tasks
    assert (batcher, ref.request_id, ref.attempt) == ("b1", "r", 0)
    assert not desk.confirm()  # the cancel was lost
    assert words(desk.dispatch.drain(desk.now)) == {"cancel": ["r"]}


def test_run_that_ended_keeps_no_task_and_is_not_sent() -> None:
    desk = Desk()
    assert desk.run.task.ByteSize()
    desk.dispatch.release(desk.run)
    assert (desk.run.task.ByteSize(), desk.dispatch.drain(desk.now).tasks) == (0, [])


def test_time_in_the_queue_is_that_before_the_first_batcher() -> None:
    desk = Desk("b1", priority_class="bulk")
    assert desk.run.queued_s == 0.0
    desk.batchers.names = ()
    run = desk.send("s", priority_class="bulk")
    desk.batchers.names = ("b1",)
    desk.tick(2.0)
    desk.dispatch.take_returned("b1", given_back(run), desk.now + 1)
    assert run.queued_s == pytest.approx(0.05)


def test_cancels_of_unknown_runs_fit_into_messages() -> None:
    desk = Desk()
    desk.dispatch.drain(desk.now)
    for number in range(2 * dispatch.QUERY_RUNS_MAX + 1):
        desk.dispatch.accepts("b3", f"{number:0{dispatch.RUN_ID_CHARS_MAX}}", 1, desk.now)
    desk.dispatch.accepts("b3", "x" * (dispatch.RUN_ID_CHARS_MAX + 1), 1, desk.now)
    messages = [pack(message) for _, message in desk.dispatch.drain(desk.now).control]
    assert len(messages) == 3


def test_batchers_that_come_and_go_leave_nothing_behind() -> None:
    desk = Desk("b1")
    desk.tokens(1)
    desk.tick(2.5 * STALL_S)  # queried twice
    desk.dispatch.note_message("b1", desk.now)
    for number in range(dispatch.BATCHERS_MAX):
        desk.dispatch.note_message(f"x{number}", desk.now)
    desk.batchers.names = ("b1", "b2")
    desk.tick(STALL_S)
    assert desk.run.batcher == "b2", "that b1 has sent a message is forgotten"
