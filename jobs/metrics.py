"""What a process of jobs counts: outcomes of items, its window, and how long ago it wrote the records of its jobs."""

import time
from collections.abc import Collection, MutableMapping
from typing import Final, Protocol

from sluice.internal.v1.job_pb2 import ItemOutcome
from sluice.telemetry import catalog
from sluice.telemetry.registry import Labels, MetricRegistry


class RunningJob(Protocol):
    """A job that the process runs."""

    @property
    def concurrency(self) -> int:
        """Items that it may have in flight."""

    @property
    def in_flight(self) -> int:
        """Items that it has sent and that are not answered."""

    @property
    def beat_at(self) -> float:
        """When its record was written last, monotonic seconds."""


class JobMetrics:
    """The metrics of one process; gauges are read on other threads."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._registry: Final = registry
        self._items: MutableMapping[Labels, float] = registry.counter(catalog.JOB_ITEMS)

    def show(self, jobs: Collection[RunningJob]) -> None:
        """``jobs``: those that run, whenever it is read."""
        observe = self._registry.observe
        observe(catalog.JOBS_RUNNING, lambda: [((), len(jobs))])
        observe(catalog.JOB_WINDOW, lambda: [((), sum(one.concurrency for one in list(jobs)))])
        observe(catalog.JOB_IN_FLIGHT, lambda: [((), sum(one.in_flight for one in list(jobs)))])
        observe(catalog.OLDEST_LEASE, lambda: [((), _oldest_s(list(jobs)))])

    def settled(self, outcome: ItemOutcome) -> None:
        """An item has an outcome."""
        if outcome.result.HasField("error"):
            word = "dead"
        else:
            word = "deduplicated" if outcome.result.answer.deduplicated else "succeeded"
        self._items[word,] += 1


def _oldest_s(jobs: Collection[RunningJob]) -> float:
    now = time.monotonic()
    return max((now - one.beat_at for one in jobs), default=0.0)
