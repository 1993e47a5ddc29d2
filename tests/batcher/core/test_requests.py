"""What becomes of requests: by messages of gateways, reports of workers, and time."""

import gc
import weakref

import pytest

from batcher.core.queued_request import QueuedRequest, RequestState, batch_message
from batcher.core.requests import ENDED_LATE_S, ENDED_MAX, ENDED_S, Actions
from batcher.core.workers import BREAK_S, BREAK_S_MAX, FAILURES_MAX, WorkerTable
from sluice.internal.v1 import frame_pb2, task_pb2, worker_pb2
from sluice.settings.batching import Policy, coalesce_s
from tests.batcher.core.desk import WORKER, Desk, frame

STOP, LENGTH, DEADLINE = (
    frame_pb2.TASK_END_STOP,
    frame_pb2.TASK_END_LENGTH,
    frame_pb2.TASK_END_DEADLINE,
)
RETURNED = frame_pb2.TASK_END_RETURNED
LOST, NOT_ACCEPTED = frame_pb2.RETURN_CAUSE_WORKER_LOST, frame_pb2.RETURN_CAUSE_NOT_ACCEPTED


@pytest.fixture
def desk() -> Desk:
    return Desk()


def returned(name: str, attempt: int = 0, cause: int = 0) -> frame_pb2.Frame:
    made = frame(name, attempt=attempt, end=RETURNED)
    made.final.error.message = "not enough memory"
    made.final.return_cause = frame_pb2.ReturnCause.ValueType(cause)
    return made


def frames(actions: Actions) -> list[frame_pb2.Frame]:
    return [frame for _, bundle in actions.bundles for frame in bundle.frames]


def ends(actions: Actions) -> list[int]:
    return [frame.final.end for frame in frames(actions) if frame.HasField("final")]


def returns(actions: Actions) -> list[tuple[str, int]]:
    """Requests that were returned to their gateways, and why."""
    found = [frame for frame in frames(actions) if frame.final.end == RETURNED]
    return [(frame.request_id, frame.final.return_cause) for frame in found]


def pending(actions: Actions) -> list[str]:
    return [ref.request_id for _, bundle in actions.bundles for ref in bundle.pending]


def sent(actions: Actions) -> list[list[str]]:
    return [[request.request_id for request in batch.entries] for batch in actions.batches]


def cancelled(actions: Actions) -> list[tuple[str, str, int]]:
    """Worker, request and attempt."""
    cancels = actions.cancels.items()
    return [(worker, ref.request_id, ref.attempt) for worker, refs in cancels for ref in refs]


def demands(actions: Actions) -> list[tuple[str, tuple[int, ...]]]:
    return [(worker, tuple(waiting)) for worker, waiting in actions.demands]


WAITS, NOTHING = [(WORKER, (0, 1, 0))], [(WORKER, (0, 0, 0))]


# Demand.


def test_demand_is_announced_when_it_begins_and_ends(desk: Desk) -> None:
    desk.report()
    desk.add("r")
    assert demands(desk.advance()) == WAITS
    desk.add("s")
    assert demands(desk.advance()) == []
    desk.cancel("r", "s")
    assert demands(desk.advance()) == NOTHING


def test_demand_is_announced_again_after_each_heartbeat(desk: Desk) -> None:
    beat = worker_pb2.WorkerCounts()
    desk.report()
    desk.add("r")
    desk.advance()
    desk.report()
    assert demands(desk.advance()) == []
    desk.report(counts=beat)
    assert demands(desk.advance()) == WAITS
    assert demands(desk.advance()) == []
    desk.report(counts=beat)
    desk.cancel("r")
    assert demands(desk.advance()) == NOTHING
    desk.report(counts=beat)
    desk.add("s")
    desk.add("t")
    actions = desk.advance(room=1)
    assert (list(actions.waiting), demands(actions)) == ([0, 1, 0], []), "its batch says so"
    assert demands(desk.advance()) == []


