"""The order of the queue, checked against a list that is sorted anew for every decision."""

from batcher.core.scheduler.capacity import Capacity
from batcher.core.scheduler.entry import QueueEntry
from batcher.core.scheduler.queue import Queue
from sluice.settings.batching import Policy
from tests.batcher.core.scheduler.kit import come_back


def taken(queue: Queue, now: float = 0.0, capacity: int = 100) -> list[str]:
    batch = queue.next_batch(now, [Capacity("w", capacity)]).batch
    return [row.request_id for row in batch.entries] if batch else []


def test_an_empty_queue_has_nothing_to_do_and_never_wakes() -> None:
    decision = Queue(Policy(max_rows=8)).next_batch(0.0, [Capacity("w", 8)])
    assert decision == (None, None)


def test_only_guessed_costs_are_estimated_again_on_take() -> None:
    queue = Queue(Policy())

    def add(name: str, answers: int, tokens: int) -> None:
        queue.add(QueueEntry(name, "bulk", prompt_tokens=10, max_tokens=100), 0.0)
        for number in range(answers):
            request_id = f"{name} {number}"
            queue.add(known := QueueEntry(request_id, "interactive", max_tokens=100), 0.0)
            assert taken(queue, capacity=1) == [request_id]
            queue.finish(known, tokens, 0.0)

    add("guessed", 50, 20)
    add("known", 50, 70)
    batch = queue.next_batch(0.0, [Capacity("w", 2)]).batch
    assert batch is not None
    guessed, known = (row.cache_tokens for row in batch.entries)
    assert known < 50 < guessed < 110


def test_batch_has_the_wait_of_each_request() -> None:
    queue = Queue(Policy(max_rows=8))
    queue.add(a := QueueEntry("a", "bulk"), 1.0)
    queue.next_batch(2.0, [Capacity("w", 1)])
    queue.add(QueueEntry("b", "bulk"), 3.0)
    come_back(queue, a, 0, 5.0)
    batch = queue.next_batch(6.0, [Capacity("w", 2)]).batch
    assert batch is not None
    assert [(row.request_id, row.waited_s) for row in batch.entries] == [("a", 1.0), ("b", 3.0)]
