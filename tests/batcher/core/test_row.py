import itertools

import pytest

from batcher.core.row import ATTEMPT_MAX, LEGAL, Row, RowState, checked_task
from sluice.internal.v1 import frame_pb2, task_pb2
from sluice.wire.attempts import next_task_attempt, task_attempt
from sluice.wire.codec import MalformedMessage


def new_row(attempt: int = 0) -> Row:
    return Row(task_pb2.Task(request_id="r", attempt=attempt), now=10.0)


def test_attempts_of_a_later_task_are_above_all_of_an_earlier_one() -> None:
    first = new_row()
    second = new_row(next_task_attempt(0))
    for _ in range(5000):
        first.next_attempt()
    assert (first.attempt, second.attempt) == (999, 1000)
    assert [task_attempt(row.attempt) for row in (first, second)] == [0, 1000]


def test_the_deadline_counts_from_the_arrival() -> None:
    task = task_pb2.Task(request_id="r", timeout_ms=1500)
    assert Row(task, now=10.0).deadline == 11.5
    assert new_row().deadline == float("inf")


def test_a_token_shows_that_the_row_does_not_kill_workers() -> None:
    row = new_row()
    row.next_attempt()
    row.extend([], [])
    assert row.no_progress == 1
    row.extend([7], [])
    assert row.no_progress == 0


@pytest.mark.parametrize(("before", "after"), list(itertools.product(RowState, RowState)))
def test_every_move_is_legal_or_caught(before: RowState, after: RowState) -> None:
    row = new_row()
    row.state = before
    if after in LEGAL[before]:
        row.move(after, 11.0)
        assert row.state is after
    else:
        with pytest.raises(AssertionError):
            row.move(after, 11.0)


def test_timings_add_up_over_all_sends() -> None:
    row = new_row()
    for state, now in (
        (RowState.SENT, 11.0),
        (RowState.RUNNING, 11.5),
        (RowState.WAITING, 20.0),
        (RowState.SENT, 22.0),
        (RowState.RUNNING, 22.25),
    ):
        row.move(state, now)
    timings = row.timings(frame_pb2.RowTimings(prefill_ms=5, decode_ms=6))
    assert (timings.queue_ms, timings.batch_ms) == (3000, 750)
    assert (timings.prefill_ms, timings.decode_ms) == (5, 6)


def test_an_attempt_from_which_nobody_can_count_on_is_no_task() -> None:
    task = task_pb2.Task(
        request_id="r",
        gateway="g",
        priority_class="bulk",
        prompt_token_ids=[1],
        attempt=ATTEMPT_MAX,
    )
    task.sampling.max_tokens = 1
    row = Row(checked_task(task.SerializeToString()), now=10.0)
    row.cache_tokens = 2
    for _ in range(5000):
        row.next_attempt()
    assert row.message("", 10.0).attempt == row.attempt
    task.attempt += 1
    with pytest.raises(MalformedMessage, match="attempt"):
        checked_task(task.SerializeToString())