def test_failing_worker_gets_no_demand(desk: Desk) -> None:
    desk.report()
    for attempt in range(FAILURES_MAX):
        desk.add("r", attempt=attempt)
        desk.admit(desk.send())
        desk.report(returned("r", attempt))
    desk.add("s")
    desk.add("t")
    assert demands(desk.advance(room=8)) == []
    actions = desk.advance(room=8, after_s=BREAK_S)
    assert [len(batch.entries) for batch in actions.batches] == [1]
    assert demands(actions) == NOTHING, "one row is tried, and none waits beside it"
    assert demands(desk.advance(room=7)) == []


def test_drained_worker_gets_no_demand(desk: Desk) -> None:
    desk.report()
    desk.add("r")
    desk.advance()
    desk.table.workers.drained = frozenset({WORKER})
    assert demands(desk.advance()) == NOTHING


# A whole life.


def test_request_is_forgotten_a_moment_after_its_end(desk: Desk) -> None:
    desk.add("r")
    assert pending(desk.advance()) == ["r"]  # it waits
    desk.admit(desk.send())
    assert pending(desk.table.take()) == []  # its gateway knows
    assert (desk.table.active, desk.table.size) == (1, 100)
    desk.step("r", 0, 4)
    desk.step("r", 4, 6, end=LENGTH)
    actions = desk.advance()
    assert [gateway for gateway, _ in actions.bundles] == ["g"]
    assert [frame.start_index for frame in frames(actions)] == [0, 4]
    assert (desk.table.active, desk.table.size) == (0, 0)
    assert desk.wake_at == desk.now + ENDED_S + ENDED_LATE_S
    desk.advance(after_s=ENDED_S - 0.1)
    assert "r" in desk.table.requests
    desk.advance(after_s=0.2)
    assert "r" not in desk.table.requests


def test_adaptive_policy_learns_from_first_tokens(desk: Desk) -> None:
    desk.table.queue.reconfigure(Policy(name="adaptive", latency_target_s=1.0, wait_s=5.0), {})
    desk.run("a")
    desk.add("b")
    assert len(desk.advance(room=8).batches) == 1, "its size is 1"
    desk.step("a")
    desk.add("c")
    desk.add("d")
    assert sent(desk.advance(room=8)) == [["c", "d"]], "before the end of the answer"


@pytest.mark.parametrize(
    ("priority_class", "asked", "count", "delay_ms"),
    [
        ("interactive", None, 1, 0),
        ("interactive", None, 3, 48),
        ("bulk", None, 1, 250),
        ("bulk", 0, 1, 0),
        ("interactive", 7, 1, 7),
    ],
)
def test_coalescing_delay_is_of_the_request_or_its_class(
    desk: Desk, priority_class: str, asked: int | None, count: int, delay_ms: int
) -> None:
    for number in range(count):
        desk.add(f"r{number}", priority_class=priority_class, coalesce_ms=asked)
    (batch,) = desk.advance(room=8).batches
    tasks = batch_message(batch, "b", [""] * count, desk.now).tasks
    assert {entry.task.coalesce_ms for entry in tasks} == {delay_ms}


@pytest.mark.parametrize(("running", "delay_ms"), [(0, 0), (1, 0), (2, 24), (3, 48), (64, 48)])
def test_interactive_tokens_share_messages_under_load(running: int, delay_ms: int) -> None:
    assert coalesce_s("interactive", running) == pytest.approx(delay_ms / 1000)
    assert coalesce_s("standard", running) == 0.05


def test_only_so_many_ended_rows_are_kept(desk: Desk) -> None:
    for number in range(ENDED_MAX + 3):
        desk.add(f"r{number}", timeout_ms=1)
    desk.advance(after_s=1.0)
    desk.advance()
    assert len(desk.table.requests) == ENDED_MAX
    assert "r0" not in desk.table.requests


