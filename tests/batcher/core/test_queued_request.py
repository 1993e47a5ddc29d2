from batcher.core.queued_request import QueuedRequest, batch_message
from batcher.core.scheduler.entry import Batch, BatchCause
from sluice.internal.v1 import task_pb2


def new_row(attempt: int = 0) -> QueuedRequest:
    return QueuedRequest(task_pb2.Task(request_id="r", attempt=attempt), now=10.0)


def test_the_deadline_counts_from_the_arrival() -> None:
    task = task_pb2.Task(request_id="r", timeout_ms=1500)
    assert QueuedRequest(task, now=10.0).deadline == 11.5
    assert new_row().deadline == float("inf")
    row = QueuedRequest(task, now=10.0)
    row.cache_tokens = 1
    row.waiting_since = 10.0
    batch = Batch[QueuedRequest]("w", BatchCause.FULL)
    batch.add(row)
    (message,) = batch_message(batch, "b", [""], 10.0003).tasks
    assert message.timeout_ms == 1500  # no part of a millisecond is cut


def test_what_its_gateway_knows_of_a_row_goes_into_the_order() -> None:
    assert not new_row().returned
    task = task_pb2.Task(request_id="r", attempt=3, age_ms=1500, charged_tokens=7)
    row = QueuedRequest(task, now=10.0)
    assert (row.attempt, row.returned, row.age_s, row.charged) == (3, True, 1.5, 7)
