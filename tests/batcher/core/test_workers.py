"""What fits in a worker: its reports, what is on its way, and what it grants."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.core.queued_request import QueuedRequest
from batcher.core.workers import (
    BREAK_S,
    BREAK_S_MAX,
    ChannelBroken,
    WorkerBreaker,
    WorkerState,
    without_standby,
)
from sluice.internal.v1 import task_pb2, worker_pb2


def report(sequence: int, worker: str = "w", running: int = 0) -> worker_pb2.StepReport:
    load = worker_pb2.WorkerLoad(slots=8, running=running)
    return worker_pb2.StepReport(
        worker=worker, sequence=sequence, load=load, ready=True, task_grants=[8] * 3
    )


def free_slots(state: WorkerState) -> float:
    return state.capacity("name").free_slots


def row(
    name: str, priority_class: str = "interactive", prefill: int = 1, cache: int = 1
) -> QueuedRequest:
    task = task_pb2.Task(request_id=name, priority_class=priority_class)
    made = QueuedRequest(task, now=0.0)
    made.prefill_tokens, made.cache_tokens = prefill, cache
    return made


def send(state: WorkerState, batch_id: str, *rows: QueuedRequest) -> None:
    state.add_batch(batch_id, rows)


@given(st.sets(st.integers(0, 5)), st.integers(1, 6), st.data())
def test_standbys_get_rows_only_in_place_of_lost_workers(
    up: set[int], count: int, data: st.DataObject
) -> None:
    standby = data.draw(st.integers(0, count - 1))
    ranked = [f"w{number}" for number in range(count)]
    live = {worker for worker in ranked if int(worker[1:]) in up}
    chosen = without_standby(live, ranked, standby)
    assert chosen == sorted(chosen)
    assert set(chosen) <= live
    assert len(chosen) == min(len(live), count - standby)
    if live >= set(ranked[: count - standby]):
        assert chosen == ranked[: count - standby]


def test_a_worker_that_has_not_spoken_has_no_room() -> None:
    state = WorkerState()
    assert not state.worker_id
    assert free_slots(state) == 0


@pytest.mark.parametrize("sequence", [0, 2, 7])
def test_a_jump_in_the_sequence_breaks_it(sequence: int) -> None:
    state = WorkerState()
    state.on_report(report(0))
    with pytest.raises(ChannelBroken, match=f"response {sequence} instead of 1"):
        state.on_report(report(sequence))


def test_another_worker_breaks_it() -> None:
    state = WorkerState()
    state.on_report(report(0))
    with pytest.raises(ChannelBroken, match="worker other instead of w"):
        state.on_report(report(1, worker="other"))


def test_a_batch_is_in_flight_until_a_report_counts_it() -> None:
    state = WorkerState()
    state.on_report(report(0))
    members = row("one"), row("two")
    send(state, "b", *members)
    state.on_report(report(1))
    assert state.capacity("name").waiting_tokens == 2
    state.on_report(report(2, running=2))
    assert state.unacknowledged.pop("b", ()) == members
    capacity = state.capacity("name")
    assert (capacity.waiting_tokens, capacity.free_slots) == (0, 6)
    assert state.unacknowledged.pop("b", ()) == ()
    state.on_report(report(3))
    assert state.capacity("name").idle


def test_failing_worker_is_probed_with_single_requests() -> None:
    breaker = WorkerBreaker()
    breaker.failed(10.0)
    assert breaker.requests_max(10.0) == math.inf
    for pause_s in (BREAK_S, 2 * BREAK_S, 4 * BREAK_S):
        breaker.failed(20.0)
        assert breaker.open_until == 20.0 + pause_s
        assert breaker.requests_max(20.0) == 0
        assert breaker.requests_max(breaker.open_until) == 1
    for _ in range(9):
        breaker.failed(20.0)
    assert breaker.open_until == 20.0 + BREAK_S_MAX
    breaker.succeeded()
    assert (breaker.open_until, breaker.requests_max(20.0)) == (0, math.inf)


def test_a_worker_on_trial_has_room_for_one_row() -> None:
    state = WorkerState()
    load = worker_pb2.WorkerLoad(slots=8, max_tasks=12, classes=[worker_pb2.ClassLoad()] * 3)
    state.on_report(worker_pb2.StepReport(worker="w", load=load, task_grants=[8] * 3))
    assert state.capacity("name", 0).free_slots == 0
    trial = state.capacity("name", 1)
    assert (trial.free_slots, [room.free_slots for room in trial.urgent]) == (1, [1, 1])
    send(state, "b", row("probe"))
    assert state.capacity("name", 1).free_slots == 0


def granting(rows: list[int], tokens: list[int], sequence: int = 0) -> worker_pb2.StepReport:
    """A report of a worker that computes bulk and preempts it; by class, what may have been sent in all."""
    load = worker_pb2.WorkerLoad(
        slots=8,
        running=8,
        waiting_tokens=115,
        classes=[worker_pb2.ClassLoad(waiting_tokens=n) for n in (5, 10, 100)],
    )
    return worker_pb2.StepReport(
        worker="w", sequence=sequence, ready=True, load=load, task_grants=rows, token_grants=tokens
    )


def test_a_class_has_what_is_granted_less_what_was_sent() -> None:
    state = WorkerState()
    state.on_report(granting([6, 5, 3], [600, 500, 300]))
    send(state, "b", row("a", prefill=7, cache=20), row("b", prefill=3, cache=30))
    capacity = state.capacity("name")
    assert (capacity.free_slots, capacity.free_tokens, capacity.waiting_tokens) == (1, 250, 125)
    assert capacity.urgent == [(4, 550, 15), (3, 450, 25)]


def test_a_grant_that_comes_late_or_twice_makes_no_room() -> None:
    state = WorkerState()
    state.on_report(granting([2, 2, 2], []))
    send(state, "b", row("a"), row("b"), row("c"))
    for sequence in (1, 2):
        state.on_report(granting([2, 2, 2], [], sequence))
        assert (free_slots(state), state.capacity("name").free_tokens) == (-1, math.inf)
    state.on_report(granting([4, 4, 4], [], 3))
    assert free_slots(state) == 1


def test_a_grant_that_does_not_tell_the_classes_apart_is_none() -> None:
    state = WorkerState()
    state.on_report(granting([9, 9], [1]))
    assert (free_slots(state), state.capacity("name").free_tokens) == (0, math.inf)
    state.on_report(granting([9, 9, 9, 9], [], 1))
    assert free_slots(state) == 0


def test_batches_of_all_batchers_run_in_a_worker() -> None:
    state = WorkerState()
    state.on_report(report(0))
    send(state, "b-1", row("a"))
    assert state.capacity("name").batches_running == 1, "on its way"
    later = report(1)
    later.load.batches = 3
    state.on_report(later)
    del state.unacknowledged["b-1"]
    assert state.capacity("name").batches_running == 3
