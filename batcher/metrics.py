"""What a batcher counts of its queues and batches, and what workers report of themselves.

Counting happens on the event loop, reading on other threads: messages that are read are replaced, never changed, and
collections are copied in one step. Counts of a worker begin again with it, as those of a process do.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from opentelemetry.trace import SpanContext

from batcher.core.requests import Requests
from batcher.core.row import Row
from batcher.core.scheduler.task import Batch
from batcher.core.workers import WorkerState
from batcher.spans import end_word
from sluice.internal.v1 import control_pb2, worker_pb2
from sluice.telemetry import catalog
from sluice.telemetry.catalog import Metric
from sluice.telemetry.registry import MetricRegistry, Point, Series

_BUCKETS: Final = len(catalog.STEP_SECONDS) + 1
_Total = Callable[[worker_pb2.WorkerLoad, worker_pb2.WorkerCounts], float]


@dataclass
class _Model:
    """One model.

    Attributes:
        names: of its workers.
        report: the last one.
    """

    names: Sequence[str]
    requests: Requests
    report: control_pb2.ModelReport = field(default_factory=control_pb2.ModelReport)

    @property
    def workers(self) -> dict[str, WorkerState]:
        """Those with a channel."""
        return self.requests.workers.known()


class BatcherMetrics:
    """The metrics of one batcher process."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._models: dict[str, _Model] = {}
        self._wait = registry.histogram(catalog.QUEUE_WAIT)
        self._batches = registry.counter(catalog.BATCHES)
        self._batch_rows = registry.counter(catalog.BATCH_ROWS)
        self._batch_tokens = registry.counter(catalog.BATCH_TOKENS)
        self._padding = registry.counter(catalog.PADDING_TOKENS)
        self._rows = registry.counter(catalog.ROWS)
        self._show(registry)

    def _show(self, registry: MetricRegistry) -> None:
        for metric, of_class in _CLASS_GAUGES:
            registry.observe(metric, partial(self._by_class, of_class))
        for metric, of_worker in _WORKER_GAUGES:
            registry.observe(metric, partial(self._by_worker, of_worker))
        registry.observe(catalog.WORKER_DRAINED, self._drained)
        registry.observe(catalog.OLDEST, self._ages)
        registry.observe(catalog.IN_FLIGHT, self._in_flight)
        registry.observe(catalog.STEP_TIME, self._steps)
        for metric, labels, of_counts in _TOTALS:
            registry.observe(metric, partial(self._totals, labels, of_counts))

    # Events.

    def serves(self, model: str, workers: Sequence[str], requests: Requests) -> None:
        """The batcher serves ``model`` with these workers, as it calls them, from now on or anew."""
        # Replaced, not changed: other threads read it.
        self._models = {**self._models, model: _Model(workers, requests)}

    def ended(self, model: str) -> None:
        """The batcher does not serve ``model`` any more."""
        self._models = {name: view for name, view in self._models.items() if name != model}

    def reported(self, report: control_pb2.ModelReport) -> None:
        """A model was reported; nobody changes ``report`` any more."""
        self._models[report.model].report = report

    def ended_row(self, row: Row) -> None:
        """A row has ended here, or was returned to its gateway."""
        self._rows[row.task.model, row.priority_class, end_word(row)] += 1

    def formed(self, batch: Batch[Row], span_of: Callable[[Row], SpanContext | None]) -> None:
        """A batch is sent; ``span_of`` a row leads to its trace."""
        model = batch.rows[0].task.model
        self._batches[model, batch.cause.value, batch.limit.value] += 1
        self._batch_tokens[model,] += batch.tokens
        self._padding[model,] += len(batch.rows) * batch.longest - batch.tokens
        for row in batch.rows:
            labels = model, row.priority_class
            self._batch_rows[labels] += 1
            self._wait.record(labels, row.waited_s, span_of(row))

    # Reading.

    def _by_class(self, value: Callable[[control_pb2.ClassReport], float]) -> Iterator[Point]:
        for model, view in self._models.items():
            for each in view.report.classes:
                yield (model, each.priority_class), value(each)

    def _by_worker(self, value: Callable[[WorkerState | None], float]) -> Iterator[Point]:
        for model, view in self._models.items():
            workers = view.workers
            for name in view.names:
                yield (model, name), value(workers.get(name))

    def _drained(self) -> Iterator[Point]:
        for model, view in self._models.items():
            for name in view.names:
                yield (model, name), int(name in view.requests.workers.drained)

    def _ages(self) -> Iterator[Point]:
        now = time.monotonic()
        for model, view in self._models.items():
            since = view.requests.queue.oldest()
            for each in view.report.classes:
                name = each.priority_class
                yield (model, name), max(0.0, now - since.get(name, now))

    def _in_flight(self) -> Iterator[Point]:
        for model, view in self._models.items():
            yield (model,), sum(len(worker.rows) for worker in view.workers.values())

    def _steps(self) -> Iterator[Point]:
        for labels, _, counts in self._counting():
            series = Series(_BUCKETS)
            series.counts = list(counts.step_buckets)
            series.total = counts.step_s
            yield labels, series

    def _totals(self, more: tuple[str, ...], value: _Total) -> Iterator[Point]:
        for labels, load, counts in self._counting():
            yield (*labels, *more), value(load, counts)

    def _counting(
        self,
    ) -> Iterator[tuple[tuple[str, str], worker_pb2.WorkerLoad, worker_pb2.WorkerCounts]]:
        """Model and name of each worker that has said what it has counted."""
        for model, view in self._models.items():
            for name, worker in view.workers.items():
                if worker.counts is not None and len(worker.counts.step_buckets) == _BUCKETS:
                    yield (model, name), worker.load, worker.counts


