"""What a job's items took of workers."""

import pytest

from jobs.core.work import SPANS_MAX, JobWork
from sluice.internal.v1.items_pb2 import ItemWork
from sluice.internal.v1.job_pb2 import MeshUse


def work(worker: str, computing_s: float, tokens: int = 0, cells: int = 0) -> list[ItemWork]:
    return [ItemWork(worker=worker, computing_ms=computing_s * 1e3, tokens=tokens, cells=cells)]


def use_of(*items: tuple[str, float, float]) -> MeshUse:
    """Items by worker, begin and end."""
    job = JobWork(MeshUse())
    for worker, begin, end in items:
        job.add(work(worker, end - begin), end)
    return job.use


def test_busy_time_unites_items_that_overlap() -> None:
    use = use_of(("w", 10, 12), ("w", 11, 13), ("w", 12, 13), ("w", 17, 18))
    assert (use.busy_s, use.worker_s) == (4, 8)


def test_busy_time_counts_an_item_around_others_once() -> None:
    use = use_of(("w", 11, 12), ("w", 13, 14), ("w", 10, 15))
    assert (use.busy_s, use.worker_s) == (5, 5)


def test_busy_time_adds_up_over_workers() -> None:
    use = use_of(("w", 10, 12), ("v", 11, 12), ("v", 14, 15))
    assert (use.busy_s, use.worker_s) == (4, 6)


def test_busy_time_keeps_a_bounded_number_of_spans() -> None:
    gaps = [("w", float(at), at + 0.5) for at in range(3 * SPANS_MAX)]
    use = use_of(*gaps, ("w", 0.0, float(3 * SPANS_MAX)))
    assert use.busy_s <= use.worker_s == 3 * SPANS_MAX
    assert use.busy_s >= SPANS_MAX


def test_worker_time_reaches_from_first_begin_to_last_end() -> None:
    gaps = [("w", 10.0 * at, 10.0 * at + 1) for at in range(SPANS_MAX + 16)]
    end = gaps[-1][2]
    assert use_of(*gaps, ("w", end - 20, end), ("w", 1, end + 1)).worker_s == end + 1


def test_padding_is_that_of_the_batches_of_the_items() -> None:
    job = JobWork(MeshUse(batch_tokens=60))
    # A batch of two rows of 10 and 30 tokens: 60 cells, a third of them padding.
    job.add(work("w", 1, tokens=10, cells=15), 1)
    job.add(work("w", 1, tokens=30, cells=45), 1)
    use = job.use
    assert (use.batch_tokens, use.padding_tokens) == (100, 20)


def test_use_continues_that_of_an_earlier_process() -> None:
    job = JobWork(MeshUse(busy_s=3, worker_s=4))
    job.add(work("w", 2), 10)
    use = job.use
    assert [use.busy_s, use.worker_s] == pytest.approx([5, 6])
