import gc
import weakref
from collections.abc import Sequence

import pytest

from batcher.core.queued_request import QueuedRequest, RequestState, batch_message
from batcher.core.requests import ENDED_LATE_S, ENDED_MAX, ENDED_S, Actions, RequestTable
from batcher.core.scheduler.capacity import Capacity
from batcher.core.workers import BREAK_S, BREAK_S_MAX, FAILURES_MAX, ChannelBroken, WorkerTable
from sluice.internal.v1 import control_pb2, frame_pb2, task_pb2, worker_pb2
from sluice.settings.batching import Policy, coalesce_s
from tests.batcher.core.room import grant

WORKER = "w"


class Desk:
    """A request table with one worker; ``room``: rows that may be sent to it."""

    def __init__(self) -> None:
        self.table = RequestTable("b", policy=Policy(max_rows=8))
        self.now = 100.0
        self.wake_at = 0.0

    def add(
        self,
        name: str = "r",
        *,
        timeout_s: float = 0.0,
        attempt: int = 0,
        priority_class: str = "standard",
        coalesce_ms: int | None = None,
        last_try: bool = False,
    ) -> None:
        task = task_pb2.Task(
            request_id=name, gateway="g", priority_class=priority_class, coalesce_ms=coalesce_ms
        )
        task.last_try = last_try
        task.prompt_token_ids.extend((1, 2, 3))
        task.sampling.max_tokens = 10
        task.timeout_ms, task.attempt = int(timeout_s * 1e3), attempt
        self.table.add(QueuedRequest(task, self.now, size=100), self.now)

    def cancel(self, *names: str, attempt: int = 0) -> None:
        refs = [frame_pb2.TaskRef(request_id=name, attempt=attempt) for name in names]
        self.table.cancel(refs, self.now)

    def ask(self, name: str, next_index: int, attempt: int = 0) -> bool:
        return self.table.answer_query(
            control_pb2.TaskProgress(request_id=name, attempt=attempt, next_index=next_index)
        )

    def advance(self, *, room: int = 0, after_s: float = 0.0) -> Actions:
        """Returns the actions since the last call."""
        self.now += after_s
        grant(self.table, WORKER, room)
        self.wake_at = self.table.advance(self.now)
        return self.table.take()

    def send(self, room: int = 8) -> str:
        """Sends what waits; returns the batch's id."""
        (batch,) = self.advance(room=room).batches
        return batch.batch_id

    def run(self, *names: str) -> None:
        """Adds rows and has the worker take them."""
        for name in names:
            self.add(name)
        self.admit(self.send())
        self.table.take()

    def admit(self, batch_id: str, *refused: worker_pb2.Refusal, worker: str = WORKER) -> None:
        """The worker's engine has taken a batch."""
        self.report(worker, admissions=[worker_pb2.Admission(batch_id=batch_id, refused=refused)])

    def step(self, name: str, start: int, count: int, *, attempt: int = 0, end: int = 0) -> bool:
        frame = frame_pb2.Frame(
            request_id=name, attempt=attempt, start_index=start, token_ids=range(count)
        )
        if end:
            frame.final.end = frame_pb2.TaskEnd.ValueType(end)
            frame.final.timings.prefill_ms = 3
        return self.take(WORKER, frame)

    def report(
        self,
        worker: str,
        frames: Sequence[frame_pb2.Frame] = (),
        admissions: Sequence[worker_pb2.Admission] = (),
        *,
        is_heartbeat: bool = False,
    ) -> None:
        """A report of the worker."""
        state = self.table.workers.state_of(worker)
        self.table.on_report(
            worker,
            worker_pb2.StepReport(
                worker=state.worker_id or worker,
                sequence=state.next_sequence,
                frames=frames,
                admissions=admissions,
                load=worker_pb2.WorkerLoad(slots=8),
                ready=True,
                task_grants=[state.sent_requests + 8 - len(state.requests)] * 3,
                counts=worker_pb2.WorkerCounts() if is_heartbeat else None,
            ),
            self.now,
        )

    def take(self, worker: str, frame: frame_pb2.Frame) -> bool:
        """Whether nothing before the frame is missing."""
        try:
            self.report(worker, [frame])
        except ChannelBroken:
            return False
        return True

    def returned(self, name: str, *, attempt: int, worker: str = WORKER) -> None:
        """The worker could not go on with a row."""
        self.report(worker, [returned(name, attempt=attempt)])


