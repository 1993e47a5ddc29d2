import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.core.scheduler.capacity import Capacity, Usage
from batcher.core.scheduler.task import Batch, BatchCause, BatchLimit, QueuedTask

usages = st.lists(
    st.builds(Usage, st.integers(0, 40), st.integers(0, 900), st.integers(0, 900)),
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
    seen = Capacity("w", 0).with_preemption([Usage(count) for count in rows], slots, places)
    assert tuple(each.free_rows for each in seen.preemptible) == free


def test_tokens_of_less_urgent_rows_do_not_count() -> None:
    usages = [Usage(1, 10, 100), Usage(1, 20, 200), Usage(1, 40, 400)]
    seen = Capacity("w", 0, 50).with_preemption(usages, 8, 16).preemptible
    assert [(each.free_tokens, each.waiting_tokens) for each in seen] == [(650, 10), (450, 30)]


@given(usages=usages, slots=st.integers(1, 64), waiting=st.integers(0, 64))
def test_nobody_gets_more_than_there_is(usages: list[Usage], slots: int, waiting: int) -> None:
    places, taken = slots + waiting, sum(use.rows for use in usages)
    found = Capacity("w", 0).with_preemption(usages, slots, places).preemptible
    for rank, room in enumerate(found, start=1):
        kept = slots - sum(use.rows for use in usages[:rank]) - room.free_rows
        assert 0 <= room.free_rows <= max(0, places - taken)
        assert kept >= 1 or not room.free_rows
        assert sum(use.rows for use in usages[rank:]) > 1 or not room.free_rows
    assert found[0].free_rows >= found[1].free_rows


def batch_of(row: QueuedTask) -> Batch:
    return Batch(
        (row,),
        "w",
        BatchCause.FULL,
        BatchLimit.ALL_WAITING,
        tokens=30,
        cache_tokens=50,
        padding_share=0.0,
        longest_wait=row,
    )


def test_beside_a_row_that_is_to_be_alone_no_other_goes_to_its_worker() -> None:
    row = QueuedTask("r", "bulk", prompt_tokens=30)
    row.alone = True
    before = Capacity("w", 3, 100, preemptible=(Capacity("w", 5, 300),))
    after = before.after(batch_of(row))
    assert (after.free_rows, after.preemptible[0].free_rows) == (0, 0)
    assert Capacity("other", 3).after(batch_of(row)) == Capacity("other", 3)


def test_a_batch_on_its_way_counts() -> None:
    row = QueuedTask("r", "bulk", prompt_tokens=30)
    batch = batch_of(row)
    before = Capacity("w", 3, 100, 7, preemptible=(Capacity("w", 5, 300, 1),))
    after = before.after(batch)
    assert after == Capacity(
        "w", 2, 50, 37, batches_in_flight=1, preemptible=(after.preemptible[0],)
    )
    assert after.preemptible[0] == Capacity("w", 4, 250, 31, batches_in_flight=1)
    assert Capacity("other", 3).after(batch) == Capacity("other", 3)
