import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.core.window import DoneIndexes


@given(st.sets(st.integers(0, 60)))
def test_what_is_added_is_in_it_and_survives_a_checkpoint(indexes: set[int]) -> None:
    done = DoneIndexes()
    for index in sorted(indexes, key=lambda one: hash((one, 7))):
        done.add([index])
        done = DoneIndexes(done.low_water, done.ranges)

    assert {index for index in range(70) if index in done} == indexes
    assert done.is_whole == (indexes == set(range(len(indexes))))


def test_an_index_has_one_outcome_and_a_checkpoint_whole_ranges() -> None:
    done = DoneIndexes(2, [4, 6])
    for index in (0, 1, 4, 5):
        with pytest.raises(AssertionError, match=f"item {index} has an outcome already"):
            done.add([index])
    done.add([3, 6])
    assert (done.low_water, done.ranges, done.is_whole) == (2, [3, 7], False)
    with pytest.raises(ValueError, match="zip"):
        DoneIndexes(2, [4, 6, 8])


def test_the_mark_rises_over_what_was_done_early() -> None:
    done = DoneIndexes()

    done.add([1, 2, 5])
    assert (done.low_water, done.ranges) == (0, [1, 3, 5, 6])
    done.add([0])

    assert (done.low_water, done.ranges) == (3, [5, 6])