def test_no_collection_is_needed_to_free_rows_that_are_forgotten(desk: Desk) -> None:
    desk.run("a", "b")
    requests = [weakref.ref(request) for request in desk.table.requests.values()]
    gc.disable()
    try:
        desk.step("a", end=STOP)
        desk.step("b", end=STOP)
        desk.advance(after_s=1)
        desk.advance(after_s=ENDED_S)
        assert [request() for request in requests] == [None, None]
    finally:
        gc.enable()


def test_final_frame_has_its_times_and_its_batch(desk: Desk) -> None:
    desk.report()
    desk.add("first")
    desk.now += 1.0
    desk.add("r")
    desk.now += 2.0
    batch_id = desk.send()
    desk.now += 0.5
    desk.admit(batch_id)
    desk.now += 1.0
    desk.step("r", end=STOP)
    (last,) = frames(desk.advance())
    timings, batch = last.final.timings, last.final.batch
    assert (timings.queue_ms, timings.batch_ms, timings.prefill_ms) == (2000, 1500 - 3, 3)
    assert (batch.batch_id, batch.tasks, batch.worker) == (batch_id, 2, WORKER)
    assert (batch.cause, batch.waited_ms, batch.longest_waited_ms) == ("urgent", 2000, 3000)


def test_a_worker_whose_rows_have_ended_is_idle(desk: Desk) -> None:
    desk.run("r")
    desk.step()
    desk.step("r", 1, end=STOP)
    actions = desk.table.take()
    assert (ends(actions), actions.cancels) == ([STOP], {})
    workers = desk.table.workers
    (capacity,) = workers.capacities(workers.active(), desk.now)
    assert (capacity.idle, capacity.free_slots) == (True, 7)


# Workers that cannot go on.


def test_requests_of_a_lost_worker_return_to_gateways(desk: Desk) -> None:
    desk.run("r", "s")
    desk.step("r", 0, 4)
    desk.add("waits")
    desk.table.on_lost(WORKER, desk.now)
    actions = desk.advance()
    assert returns(actions) == [("r", LOST), ("s", LOST)]
    (last,) = [one for one in frames(actions) if one.request_id == "r" and one.HasField("final")]
    assert (last.start_index, last.attempt) == (4, 0)
    assert last.final.error.message == "the worker was lost"
    assert "r" not in desk.table.requests
    assert actions.cancels == {}
    assert sent(desk.advance(room=8)) == [["waits"]]


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
    last = returned("r")
    last.token_ids.append(7)
    desk.report(last, returned("made way", cause=NOT_ACCEPTED))
    actions = desk.advance()
    assert returns(actions) == [("r", LOST), ("made way", NOT_ACCEPTED)]
    tokens, end, _ = frames(actions)
    assert (list(tokens.token_ids), tokens.HasField("final")) == ([7], False)
    assert (end.start_index, end.final.error.message) == (1, "not enough memory")
    assert actions.cancels == {}


@pytest.mark.parametrize("retryable", [True, False])
def test_refused_request_returns_or_ends(desk: Desk, retryable: bool) -> None:
    desk.add("r")
    refusal = worker_pb2.Refusal(request_id="r", retryable=retryable)
    refusal.error.reason = "PROMPT_TOO_LONG"
    desk.admit(desk.send(), refusal)
    desk.add("next")
    actions = desk.decide()
    (last,) = frames(actions)
    assert returns(actions) == ([("r", NOT_ACCEPTED)] if retryable else [])
    assert last.final.error.reason == "PROMPT_TOO_LONG"
    assert last.final.end == (RETURNED if retryable else frame_pb2.TASK_END_REFUSED)
    # A worker that lacks capacity gets nothing before its next report.
    assert sent(actions) == ([] if retryable else [["next"]])
    desk.report()
    assert sent(desk.decide()) == ([["next"]] if retryable else [])