def _cache_share(worker: WorkerState | None) -> float:
    if worker is None or not worker.load.cache_blocks:
        return 0.0
    return 1 - worker.load.free_blocks / worker.load.cache_blocks


_CLASS_GAUGES: Final[Sequence[tuple[Metric, Callable[[control_pb2.ClassReport], float]]]] = (
    (catalog.QUEUED, lambda each: each.queued),
    (catalog.QUEUED_TOKENS, lambda each: each.queued_tokens),
    (
        catalog.EXPECTED_WAIT,
        lambda each: max([each.expected_wait_ms, *each.tenant_wait_ms.values()]) / 1e3,
    ),
)
_WORKER_GAUGES: Final[Sequence[tuple[Metric, Callable[[WorkerState | None], float]]]] = (
    (catalog.WORKER_LIVE, lambda worker: int(worker is not None and worker.live)),
    (catalog.WORKER_SLOTS, lambda worker: 0 if worker is None else worker.load.slots),
    (catalog.WORKER_RUNNING, lambda worker: 0 if worker is None else worker.load.running),
    (catalog.WORKER_WAITING, lambda worker: 0 if worker is None else worker.load.waiting),
    (catalog.WORKER_CACHE, _cache_share),
)
_TOTALS: Final[Sequence[tuple[Metric, tuple[str, ...], _Total]]] = (
    (catalog.STEP_ROWS, (), lambda _, counts: counts.step_rows),
    (catalog.WORKER_TOKENS, ("output",), lambda _, counts: counts.tokens),
    (catalog.WORKER_TOKENS, ("input",), lambda _, counts: counts.prompt_tokens),
    (catalog.PREFIX_HITS, (), lambda _, counts: counts.cached_tokens),
    (catalog.PREEMPTIONS, (), lambda load, _: load.preemptions),
    (catalog.DRAFTS, (), lambda load, _: load.drafted_tokens),
    (catalog.DRAFTS_ACCEPTED, (), lambda load, _: load.accepted_tokens),
)
"""Metrics of what a worker has counted, with more labels."""
