import pytest

from model_workers.engine.protocol import Sampling, SequenceEnd
from model_workers.engine.sequences import Sequence
from tests.support.sequences import sequence_spec


def test_tokens_are_reported_behind_the_produced_ones() -> None:
    sequence = Sequence(sequence_spec("r", [1, 2], Sampling(max_tokens=4), produced=[7, 8]), 100)
    step = sequence.take((9,))
    assert (step.start_index, step.token_ids, step.end) == (2, (9,), None)
    assert sequence.take((9,)).end is SequenceEnd.LENGTH


def test_a_stop_token_is_reported_and_ends_the_row() -> None:
    sequence = Sequence(
        sequence_spec("r", [1], Sampling(max_tokens=4, stop_token_ids=frozenset({3}))), 100
    )
    step = sequence.take((3,))
    assert (step.token_ids, step.end) == ((3,), SequenceEnd.STOP)


def test_the_context_ends_a_row_before_max_tokens() -> None:
    sequence = Sequence(sequence_spec("r", [1, 2, 3], Sampling(max_tokens=50)), 5)
    assert sequence.take((9,)).end is None
    assert sequence.take((9,)).end is SequenceEnd.LENGTH


@pytest.mark.parametrize(
    ("produced", "end"), [([4, 4], SequenceEnd.LENGTH), ([3], SequenceEnd.STOP), ([4], None)]
)
def test_a_resumed_row_may_lack_nothing_but_its_end(
    produced: list[int], end: SequenceEnd | None
) -> None:
    sampling = Sampling(max_tokens=2, stop_token_ids=frozenset({3}))
    assert Sequence(sequence_spec("r", [1], sampling, produced=produced), 100).end_now(0.0) is end


def test_several_tokens_of_a_step_are_reported_together() -> None:
    sequence = Sequence(sequence_spec("r", [1, 2], Sampling(max_tokens=4)), 100)
    sequence.computed = 2
    assert sequence.take((7, 8)).token_ids == (7, 8)
    assert (sequence.pending, sequence.answered, sequence.room) == (2, 2, 2)


def test_cancel_goes_before_deadline() -> None:
    sequence = Sequence(sequence_spec("r", [1], deadline=5.0), 100)
    assert sequence.end_now(4.9) is None
    assert sequence.end_now(5.0) is SequenceEnd.DEADLINE
    sequence.cancelled = True
    assert sequence.end_now(5.0) is SequenceEnd.CANCELLED