def returned(name: str, *, attempt: int) -> frame_pb2.Frame:
    frame = frame_pb2.Frame(request_id=name, attempt=attempt)
    frame.final.end = frame_pb2.TASK_END_RETURNED
    frame.final.error.message = "not enough memory"
    return frame


@pytest.fixture
def desk() -> Desk:
    return Desk()


def ends(actions: Actions) -> list[int]:
    return [frame.final.end for _, frame in frames(actions) if frame.HasField("final")]


def frames(actions: Actions) -> list[tuple[str, frame_pb2.Frame]]:
    """Gateway and frame."""
    return [(gateway, frame) for gateway, bundle in actions.bundles for frame in bundle.frames]


def cancelled(actions: Actions) -> list[tuple[str, str, int]]:
    """Worker, row and attempt."""
    return [
        (worker, ref.request_id, ref.attempt)
        for worker, refs in actions.cancels.items()
        for ref in refs
    ]


def held(actions: Actions) -> list[str]:
    return [ref.request_id for _, bundle in actions.bundles for ref in bundle.pending]


def returns(actions: Actions) -> list[tuple[str, int]]:
    """Rows that were returned to their gateways, and why."""
    return [
        (frame.request_id, frame.final.return_cause)
        for _, frame in frames(actions)
        if frame.final.end == frame_pb2.TASK_END_RETURNED
    ]


LOST, NOT_ACCEPTED = frame_pb2.RETURN_CAUSE_WORKER_LOST, frame_pb2.RETURN_CAUSE_NOT_ACCEPTED


def demands(actions: Actions) -> list[tuple[str, tuple[int, ...]]]:
    return [(worker, tuple(waiting)) for worker, waiting in actions.demands]


def test_adaptive_policy_learns_from_first_tokens() -> None:
    desk = Desk()
    policy = Policy(name="adaptive", latency_target_s=1.0, wait_s=5.0)
    desk.table.change_policy(policy, {})
    desk.run("a")
    desk.add("b")
    assert len(desk.advance(room=8).batches) == 1, "its size is 1"
    desk.step("a", 0, 1)
    for name in "cd":
        desk.add(name)
        (*batches,) = desk.advance(room=8).batches
    assert [len(batch.entries) for batch in batches] == [2], "before the end of the answer"


def test_a_last_try_is_a_returned_request() -> None:
    desk = Desk()
    desk.add("r", attempt=0, last_try=True)
    (batch,) = desk.advance(room=8).batches
    assert batch.entries[0].returned


def test_demand_is_announced_when_it_begins_and_ends() -> None:
    desk = Desk()
    desk.report(WORKER)
    desk.add("r")
    assert demands(desk.advance()) == [(WORKER, (0, 1, 0))]
    desk.add("s")
    assert demands(desk.advance()) == []
    desk.cancel("r", "s")
    assert demands(desk.advance()) == [(WORKER, (0, 0, 0))]


def test_demand_is_announced_again_after_each_heartbeat() -> None:
    desk = Desk()
    desk.report(WORKER)
    desk.add("r")
    desk.advance()
    desk.report(WORKER)
    assert demands(desk.advance()) == []
    desk.report(WORKER, is_heartbeat=True)
    assert demands(desk.advance()) == [(WORKER, (0, 1, 0))]
    assert demands(desk.advance()) == []
    desk.report(WORKER, is_heartbeat=True)
    desk.cancel("r")
    assert demands(desk.advance()) == [(WORKER, (0, 0, 0))]
    desk.report(WORKER, is_heartbeat=True)
    desk.add("s")
    assert demands(desk.advance(room=1)) == []


def test_failing_worker_gets_no_demand() -> None:
    desk = Desk()
    desk.report(WORKER)
    for attempt in range(FAILURES_MAX):
        desk.add("r", attempt=attempt)
        desk.admit(desk.send())
        desk.returned("r", attempt=attempt)
    desk.add("s")
    desk.add("t")
    assert demands(desk.advance(room=8)) == []
    actions = desk.advance(room=8, after_s=BREAK_S)
    assert [len(batch.entries) for batch in actions.batches] == [1]
    assert demands(actions) == [(WORKER, (0, 0, 0))], "one row is tried, and none waits beside it"
    assert demands(desk.advance(room=7)) == []