def test_worker_that_fails_fast_does_not_attract_the_queue(desk: Desk) -> None:
    """It looks idle. After a pause it is tried with one row, and gets the rest when that brings a token."""

    def given(attempt: int) -> list[str]:
        for number in range(8):
            desk.add(f"r{number}", attempt=attempt)
        return [name for names in sent(desk.decide()) for name in names]

    desk.report()
    assert len(given(0)) == 8
    desk.table.on_lost(WORKER, desk.now)
    desk.report()
    assert len(given(1)) == 8
    lost = [returned(f"r{number}", 1) for number in range(8)]
    desk.report(*lost, admissions=[worker_pb2.Admission(batch_id="b-2")])
    desk.report()
    assert given(2) == []
    desk.now = desk.table.advance(desk.now)
    (probe,) = given(2)
    assert given(2) == []
    desk.step(probe, attempt=2)
    assert len(given(2)) == 7


def test_worker_that_preempts_for_a_last_try_has_not_failed(desk: Desk) -> None:
    desk.report()
    for attempt in range(3):
        desk.add("r", attempt=attempt)
        assert sent(desk.decide()) == [["r"]]
        admission = worker_pb2.Admission(batch_id=f"b-{attempt + 1}")
        desk.report(returned("r", attempt, NOT_ACCEPTED), admissions=[admission])


def test_a_lost_worker_gives_back_its_own_rows_alone(desk: Desk) -> None:
    desk.add("first")
    desk.add("second")
    desk.grant("one", 1)
    desk.grant("two", 1)
    batches = {batch.worker: batch for batch in desk.decide().batches}
    (lost,), (kept,) = batches["one"].entries, batches["two"].entries
    desk.table.on_lost("one", desk.now)
    assert returns(desk.table.take()) == [(lost.request_id, LOST)]
    assert kept.state is RequestState.SENT
    # The other worker takes it over; what the first may still say of it is nothing to us.
    desk.add(lost.request_id, attempt=1)
    desk.grant("two", 1)
    assert sent(desk.decide()) == [[lost.request_id]]
    desk.report(frame(lost.request_id, 0, 1, attempt=1), worker="one")
    assert frames(desk.table.take()) == []


def test_standby_replaces_a_lost_or_drained_worker() -> None:
    workers = WorkerTable(("first", "standby"), 1)

    def active() -> list[str]:
        return list(workers.active())

    workers.states["standby"].live = True
    assert active() == ["standby"]
    workers.states["first"].live = True
    assert active() == ["first"]
    workers.drained = frozenset({"first"})
    assert active() == ["standby"]
    workers.drained = frozenset()
    workers.states.pop("first")
    assert active() == ["standby"]
    workers.states["first"].live = True
    assert active() == ["first"]
    for _ in range(2):
        workers.record_outcome("first", 0.0, succeeded=False, failed=True)
    assert active() == ["standby", "first"], "it is tried beside the standby"
    workers.record_outcome("first", 0.0, succeeded=True, failed=False)
    assert active() == ["first"]


# Messages of gateways.


def test_cancel_of_a_waiting_row_never_reaches_a_worker(desk: Desk) -> None:
    desk.add()
    desk.cancel("r", "unknown")
    actions = desk.advance(room=8)
    assert (frames(actions), actions.batches, actions.cancels) == ([], [], {})
    assert len(desk.table.requests) == 0


def test_cancel_of_a_running_row_reaches_its_worker_once(desk: Desk) -> None:
    desk.run("r")
    desk.step("r", 0, 3)
    desk.advance()
    desk.cancel("r", "r")
    assert cancelled(desk.advance()) == [(WORKER, "r", 0)]
    desk.step("r", 3, 1)
    assert frames(desk.advance()) == []


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
    assert pending(desk.advance()) == ["r"]
    assert desk.table.active == 1
    desk.add("r", attempt=1000)
    actions = desk.advance(room=8)
    assert pending(actions) == []
    (request,) = actions.batches[0].entries
    assert (request.attempt, request.produced, request.returned) == (1000, [], True)
    assert cancelled(actions) == [(WORKER, "r", 0)]
    desk.step("r", 3, 1)  # of the earlier attempt
    desk.step("r", 0, 1, attempt=1000)
    assert [frame.attempt for frame in frames(desk.advance())] == [1000]
    assert desk.table.active == 1


