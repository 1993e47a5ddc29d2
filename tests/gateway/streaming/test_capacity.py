"""Runs wait in the gateway while no batcher has capacity; what a batcher grants is neither made nor lost."""

from collections import Counter

import pytest

from gateway.streaming.capacity import BatcherCapacity
from gateway.streaming.dispatch import NO_BATCHER_S, Dispatch
from gateway.streaming.model_run import ModelRun
from sluice.internal.v1.frame_pb2 import TaskRef
from tests.gateway.kit.runs import Batchers, new_run
from tests.gateway.streaming.test_dispatch import STALL_S, given_back

RUNS = 4


class Door:
    """A gateway that sends many runs, and its batchers."""

    def __init__(self, *batchers: str, runs: float = RUNS, task_bytes: float = 1e9) -> None:
        self.batchers = Batchers(*(batchers or ("b1",)))
        self.batchers.capacity = BatcherCapacity(runs, task_bytes)
        self.dispatch = Dispatch("g", self.batchers, STALL_S, lambda _: None)
        self.now = 100.0
        self.failed: list[str] = []
        self._numbers = 0

    def send(self, count: int, tenant: str = "a", priority_class: str = "bulk") -> list[ModelRun]:
        runs = []
        for _ in range(count):
            self._numbers += 1
            run = new_run(
                f"r{self._numbers}",
                stall_s=STALL_S,
                deadline=self.now + 1e4,
                priority_class=priority_class,
                tenant=tenant,
            )
            self.dispatch.send(run, self.now)
            runs.append(run)
        return runs

    def sent(self) -> list[ModelRun]:
        return [run for _, run in self.dispatch.drain(self.now).tasks]

    def frame(self, run: ModelRun) -> None:
        """Its batcher sends a frame of the run."""
        assert self.dispatch.accepts(run.batcher, run.run_id, run.attempt_number, self.now)

    def given(self, running: list[ModelRun]) -> Counter[str]:
        """The tenants of the next 300 runs that are sent, each when the first of `running` has begun."""
        running, given = list(running), Counter[str]()
        for _ in range(300):
            self.frame(running.pop(0))
            running += (more := self.sent())
            given.update(run.task.tenant for run in more)
        return given

    def let_pass(self, seconds: float) -> None:
        """Half a second after the other; runs at the batcher are not what this is about."""
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            self.dispatch.restart(self.now)
            self.dispatch.tick(self.now)
            self.failed += [run.run_id for run, _ in self.dispatch.take_failed()]

    @property
    def queued(self) -> int:
        return sum(self.dispatch.queued.values())


def test_runs_beyond_the_capacity_leave_in_order_with_frames() -> None:
    door = Door()
    runs = door.send(10)
    assert (door.sent(), door.queued) == (runs[:RUNS], 6)
    for number in range(6):
        door.dispatch.accepts("b1", runs[number].run_id, 0, door.now, waits=True)
        assert door.sent() == [], "accepted is not begun"
        door.frame(runs[number])
        door.frame(runs[number])
        assert door.sent() == [runs[RUNS + number]]
    assert door.queued == 0


def test_released_run_returns_capacity_or_leaves_the_queue() -> None:
    door = Door()
    runs = door.send(7)
    door.sent()
    door.dispatch.release(runs[4])
    door.dispatch.release(runs[0])
    assert door.sent() == [runs[5]]


def test_interactive_runs_never_wait_and_classes_are_apart() -> None:
    door = Door(runs=0)
    runs = door.send(20, priority_class="interactive")
    assert door.sent() == runs
    door = Door()
    door.send(RUNS)
    assert len(door.send(RUNS, priority_class="standard")) == len(door.sent()) - RUNS


def test_capacity_is_bytes_too_and_a_large_run_goes_alone() -> None:
    (run,) = Door(task_bytes=1).send(1)
    assert run.batcher
    door = Door(task_bytes=2 * run.task_bytes)
    runs = door.send(3)
    assert door.sent() == runs[:2]


