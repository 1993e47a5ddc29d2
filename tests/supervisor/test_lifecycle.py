import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.lifecycle import (
    BACKOFF_MAX_S,
    BACKOFF_MIN_S,
    MOVES,
    STEADY_S,
    Lifecycle,
    Phase,
)


def crash(life: Lifecycle, now: float, up_s: float = 0.0) -> float:
    life.started(now)
    return life.exited(now + up_s)


def test_first_restart_is_at_once_and_later_waits_double() -> None:
    life = Lifecycle()
    waits = [crash(life, now=float(i)) for i in range(9)]
    assert waits == [0.0, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert life.restarts == 8


def test_a_steady_run_resets_the_wait() -> None:
    life = Lifecycle()
    for i in range(5):
        crash(life, now=float(i))
    assert crash(life, now=100.0, up_s=STEADY_S) == 0.0
    assert crash(life, now=200.0, up_s=STEADY_S - 0.01) == BACKOFF_MIN_S


def test_a_process_that_cannot_be_started_waits_longer_each_time() -> None:
    life = Lifecycle()
    life.started(0.0)
    assert [life.exited(1.0), life.exited(2.0), life.exited(3.0)] == [0.0, 0.2, 0.4]
    assert life.restarts == 0


def test_stop_while_running_and_while_waiting() -> None:
    running, waiting = Lifecycle(), Lifecycle()
    running.started(0.0)
    running.stop()
    assert running.phase is Phase.STOPPING
    running.stopped()
    crash(waiting, 0.0)
    waiting.stop()
    assert running.phase is waiting.phase is Phase.STOPPED
    waiting.stop()
    assert waiting.phase is Phase.STOPPED


def test_nothing_follows_the_end() -> None:
    life = Lifecycle()
    life.stop()
    with pytest.raises(AssertionError):
        life.started(1.0)


RUNS = st.lists(st.floats(min_value=0, max_value=30), max_size=60)


def waits_after(runs: list[float]) -> list[float]:
    """The wait after each run of so many seconds."""
    life, now, waits = Lifecycle(), 0.0, []
    for up_s in runs:
        waits.append(crash(life, now, up_s))
        now += up_s + waits[-1]
    return waits


@given(RUNS)
def test_only_what_ends_young_waits_and_ever_longer(runs: list[float]) -> None:
    before = None
    for up_s, wait_s in zip(runs, waits_after(runs), strict=True):
        if before is None or up_s >= STEADY_S:
            assert wait_s == 0.0
        else:
            assert wait_s == min(BACKOFF_MAX_S, max(BACKOFF_MIN_S, 2 * before))
        before = wait_s


@given(RUNS)
def test_in_the_long_run_there_is_less_than_a_start_a_second(runs: list[float]) -> None:
    assert len(runs) <= 6 + sum(runs) + sum(waits_after(runs))


def test_every_phase_has_its_moves() -> None:
    assert set(MOVES) == set(Phase)