def test_demand_in_a_batch_is_not_announced_again() -> None:
    desk = Desk()
    desk.report(WORKER)
    desk.add("r")
    desk.add("s")
    actions = desk.advance(room=1)
    assert (list(actions.waiting), demands(actions)) == ([0, 1, 0], [])
    assert demands(desk.advance()) == []


def test_drained_worker_gets_no_demand() -> None:
    desk = Desk()
    desk.report(WORKER)
    desk.add("r")
    desk.advance()
    desk.table.workers.drained = frozenset({WORKER})
    assert demands(desk.advance()) == [(WORKER, (0, 0, 0))]


def test_request_is_forgotten_a_moment_after_its_end(desk: Desk) -> None:
    desk.add("r")
    assert held(desk.advance()) == ["r"]  # it waits
    desk.admit(desk.send())
    assert held(desk.table.take()) == []  # its gateway knows
    assert (desk.table.active, desk.table.size) == (1, 100)
    assert desk.step("r", 0, 4)
    assert desk.step("r", 4, 6, end=frame_pb2.TASK_END_LENGTH)
    actions = desk.advance()
    assert [(gateway, frame.start_index) for gateway, frame in frames(actions)] == [
        ("g", 0),
        ("g", 4),
    ]
    assert (desk.table.active, desk.table.size) == (0, 0)
    assert desk.wake_at == desk.now + ENDED_S + ENDED_LATE_S
    desk.advance(after_s=ENDED_S - 0.1)
    assert "r" in desk.table.requests
    desk.advance(after_s=0.2)
    assert "r" not in desk.table.requests


@pytest.mark.parametrize(
    ("priority_class", "asked", "sent"),
    [("interactive", None, 0), ("bulk", None, 250), ("bulk", 0, 0), ("interactive", 7, 7)],
)
def test_coalescing_delay_is_of_the_request_or_its_class(
    desk: Desk, priority_class: str, asked: int | None, sent: int
) -> None:
    desk.add(priority_class=priority_class, coalesce_ms=asked)
    (batch,) = desk.advance(room=1).batches
    (row,) = batch_message(batch, "b", [""], desk.now).tasks
    assert row.task.coalesce_ms == sent


@pytest.mark.parametrize(
    ("running", "coalesce_ms"), [(0, 0), (1, 0), (2, 24), (3, 48), (4, 48), (64, 48)]
)
def test_interactive_tokens_share_messages_under_load(running: int, coalesce_ms: int) -> None:
    assert coalesce_s("interactive", running) == pytest.approx(coalesce_ms / 1000)
    assert coalesce_s("standard", running) == 0.05


def test_coalescing_counts_the_running_sequences(desk: Desk) -> None:
    for name in "abc":
        desk.add(name, priority_class="interactive")
    (batch,) = desk.advance(room=3).batches

    delays = {task.task.coalesce_ms for task in batch_message(batch, "b", [""] * 3, desk.now).tasks}
    assert delays == {48}


def test_only_so_many_ended_rows_are_kept(desk: Desk) -> None:
    for number in range(ENDED_MAX + 3):
        desk.add(f"r{number}", timeout_s=0.001)
    desk.advance(after_s=1.0)
    desk.advance()
    assert len(desk.table.requests) == ENDED_MAX
    assert "r0" not in desk.table.requests


def test_no_collection_is_needed_to_free_rows_that_are_forgotten(desk: Desk) -> None:
    desk.run("a", "b")
    rows = [weakref.ref(row) for row in desk.table.requests.values()]
    gc.disable()
    try:
        desk.step("a", 0, 1, end=frame_pb2.TASK_END_STOP)
        desk.step("b", 0, 1, end=frame_pb2.TASK_END_STOP)
        desk.advance(after_s=1)
        desk.advance(after_s=ENDED_S)
        assert [row() for row in rows] == [None, None]
    finally:
        gc.enable()


def test_the_final_frame_carries_the_times_of_batcher_and_worker(desk: Desk) -> None:
    desk.add()
    desk.now += 2.0
    batch = desk.send()
    desk.now += 0.5
    desk.admit(batch)
    desk.now += 1.0
    desk.step("r", 0, 1, end=frame_pb2.TASK_END_STOP)
    ((_, frame),) = frames(desk.advance())
    timings = frame.final.timings
    assert (timings.queue_ms, timings.batch_ms, timings.prefill_ms) == (2000, 1500 - 3, 3)