def test_each_batcher_has_its_capacity() -> None:
    door = Door("b1", "b2")
    runs = door.send(3 * RUNS)
    assert len(door.sent()) == 2 * RUNS
    assert Counter(run.batcher for run in runs) == {"b1": RUNS, "b2": RUNS, "": RUNS}


@pytest.mark.parametrize("weights", [{}, {"late": 3.0}])
def test_late_tenant_has_its_share_at_once_and_then_turns(weights: dict[str, float]) -> None:
    door = Door(runs=40)
    door.dispatch.use_weights(weights)
    many = door.send(400, "many")
    assert len(door.sent()) == 40
    late = door.send(400, "late")
    share = weights.get("late", 1.0) / (1 + weights.get("late", 1.0))
    begun = door.sent()
    assert set(begun) <= set(late)
    assert len(begun) == round(40 * share), "on top of what the other uses"
    # From now on what is freed is shared.
    given = door.given([*many[:40], *begun])
    assert given["late"] / given.total() == pytest.approx(share, abs=0.1)


def test_other_weights_hold_for_runs_that_wait() -> None:
    door = Door(runs=40)
    running = door.send(500, "many")[:40]
    running += door.send(500, "late")[:20]
    door.sent()
    door.dispatch.use_weights({"late": 3.0})
    given = door.given(running)
    assert given["late"] / given.total() == pytest.approx(0.75, abs=0.1)


def test_lost_run_needs_no_capacity_and_keeps_its_turn() -> None:
    door = Door("b1", "b2")
    runs = door.send(4 * RUNS)
    door.sent()
    lost = [run for run in runs if run.batcher == "b1"]
    for run in lost:
        door.dispatch.accepts("b1", run.run_id, 0, door.now, waits=True)
    door.dispatch.lose_batcher("b1", door.now)
    assert door.sent() == lost
    assert {run.batcher for run in lost} == {"b2"}
    door.now += 0.1
    door.dispatch.tick(door.now)
    assert door.sent() == [], "b2 has more than its capacity"


def test_run_waits_a_stated_time_for_a_batcher_only() -> None:
    door = Door()
    door.send(RUNS + 1)
    door.let_pass(1.5 * NO_BATCHER_S)
    assert (door.failed, door.queued) == ([], 1), "a full batcher is waited for"
    door.batchers.names = ()
    door.let_pass(NO_BATCHER_S + 1)
    assert door.failed == [f"r{RUNS + 1}"]


def test_time_without_a_batcher_is_counted_anew() -> None:
    door = Door()
    door.send(RUNS + 1)
    for names in ((), ("b1",), ()):
        door.batchers.names = names
        door.let_pass(0.75 * NO_BATCHER_S)
        assert (door.failed, door.queued) == ([], 1)


def test_runs_sent_before_go_before_others_of_their_tenant() -> None:
    door = Door()
    first, second, third, *_ = door.send(RUNS)
    (new,) = door.send(1)
    door.sent()
    door.batchers.names = ()
    for run in (first, second):
        door.dispatch.take_returned("b1", given_back(run), door.now)
    door.dispatch.release(first)
    door.dispatch.take_returned("b1", given_back(third), door.now)
    door.batchers.names, door.batchers.capacity = ("b1",), BatcherCapacity(9, 1e9)
    door.dispatch.tick(door.now)
    assert door.sent() == [second, third, new]


def test_lost_late_and_doubled_messages_make_no_capacity() -> None:
    door = Door()
    runs = door.send(3 * RUNS)
    door.sent()
    for _ in range(3):
        door.frame(runs[0])
    door.dispatch.take_unknown("b1", [TaskRef(request_id=runs[1].run_id)], door.now)
    assert door.sent() == [runs[1], runs[RUNS]]
    assert len([run for run in runs if run.capacity_at]) == RUNS
