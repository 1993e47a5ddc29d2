from batcher.core.scheduler.capacity import Capacity, Room
from batcher.core.scheduler.task import Batch, BatchCause, BatchLimit, QueuedTask


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


def test_a_batch_on_its_way_counts() -> None:
    row = QueuedTask("r", "bulk", prompt_tokens=30)
    batch = batch_of(row)
    before = Capacity("w", 3, 100, 7, urgent=[Room(5, 300, 1)])
    after = before.after(batch)
    assert after == Capacity("w", 2, 50, 37, batches_in_flight=1, urgent=[Room(4, 250, 31)])
    assert Capacity("other", 3).after(batch) == Capacity("other", 3)