def test_a_worker_whose_rows_have_ended_is_idle(desk: Desk) -> None:
    desk.run("r")
    desk.step("r", 0, 1)
    desk.step("r", 1, 1, end=frame_pb2.TASK_END_STOP)
    actions = desk.table.take()
    assert ends(actions) == [frame_pb2.TASK_END_STOP]
    assert actions.cancels == {}
    (capacity,) = capacities(desk.table, desk.now)
    assert (capacity.idle, capacity.free_slots) == (True, 7)


def test_a_gap_asks_for_a_new_channel(desk: Desk) -> None:
    desk.run("r")
    assert not desk.step("r", 1, 1)


def test_requests_of_a_lost_worker_return_to_gateways(desk: Desk) -> None:
    desk.run("r", "s")
    desk.step("r", 0, 4)
    desk.add("waits")
    desk.table.on_lost(WORKER, desk.now)
    actions = desk.advance()
    assert returns(actions) == [("r", LOST), ("s", LOST)]
    ends = {frame.request_id: frame for _, frame in frames(actions) if frame.HasField("final")}
    assert (ends["r"].start_index, ends["r"].attempt) == (4, 0)
    assert ends["r"].final.error.message == "the worker was lost"
    assert "r" not in desk.table.requests
    assert actions.cancels == {}
    assert sent(desk.advance(room=8)) == [["waits"]]


def test_rows_that_come_again_go_first_in_their_order(desk: Desk) -> None:
    desk.run(*(f"r{number}" for number in range(8)))
    desk.table.on_lost(WORKER, desk.now)
    desk.add("new")
    lost = [name for name, _ in returns(desk.advance())]
    for name in lost:
        desk.add(name, attempt=1)
    assert sent(desk.advance(room=9)) == [lost, ["new"]]


def test_last_try_counts_as_lost_only_once_admitted(desk: Desk) -> None:
    """Nobody knows that it was alone before the worker has said so."""
    desk.add("r")
    desk.send()
    desk.table.on_lost(WORKER, desk.now)
    assert returns(desk.advance()) == [("r", LOST)]
    for number, cause in enumerate((NOT_ACCEPTED, LOST), 1):
        desk.now += BREAK_S_MAX
        desk.add("r", attempt=number, last_try=True)
        batch = desk.send()
        if cause == LOST:
            desk.admit(batch)
        desk.table.on_lost(WORKER, desk.now)
        assert returns(desk.advance()) == [("r", cause)]


def test_returned_request_has_reason_and_new_tokens(desk: Desk) -> None:
    desk.run("r", "made way")
    last = returned("r", attempt=0)
    last.token_ids.append(7)
    other = returned("made way", attempt=0)
    other.final.return_cause = NOT_ACCEPTED
    desk.report(WORKER, [last, other])
    actions = desk.advance()
    assert returns(actions) == [("r", LOST), ("made way", NOT_ACCEPTED)]
    tokens, end, _ = [frame for _, frame in frames(actions)]
    assert (list(tokens.token_ids), tokens.HasField("final")) == ([7], False)
    assert (end.start_index, end.final.error.message) == (1, "not enough memory")
    assert actions.cancels == {}


def test_refused_request_returns_without_blame(desk: Desk) -> None:
    desk.add("r")
    refusal = worker_pb2.Refusal(request_id="r", retryable=True)
    desk.admit(desk.send(), refusal)
    assert returns(desk.advance()) == [("r", NOT_ACCEPTED)]


@pytest.mark.parametrize(("retryable", "rows"), [(True, []), (False, [["next"]])])
def test_after_a_refusal_nothing_is_sent_until_a_report(
    desk: Desk, retryable: bool, rows: list[list[str]]
) -> None:
    desk.add("r")
    desk.admit(desk.send(), worker_pb2.Refusal(request_id="r", retryable=retryable))
    desk.add("next")
    desk.table.advance(desk.now)
    assert sent(desk.table.take()) == rows
    desk.report(WORKER)
    desk.table.advance(desk.now)
    assert sent(desk.table.take()) == ([] if rows else [["next"]])


