import itertools

import pytest

from batcher.core.row import Row, RowState
from sluice.internal.v1 import frame_pb2, task_pb2


def new_row(attempt: int = 0) -> Row:
    return Row(task_pb2.Task(request_id="r", attempt=attempt), now=10.0)


def test_the_deadline_counts_from_the_arrival() -> None:
    task = task_pb2.Task(request_id="r", timeout_ms=1500)
    assert Row(task, now=10.0).deadline == 11.5
    assert new_row().deadline == float("inf")
    row = Row(task, now=10.0)
    row.cache_tokens = 1
    assert row.message("", 10.0003).timeout_ms == 1500  # no part of a millisecond is cut


@pytest.mark.parametrize(("before", "after"), list(itertools.product(RowState, RowState)))
def test_a_row_only_moves_on(before: RowState, after: RowState) -> None:
    row = new_row()
    row.state = before
    if after > before:
        row.move(after, 11.0)
        assert row.state is after
    else:
        with pytest.raises(AssertionError):
            row.move(after, 11.0)


def test_timings_are_those_of_its_states() -> None:
    row = new_row()
    row.move(RowState.SENT, 11.0)
    row.move(RowState.RUNNING, 11.5)
    timings = row.timings(frame_pb2.RowTimings(prefill_ms=5, decode_ms=6))
    assert (timings.queue_ms, timings.batch_ms) == (1000, 500)
    assert (timings.prefill_ms, timings.decode_ms) == (5, 6)


def test_what_its_gateway_knows_of_a_row_goes_into_the_order() -> None:
    assert not new_row().returned
    task = task_pb2.Task(request_id="r", attempt=3, age_ms=1500, charged_tokens=7)
    row = Row(task, now=10.0)
    assert (row.attempt, row.returned, row.age_s, row.charged) == (3, True, 1.5, 7)
