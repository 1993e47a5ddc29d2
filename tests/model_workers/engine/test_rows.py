import itertools

import pytest

from model_workers.engine.protocol import RowEnd, Sampling
from model_workers.engine.rows import MOVES, Row, RowState
from tests.support.rows import row_spec


@pytest.mark.parametrize(("source", "target"), list(itertools.product(RowState, RowState)))
def test_only_legal_moves(source: RowState, target: RowState) -> None:
    row = Row(row_spec("r", [1]), 100)
    row.state = source
    if target in MOVES[source]:
        row.move(target)
        assert row.state is target
    else:
        with pytest.raises(AssertionError):
            row.move(target)


def test_tokens_are_reported_behind_the_produced_ones() -> None:
    row = Row(row_spec("r", [1, 2], Sampling(max_tokens=4), produced=[7, 8]), 100)
    step = row.take((9,))
    assert (step.start_index, step.token_ids, step.end) == (2, (9,), None)
    assert row.take((9,)).end is RowEnd.LENGTH


def test_a_stop_token_is_reported_and_ends_the_row() -> None:
    row = Row(row_spec("r", [1], Sampling(max_tokens=4, stop_token_ids=frozenset({3}))), 100)
    step = row.take((3,))
    assert (step.token_ids, step.end) == ((3,), RowEnd.STOP)


def test_the_context_ends_a_row_before_max_tokens() -> None:
    row = Row(row_spec("r", [1, 2, 3], Sampling(max_tokens=50)), 5)
    assert row.take((9,)).end is None
    assert row.take((9,)).end is RowEnd.LENGTH


@pytest.mark.parametrize(
    ("produced", "end"), [([4, 4], RowEnd.LENGTH), ([3], RowEnd.STOP), ([4], None)]
)
def test_a_resumed_row_may_lack_nothing_but_its_end(
    produced: list[int], end: RowEnd | None
) -> None:
    sampling = Sampling(max_tokens=2, stop_token_ids=frozenset({3}))
    assert Row(row_spec("r", [1], sampling, produced=produced), 100).end_now(0.0) is end


def test_several_tokens_are_reported_together_and_are_still_to_be_computed() -> None:
    row = Row(row_spec("r", [1, 2], Sampling(max_tokens=4)), 100)
    row.computed = 2
    assert row.take((7, 8)).token_ids == (7, 8)
    assert (row.pending, row.answered, row.room) == (2, 2, 2)


def test_cancel_goes_before_deadline() -> None:
    row = Row(row_spec("r", [1], deadline=5.0), 100)
    assert row.end_now(4.9) is None
    assert row.end_now(5.0) is RowEnd.DEADLINE
    row.cancelled = True
    assert row.end_now(5.0) is RowEnd.CANCELLED