def sent(actions: Actions) -> list[list[str]]:
    return [[row.request_id for row in batch.entries] for batch in actions.batches]


def capacities(requests: RequestTable, now: float) -> list[Capacity]:
    return requests.workers.capacities(requests.workers.active(), now)


def test_worker_that_fails_fast_does_not_attract_the_queue(desk: Desk) -> None:
    """It looks idle. After a pause it is tried with one row, and gets the rest when that brings a token."""

    def given(attempt: int) -> list[str]:
        for number in range(8):
            desk.add(f"r{number}", attempt=attempt)
        desk.table.advance(desk.now)
        return [row.request_id for batch in desk.table.take().batches for row in batch.entries]

    desk.report(WORKER)
    assert len(given(0)) == 8
    desk.table.on_lost(WORKER, desk.now)
    desk.report(WORKER)
    assert len(given(1)) == 8
    frames = [returned(f"r{number}", attempt=1) for number in range(8)]
    desk.report(WORKER, frames, [worker_pb2.Admission(batch_id="b-2")])
    desk.report(WORKER)
    assert given(2) == []
    desk.now = desk.table.advance(desk.now)
    (probe,) = given(2)
    assert given(2) == []
    desk.step(probe, 0, 1, attempt=2)
    assert len(given(2)) == 7


def test_worker_that_preempts_for_a_last_try_has_not_failed(desk: Desk) -> None:
    desk.report(WORKER)
    for attempt in range(3):
        desk.add("r", attempt=attempt)
        desk.table.advance(desk.now)
        assert sent(desk.table.take()) == [["r"]]
        frame = returned("r", attempt=attempt)
        frame.final.return_cause = NOT_ACCEPTED
        desk.report(WORKER, [frame], [worker_pb2.Admission(batch_id=f"b-{attempt + 1}")])


def test_a_row_refused_for_good_ends_with_the_workers_reason(desk: Desk) -> None:
    desk.add()
    refusal = worker_pb2.Refusal(request_id="r")
    refusal.error.reason = "PROMPT_TOO_LONG"
    desk.admit(desk.send(), refusal)
    ((_, frame),) = frames(desk.advance())
    assert frame.final.end == frame_pb2.TASK_END_REFUSED
    assert frame.final.error.reason == "PROMPT_TOO_LONG"


def test_cancel_of_a_waiting_row_never_reaches_a_worker(desk: Desk) -> None:
    desk.add()
    desk.cancel("r", "unknown")
    actions = desk.advance(room=8)
    assert (frames(actions), actions.batches, actions.cancels) == ([], [], {})
    assert len(desk.table.requests) == 0


def test_a_cancel_that_names_a_row_twice_cancels_it_once(desk: Desk) -> None:
    desk.run("r")
    desk.cancel("r", "r")
    assert cancelled(desk.advance()) == [(WORKER, "r", 0)]
    assert "r" not in desk.table.requests


def test_cancel_of_a_running_row_reaches_its_worker_at_once(desk: Desk) -> None:
    desk.run("r")
    desk.step("r", 0, 3)
    desk.advance()
    desk.cancel("r")
    actions = desk.advance()
    assert cancelled(actions) == [(WORKER, "r", 0)]
    assert desk.step("r", 3, 1)
    assert frames(desk.advance()) == []


def test_a_cancel_leaves_behind_the_batch_of_its_row(desk: Desk) -> None:
    desk.add()
    desk.send()
    desk.cancel("r")
    assert cancelled(desk.advance()) == [(WORKER, "r", 0)]


def test_a_cancel_of_an_earlier_task_leaves_the_later_one(desk: Desk) -> None:
    desk.add(attempt=2)
    desk.cancel("r", attempt=1)
    assert len(desk.advance(room=8).batches) == 1
    desk.cancel("r", attempt=3)
    assert "r" not in desk.table.requests


def test_later_attempt_replaces_a_request_and_equal_one_does_not(desk: Desk) -> None:
    desk.run("r")
    desk.step("r", 0, 3)
    desk.add("r")
    assert held(desk.advance()) == ["r"]
    assert desk.table.active == 1
    desk.add("r", attempt=1000)
    actions = desk.advance(room=8)
    assert held(actions) == []
    assert [(row.attempt, row.produced) for row in actions.batches[0].entries] == [(1000, [])]
    assert cancelled(actions) == [(WORKER, "r", 0)]
    desk.step("r", 3, 1)  # of the earlier attempt
    desk.step("r", 0, 1, attempt=1000)
    assert [frame.attempt for _, frame in frames(desk.advance())] == [1000]
    assert desk.table.active == 1


