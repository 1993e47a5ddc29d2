"""What a batcher counts of its queues and batches, and what workers report of themselves.

Counting happens on the event loop, reading on other threads: messages that are read are replaced, never changed, and
collections are copied in one step. Counts of a worker begin again with it, as those of a process do.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from sluice.telemetry.instruments import Instruments, Labels, Point, Reported

_BUCKETS: Final = len(catalog.STEP_SECONDS) + 1


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


_Points = Callable[[_Model], Iterable[Point]]
"""The points of one model, without its name."""


class BatcherMetrics:
    """The metrics of one batcher process."""

    def __init__(self, instruments: Instruments) -> None:
        self._models: dict[str, _Model] = {}
        self._wait = instruments.histogram(catalog.QUEUE_WAIT)
        self._batches = instruments.counter(catalog.BATCHES)
        self._batch_rows = instruments.counter(catalog.BATCH_ROWS)
        self._batch_tokens = instruments.counter(catalog.BATCH_TOKENS)
        self._padding = instruments.counter(catalog.PADDING_TOKENS)
        self._rows = instruments.counter(catalog.ROWS)
        for metric, points in _READERS:
            instruments.observe(metric, partial(self._read, points))
        instruments.report(catalog.STEP_TIME, self._steps)

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
        self._batches[model, batch.cause, batch.limit] += 1
        self._batch_tokens[model,] += batch.tokens
        self._padding[model,] += len(batch.rows) * batch.longest - batch.tokens
        for row in batch.rows:
            labels = model, row.priority_class
            self._batch_rows[labels] += 1
            self._wait.record(labels, row.waited_s, span_of(row))

    def _steps(self) -> Iterator[tuple[Labels, Reported]]:
        for model, view in self._models.items():
            for name, worker in view.workers.items():
                counts = worker.counts
                if counts is not None and len(counts.step_buckets) == _BUCKETS:
                    bounds = counts.shortest_step_s, counts.longest_step_s
                    yield (model, name), Reported(counts.step_buckets, counts.step_s, *bounds)

    def _read(self, points: _Points) -> Iterator[Point]:
        for model, view in self._models.items():
            for labels, value in points(view):
                yield (model, *labels), value


def _by_class(value: Callable[[control_pb2.ClassReport], float]) -> _Points:
    return lambda view: [((each.priority_class,), value(each)) for each in view.report.classes]


def _ages(view: _Model) -> Iterator[Point]:
    now, since = time.monotonic(), view.requests.queue.oldest()
    for each in view.report.classes:
        yield (each.priority_class,), max(0.0, now - since.get(each.priority_class, now))


def _by_worker(value: Callable[[WorkerState | None], float]) -> _Points:
    def points(view: _Model) -> Iterator[Point]:
        workers = view.workers
        for name in view.names:
            yield (name,), value(workers.get(name))

    return points


def _counted(
    value: Callable[[worker_pb2.WorkerLoad, worker_pb2.WorkerCounts], float],
    more: tuple[str, ...] = (),
) -> _Points:
    """Of each worker that has said what it has counted; ``more`` labels."""

    def points(view: _Model) -> Iterator[Point]:
        for name, worker in view.workers.items():
            if worker.counts is not None and len(worker.counts.step_buckets) == _BUCKETS:
                yield (name, *more), value(worker.load, worker.counts)

    return points


def _cache_share(worker: WorkerState | None) -> float:
    if worker is None or not worker.load.cache_blocks:
        return 0.0
    return 1 - worker.load.free_blocks / worker.load.cache_blocks


_READERS: Final[Sequence[tuple[Metric, _Points]]] = (
    (catalog.QUEUED, _by_class(lambda each: each.queued)),
    (catalog.QUEUED_TOKENS, _by_class(lambda each: each.queued_tokens)),
    (
        catalog.EXPECTED_WAIT,
        _by_class(
            lambda each: max([each.expected_wait_ms, *each.tenant_wait_ms.values()]) / 1e3,
        ),
    ),
    (catalog.OLDEST, _ages),
    (
        catalog.IN_FLIGHT,
        lambda view: [((), sum(len(worker.rows) for worker in view.workers.values()))],
    ),
    (
        catalog.WORKER_DRAINED,
        lambda view: [((name,), int(name in view.requests.workers.drained)) for name in view.names],
    ),
    (catalog.WORKER_LIVE, _by_worker(lambda worker: int(worker is not None and worker.serves))),
    (catalog.WORKER_SLOTS, _by_worker(lambda worker: worker.load.slots if worker else 0)),
    (catalog.WORKER_RUNNING, _by_worker(lambda worker: worker.load.running if worker else 0)),
    (catalog.WORKER_WAITING, _by_worker(lambda worker: worker.load.waiting if worker else 0)),
    (catalog.WORKER_CACHE, _by_worker(_cache_share)),
    (catalog.STEP_ROWS, _counted(lambda _, counts: counts.step_tasks)),
    (catalog.WORKER_TOKENS, _counted(lambda _, counts: counts.tokens, ("output",))),
    (catalog.WORKER_TOKENS, _counted(lambda _, counts: counts.prompt_tokens, ("input",))),
    (catalog.PREFIX_HITS, _counted(lambda _, counts: counts.cached_tokens)),
    (catalog.PREEMPTIONS, _counted(lambda load, _: load.preemptions)),
    (catalog.DRAFTS, _counted(lambda load, _: load.drafted_tokens)),
    (catalog.DRAFTS_ACCEPTED, _counted(lambda load, _: load.accepted_tokens)),
)