def test_request_that_ends_first_is_not_acknowledged(desk: Desk) -> None:
    desk.add("short")
    desk.add("long", last_try=True)
    (batch,) = desk.advance(room=8).batches
    assert [entry.returned for entry in batch.entries] == [True, False], "a last try goes first"
    desk.admit(batch.batch_id)
    desk.step("short", end=LENGTH)
    actions = desk.advance()
    assert (pending(actions), ends(actions)) == (["long"], [LENGTH])


def test_rows_of_a_gateway_that_is_gone_are_dropped(desk: Desk) -> None:
    desk.run("runs")
    desk.add("waits")
    desk.table.drop_gateway("other", desk.now)
    assert desk.table.active == 2
    desk.table.drop_gateway("g", desk.now)
    assert cancelled(desk.advance(room=8)) == [(WORKER, "runs", 0)]
    assert len(desk.table.requests) == 0


def test_query_returns_missing_tokens(desk: Desk) -> None:
    desk.run("r")
    desk.step("r", 0, 5)
    desk.advance()
    assert all(desk.query("r", index) for index in (4, 2, 3))
    assert not desk.query("unknown", 0)
    assert not desk.query("r", 2, attempt=1000)
    actions = desk.advance()
    (missing,) = frames(actions)
    assert (missing.start_index, len(missing.token_ids)) == (2, 3)
    assert pending(actions) == ["r"] * 3


def test_query_about_an_ended_request_returns_its_end(desk: Desk) -> None:
    desk.run("r")
    desk.step("r", 0, 2, end=STOP)
    desk.advance()
    assert desk.query("r", 1)
    actions = desk.advance()
    assert (ends(actions), pending(actions)) == ([STOP], [])


def test_a_row_that_is_refused_is_returned_with_the_reason(desk: Desk) -> None:
    request = QueuedRequest(task_pb2.Task(request_id="r", gateway="g", attempt=1000), desk.now)
    desk.table.refuse(request, frame_pb2.TaskError(reason="OVERLOADED"))
    actions = desk.advance()
    (last,) = frames(actions)
    assert (last.attempt, last.final.error.reason) == (1000, "OVERLOADED")
    assert (returns(actions), actions.added, actions.ended) == ([("r", 0)], [], [])


# Time.


def test_overdue_waiting_request_ends_without_a_worker(desk: Desk) -> None:
    desk.add(timeout_ms=5000)
    desk.advance()
    assert desk.wake_at == desk.now + 5.0
    actions = desk.advance(room=8, after_s=5.0)
    (last,) = frames(actions)
    assert (last.final.end, last.final.HasField("batch"), actions.batches) == (DEADLINE, False, [])


def test_overdue_running_request_ends_and_leaves_its_worker(desk: Desk) -> None:
    desk.add(timeout_ms=5000)
    desk.admit(desk.send())
    actions = desk.advance(after_s=5.0)
    assert (ends(actions), cancelled(actions)) == ([DEADLINE], [(WORKER, "r", 0)])


def test_drain_returns_what_waits_and_what_comes_back(desk: Desk) -> None:
    desk.run("runs", "lost")
    desk.add("waits")
    desk.table.drain(desk.now)
    assert returns(desk.advance(room=8)) == [("waits", 0)]
    desk.add("new")
    desk.step("runs", end=STOP)
    desk.table.on_lost(WORKER, desk.now)
    assert returns(desk.advance(room=8)) == [("new", 0), ("lost", LOST)]
    assert desk.table.active == 0


def test_drain_with_running_returns_everything(desk: Desk) -> None:
    desk.run("runs", "ended")
    desk.step("ended", end=STOP)
    desk.advance()
    desk.table.drain(desk.now, running=True)
    actions = desk.advance()
    assert returns(actions) == [("runs", 0)]
    assert cancelled(actions) == [(WORKER, "runs", 0)]
    assert desk.table.active == 0