def test_request_that_ends_first_is_not_acknowledged(desk: Desk) -> None:
    desk.add("short")
    desk.add("long")
    batch_id = desk.send()
    assert held(desk.table.take()) == []
    desk.admit(batch_id)
    desk.step("short", 0, 1, end=frame_pb2.TASK_END_LENGTH)
    actions = desk.advance()
    assert (held(actions), ends(actions)) == (["long"], [frame_pb2.TASK_END_LENGTH])


def test_rows_of_a_gateway_that_is_gone_are_dropped(desk: Desk) -> None:
    desk.run("runs")
    desk.add("waits")
    desk.table.drop_gateway("other", desk.now)
    assert desk.table.active == 2
    desk.table.drop_gateway("g", desk.now)
    assert cancelled(desk.advance(room=8)) == [(WORKER, "runs", 0)]
    assert len(desk.table.requests) == 0


def test_overdue_waiting_request_ends_without_a_worker(desk: Desk) -> None:
    desk.add(timeout_s=5.0)
    desk.advance()
    assert desk.wake_at == desk.now + 5.0
    actions = desk.advance(room=8, after_s=5.0)
    assert ends(actions) == [frame_pb2.TASK_END_DEADLINE]
    assert actions.batches == []


def test_overdue_running_request_ends_and_leaves_its_worker(desk: Desk) -> None:
    desk.add(timeout_s=5.0)
    desk.admit(desk.send())
    actions = desk.advance(after_s=5.0)
    assert ends(actions) == [frame_pb2.TASK_END_DEADLINE]
    assert cancelled(actions) == [(WORKER, "r", 0)]


def test_query_returns_missing_tokens(desk: Desk) -> None:
    desk.run("r")
    desk.step("r", 0, 5)
    desk.advance()
    assert all(desk.ask("r", index) for index in (4, 2, 3))
    assert not desk.ask("unknown", 0)
    assert not desk.ask("r", 2, attempt=1000)
    actions = desk.advance()
    ((gateway, frame),) = frames(actions)
    assert (gateway, frame.start_index, len(frame.token_ids)) == ("g", 2, 3)
    assert held(actions) == ["r"] * 3


def test_query_about_an_ended_request_returns_its_end(desk: Desk) -> None:
    desk.run("r")
    desk.step("r", 0, 2, end=frame_pb2.TASK_END_STOP)
    desk.advance()
    assert desk.ask("r", 1)
    actions = desk.advance()
    assert ends(actions) == [frame_pb2.TASK_END_STOP]
    assert held(actions) == []


def test_drain_returns_what_waits_and_what_comes_back(desk: Desk) -> None:
    desk.run("runs", "lost")
    desk.add("waits")
    desk.table.drain(desk.now)
    assert returns(desk.advance(room=8)) == [("waits", 0)]
    desk.add("new")
    desk.step("runs", 0, 1, end=frame_pb2.TASK_END_STOP)
    desk.table.on_lost(WORKER, desk.now)
    assert returns(desk.advance(room=8)) == [("new", 0), ("lost", LOST)]
    assert desk.table.active == 0


def test_drain_with_running_returns_everything(desk: Desk) -> None:
    desk.run("runs", "ended")
    desk.step("ended", 0, 1, end=frame_pb2.TASK_END_STOP)
    desk.advance()
    desk.table.drain(desk.now, running=True)
    actions = desk.advance()
    assert returns(actions) == [("runs", 0)]
    assert cancelled(actions) == [(WORKER, "runs", 0)]
    assert desk.table.active == 0


def test_a_row_that_is_refused_is_returned_with_the_reason(desk: Desk) -> None:
    row = QueuedRequest(task_pb2.Task(request_id="r", gateway="g", attempt=1000), desk.now)
    desk.table.refuse(row, frame_pb2.TaskError(reason="OVERLOADED"))
    actions = desk.advance()
    ((_, frame),) = frames(actions)
    assert (frame.attempt, frame.final.error.reason) == (1000, "OVERLOADED")
    assert returns(actions) == [("r", 0)]
    assert (actions.added, actions.ended) == ([], [])


