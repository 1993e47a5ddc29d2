"""Load on the batcher's queue alone: decisions per second, and how well its batches are filled."""

import time
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, islice
from random import Random
from typing import Final

from batcher.core.scheduler import Capacity, Queue, QueuedTask
from simulator.arrivals import Lognormal
from sluice.settings.batching import Policy
from sluice.wire.subjects import CLASSES

TENANTS: Final = 20
LENGTHS: Final = Lognormal(200, 1.0, 4096)
BATCH_ROWS: Final = 32


def tasks(count: int, seed: int) -> list[QueuedTask]:
    """Tasks of all classes, of many tenants, half of them with a deadline far off."""
    chance = Random(seed)
    return [
        QueuedTask(
            request_id=f"{seed}-{number}",
            priority_class=chance.choice(CLASSES),
            deadline=1e6 + chance.random() * 1e6 if chance.random() < 0.5 else float("inf"),
            tenant=f"tenant-{chance.randrange(TENANTS)}",
            workload="bench",
            prompt_tokens=LENGTHS.draw(chance),
            max_tokens=chance.randint(8, 256),
        )
        for number in range(count)
    ]


def capacity(free_rows: int) -> Capacity:
    """A worker with room."""
    return Capacity("w0", free_rows=free_rows)


class CoreLoad:
    """A queue that is kept at one length: as many tasks come as go."""

    def __init__(self, policy: Policy, queued: int, seed: int) -> None:
        self._queue = Queue(policy)
        self._seed = seed
        self._now = 0.0
        for task in tasks(queued, seed):
            self._now += 1e-5
            self._queue.add(task, self._now)

    def decisions_per_s(self, decisions: int, rows: int) -> float:
        """Tasks that were handed out in batches of at most ``rows``, and as many added, a second of processor time.

        What it takes to finish them is not counted.
        """
        coming = iter(tasks(decisions + rows, self._seed + 1_000_000))
        self._seed += 1
        worker, queued, handed_out, spent_s = capacity(rows), len(self._queue), 0, 0.0
        while handed_out < decisions:
            begun = time.process_time()
            batch = self._queue.next_batch(self._now, [worker]).batch
            assert batch is not None
            for task in islice(coming, len(batch.rows)):
                self._queue.add(task, self._now)
            spent_s += time.process_time() - begun
            handed_out += len(batch.rows)
            self._now += 0.001
            for row in batch.rows:
                self._queue.finish(row.request_id, 16, self._now)
        assert len(self._queue) == queued
        return handed_out / spent_s


class HeapLoad:
    """The peer: a bare heap of the same tasks, by class and order of arrival, kept at one length."""

    def __init__(self, queued: int, seed: int) -> None:
        self._seed = seed
        self._numbers = count()
        self._heap = [self._entry(task) for task in tasks(queued, seed)]
        heapify(self._heap)

    def decisions_per_s(self, decisions: int) -> float:
        """Tasks that were added and taken, one by one, a second of processor time."""
        coming = tasks(decisions, self._seed + 1_000_000)
        self._seed += 1
        begun = time.process_time()
        for task in coming:
            heappush(self._heap, self._entry(task))
            heappop(self._heap)
        return decisions / (time.process_time() - begun)

    def _entry(self, task: QueuedTask) -> tuple[int, int, QueuedTask]:
        return CLASSES.index(task.priority_class), next(self._numbers), task


@dataclass(frozen=True)
class Filling:
    """How well batches were filled, tokens of prompts over rows times the longest, and how many rows they had."""

    efficiency: float
    rows: float


def filling(policy: Policy, count: int, seed: int) -> Filling:
    """Drains a backlog of ``count`` tasks of one class into a worker of `BATCH_ROWS`."""
    queue, chance = Queue(policy), Random(seed)
    for number in range(count):
        prompt = LENGTHS.draw(chance)
        queue.add(QueuedTask(str(number), "bulk", prompt_tokens=prompt, max_tokens=16), 0.0)
    now, batches, cells, filled = 0.0, 0, 0, 0
    while len(queue):
        batch = queue.next_batch(now, [capacity(BATCH_ROWS)]).batch
        now += 1.0
        if batch is None:
            continue
        lengths = [row.prefill_tokens for row in batch.rows]
        batches += 1
        cells += len(lengths) * max(lengths)
        filled += sum(lengths)
        for row in batch.rows:
            queue.finish(row.request_id, 16, now)
    return Filling(filled / cells, count / batches)
