import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.core.batches import Batch, BatchCause, BatchLimit, BatchRow
from batcher.core.rooms import Room, Use, rooms

uses = st.lists(
    st.builds(Use, st.integers(0, 40), st.integers(0, 900), st.integers(0, 900)),
    min_size=3,
    max_size=3,
)


@pytest.mark.parametrize(
    ("rows", "slots", "places", "free"),
    [
        ((0, 0, 0), 16, 48, (0, 0)),
        ((0, 0, 16), 16, 48, (15, 15)),  # one slot stays with bulk
        ((4, 6, 6), 16, 48, (11, 5)),
        ((4, 12, 0), 16, 48, (11, 0)),
        ((16, 0, 9), 16, 48, (0, 0)),
        ((0, 0, 46), 16, 48, (2, 2)),  # as many places are left
        ((0, 0, 32), 32, 64, (30, 30)),
        ((0, 0, 1), 1, 33, (0, 0)),  # a single slot is never taken
    ],
)
def test_slots_that_less_urgent_rows_give(
    rows: tuple[int, ...], slots: int, places: int, free: tuple[int, int]
) -> None:
    found = rooms([Use(count) for count in rows], slots, places, math.inf)
    assert tuple(room.free_rows for room in found) == free


def test_tokens_of_less_urgent_rows_do_not_count() -> None:
    seen = rooms([Use(1, 10, 100), Use(1, 20, 200), Use(1, 40, 400)], 8, 16, 50)
    assert [(room.free_tokens, room.waiting_tokens) for room in seen] == [(650, 10), (450, 30)]


@given(uses=uses, slots=st.integers(1, 64), waiting=st.integers(0, 64))
def test_nobody_gets_more_than_there_is(uses: list[Use], slots: int, waiting: int) -> None:
    places, taken = slots + waiting, sum(use.rows for use in uses)
    found = rooms(uses, slots, places, math.inf)
    for rank, room in enumerate(found, start=1):
        kept = slots - sum(use.rows for use in uses[:rank]) - room.free_rows
        assert 0 <= room.free_rows <= max(0, places - taken)
        assert kept >= 1 or not room.free_rows
        assert sum(use.rows for use in uses[rank:]) > 1 or not room.free_rows
    assert found[0].free_rows >= found[1].free_rows


def test_a_batch_on_its_way_counts() -> None:
    batch = Batch(
        (BatchRow("r", 0.0, 30, 50),),
        "w",
        BatchCause.FULL,
        BatchLimit.ALL_WAITING,
        tokens=30,
        cache_tokens=50,
        padding_share=0.0,
        longest_wait=BatchRow("r", 0.0, 30, 50),
    )
    assert Room(3, 100, 7).after(batch) == Room(2, 50, 37)
