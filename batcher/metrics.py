"""Metrics of a batcher: its queues and batches, and what workers report of themselves.

The event loop counts, other threads read: messages that are read are replaced, never changed, and
collections are copied in one step. Counts of a worker restart with it, like those of any process.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from opentelemetry.trace import SpanContext

from batcher.core.queued_request import QueuedRequest
from batcher.core.requests import RequestTable
from batcher.core.scheduler.entry import Batch
from batcher.core.workers import WorkerState
from batcher.spans import end_word
from sluice.internal.v1 import control_pb2, worker_pb2
from sluice.telemetry.catalog import METRICS
from sluice.telemetry.instruments import Instruments, Labels, Point, Reported

_BUCKETS: Final = len(METRICS["sluice.worker.step.duration"].bounds) + 1
_ABSENT: Final = WorkerState()
"""In place of a worker without a channel."""


@dataclass
class _Model:
    """One model.

    Attributes:
        names: names of its workers.
        report: the last report.
    """

    names: Sequence[str]
    table: RequestTable
    report: control_pb2.ModelReport = field(default_factory=control_pb2.ModelReport)

    @property
    def workers(self) -> dict[str, WorkerState]:
        """Workers with a channel."""
        return dict(self.table.workers.states)

    def counted(self) -> Iterator[tuple[str, worker_pb2.WorkerLoad, worker_pb2.WorkerCounts]]:
        """Yield the name, load and counts of each worker that has reported counts."""
        for name, worker in self.workers.items():
            if worker.counts is not None and len(worker.counts.step_buckets) == _BUCKETS:
                yield name, worker.load, worker.counts


_Points = Callable[[_Model], Iterable[Point]]
"""Returns the points of one model, without its name."""


class BatcherMetrics:
    """Metrics of one batcher process."""

    def __init__(self, instruments: Instruments) -> None:
        self._models: dict[str, _Model] = {}
        self._wait = instruments.histogram("sluice.queue.wait")
        self._batches = instruments.counter("sluice.batches")
        self._batch_requests = instruments.counter("sluice.batch.rows")
        self._batch_tokens = instruments.counter("sluice.batch.tokens")
        self._padding = instruments.counter("sluice.batch.padding")
        self._ended = instruments.counter("sluice.rows")
        for metric, points in _READERS:
            instruments.observe(metric, partial(self._read, points))
        instruments.report("sluice.worker.step.duration", self._steps)

    # Events.

    def on_model(self, model: str, workers: Sequence[str], table: RequestTable) -> None:
        """Start to count a model, or start anew after its loop was replaced."""
        # Replaced, not changed: other threads read it.
        self._models = {**self._models, model: _Model(workers, table)}

    def on_model_stopped(self, model: str) -> None:
        """Forget a model that is no longer served."""
        self._models = {name: view for name, view in self._models.items() if name != model}

    def on_report(self, report: control_pb2.ModelReport) -> None:
        """Record a report of a model; the caller must not change it afterwards."""
        self._models[report.model].report = report

    def on_ended(self, request: QueuedRequest) -> None:
        """Count a request that has ended here, was returned to its gateway, or was superseded."""
        self._ended[request.task.model, request.priority_class, end_word(request)] += 1

    def on_batch(
        self, batch: Batch[QueuedRequest], span_of: Callable[[QueuedRequest], SpanContext | None]
    ) -> None:
        """Count a batch that is sent; `span_of` returns the span that leads to the trace of a request."""
        model = batch.entries[0].task.model
        self._batches[model, batch.cause, batch.limit] += 1
        self._batch_tokens[model,] += batch.tokens
        self._padding[model,] += len(batch.entries) * batch.longest - batch.tokens
        for request in batch.entries:
            labels = model, request.priority_class
            self._batch_requests[labels] += 1
            self._wait.record(labels, request.waited_s, span_of(request))

    def _steps(self) -> Iterator[tuple[Labels, Reported]]:
        for model, view in self._models.items():
            for name, _, counts in view.counted():
                bounds = counts.shortest_step_s, counts.longest_step_s
                yield (model, name), Reported(counts.step_buckets, counts.step_s, *bounds)

    def _read(self, points: _Points) -> Iterator[Point]:
        for model, view in self._models.items():
            for labels, value in points(view):
                yield (model, *labels), value


def _by_class(value: Callable[[control_pb2.ClassReport], float]) -> _Points:
    return lambda view: [((entry.priority_class,), value(entry)) for entry in view.report.classes]


def _longest_wait_s(entry: control_pb2.ClassReport) -> float:
    return max([entry.expected_wait_ms, *entry.tenant_wait_ms.values()]) / 1e3


def _ages(view: _Model) -> Iterator[Point]:
    now = time.monotonic()
    ages: dict[str, float] = {}
    for request in list(view.table.requests.values()):
        if request.number:  # It waits.
            age_s, name = now - request.waiting_since, request.priority_class
            ages[name] = max(age_s, ages.get(name, 0.0))
    for entry in view.report.classes:
        yield (entry.priority_class,), ages.get(entry.priority_class, 0.0)


def _by_worker(value: Callable[[WorkerState], float]) -> _Points:
    def points(view: _Model) -> Iterator[Point]:
        workers = view.workers
        for name in view.names:
            yield (name,), value(workers.get(name, _ABSENT))

    return points


def _by_counts(
    value: Callable[[worker_pb2.WorkerLoad, worker_pb2.WorkerCounts], float],
    more: tuple[str, ...] = (),
) -> _Points:
    """Return points for each worker that has reported counts, with `more` labels."""
    return lambda view: [
        ((name, *more), value(load, counts)) for name, load, counts in view.counted()
    ]


def _cache_share(worker: WorkerState) -> float:
    blocks = worker.load.cache_blocks
    return 1 - worker.load.free_blocks / blocks if blocks else 0.0


_READERS: Final[Sequence[tuple[str, _Points]]] = (
    ("sluice.queue.tasks", _by_class(lambda entry: entry.queued)),
    ("sluice.queue.expected_wait", _by_class(_longest_wait_s)),
    ("sluice.queue.oldest_age", _ages),
    (
        "sluice.rows.in_flight",
        lambda view: [((), sum(len(worker.requests) for worker in view.workers.values()))],
    ),
    (
        "sluice.worker.drained",
        lambda view: [((name,), int(name in view.table.workers.drained)) for name in view.names],
    ),
    ("sluice.worker.live", _by_worker(lambda worker: int(worker.serves))),
    ("sluice.worker.slots", _by_worker(lambda worker: worker.load.slots)),
    ("sluice.worker.running", _by_worker(lambda worker: worker.load.running)),
    ("sluice.worker.waiting", _by_worker(lambda worker: worker.load.waiting)),
    ("sluice.worker.kv_cache.usage", _by_worker(_cache_share)),
    ("sluice.worker.step.rows", _by_counts(lambda _, counts: counts.step_tasks)),
    ("sluice.worker.tokens", _by_counts(lambda _, counts: counts.tokens, ("output",))),
    (
        "sluice.worker.tokens",
        _by_counts(lambda _, counts: counts.prompt_tokens, ("input",)),
    ),
    (
        "sluice.worker.prefix_cache.hits",
        _by_counts(lambda _, counts: counts.cached_tokens),
    ),
    ("sluice.worker.preemptions", _by_counts(lambda load, _: load.preemptions)),
    ("sluice.worker.drafts", _by_counts(lambda load, _: load.drafted_tokens)),
    ("sluice.worker.drafts.accepted", _by_counts(lambda load, _: load.accepted_tokens)),
)