def test_batches_never_exceed_the_room(desk: Desk) -> None:
    for number in range(30):
        desk.add(f"r{number}")
    actions = desk.advance(room=11)
    assert [len(batch.entries) for batch in actions.batches] == [8, 3]
    assert (len(desk.table.queue), len(desk.table.workers.state_of(WORKER).requests)) == (19, 11)


def test_a_lost_worker_gives_back_its_own_rows_alone(desk: Desk) -> None:
    desk.add("first")
    desk.add("second")
    grant(desk.table, "one", 1)
    grant(desk.table, "two", 1)
    desk.table.advance(desk.now)
    batches = {batch.worker: batch for batch in desk.table.take().batches}
    (lost,), (kept,) = batches["one"].entries, batches["two"].entries
    desk.table.on_lost("one", desk.now)
    assert returns(desk.table.take()) == [(lost.request_id, LOST)]
    assert kept.state is RequestState.SENT
    # The other worker takes it over; what the first may still say of it is nothing to us.
    desk.add(lost.request_id, attempt=1)
    grant(desk.table, "two", 1)
    desk.table.advance(desk.now)
    assert sent(desk.table.take()) == [[lost.request_id]]
    frame = frame_pb2.Frame(request_id=lost.request_id, attempt=1, token_ids=[1])
    assert desk.take("one", frame)
    assert frames(desk.table.take()) == []


def test_standby_replaces_a_lost_worker_until_it_is_back() -> None:
    workers = WorkerTable(("first", "standby"), 1)
    workers.state_of("standby").live = True
    assert list(workers.active()) == ["standby"]
    workers.state_of("first").live = True
    assert list(workers.active()) == ["first"]
    workers.remove("first")
    assert list(workers.active()) == ["standby"]
    workers.state_of("first").live = True
    assert list(workers.active()) == ["first"]
    for _ in range(2):
        workers.record_outcome("first", 0.0, succeeded=False, failed=True)
    assert list(workers.active()) == ["standby", "first"], "it is tried beside the standby"
    workers.record_outcome("first", 0.0, succeeded=True, failed=False)
    assert list(workers.active()) == ["first"]


def test_the_end_of_a_row_tells_of_its_batch(desk: Desk) -> None:
    first = worker_pb2.StepReport(worker="w-1234")
    desk.table.on_report(WORKER, first, desk.now)
    desk.add("short")
    desk.now += 1.0
    desk.run("r")
    desk.step("r", 0, 1, end=frame_pb2.TASK_END_STOP)
    (final,) = [frame.final for _, frame in frames(desk.advance())]
    assert (final.batch.tasks, final.batch.worker, final.batch.cause) == (
        2,
        "w-1234",
        "worker_idle",
    )
    assert (final.batch.waited_ms, final.batch.longest_waited_ms) == (0, 1000)
    assert final.batch.batch_id == "b-1"


def test_a_row_that_never_was_in_a_batch_tells_of_none(desk: Desk) -> None:
    desk.add(timeout_s=1.0)
    ((_, frame),) = frames(desk.advance(after_s=2.0))
    assert not frame.final.HasField("batch")


def test_another_policy_takes_over_what_waits_and_what_runs(desk: Desk) -> None:
    desk.run("runs", "lost")
    desk.add("waits", timeout_s=5.0)
    desk.table.change_policy(Policy(max_rows=1), {"a": 2.0})
    desk.step("runs", 0, 1, end=frame_pb2.TASK_END_STOP)
    desk.table.on_lost(WORKER, desk.now)
    desk.add("lost", attempt=1)
    assert sent(desk.advance(room=8)) == [["lost"], ["waits"]]
    desk.cancel("lost", "waits", "runs", attempt=1)
    assert len(desk.table.requests) == 0
    assert len(desk.table.queue) == 0


def test_standby_replaces_a_drained_worker() -> None:
    workers = WorkerTable(("first", "standby"), 1)
    for name in ("first", "standby"):
        workers.state_of(name).live = True
    workers.drained = frozenset({"first"})
    assert list(workers.active()) == ["standby"]
    workers.drained = frozenset()
    assert list(workers.active()) == ["first"]
