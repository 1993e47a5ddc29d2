"""The instruments of a process: the metrics of `sluice.telemetry.catalog`, made with OpenTelemetry's SDK.

Counters are dictionaries that the SDK reads when it collects, because an instrument call takes 10 us and one request
has a dozen of them. Histograms are the SDK's own. What other processes have counted comes as whole histograms, which
no instrument takes: `reported` adds them to what a reader has collected.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    InMemoryMetricReader,
    MetricReader,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as SdkMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import INVALID_SPAN, NonRecordingSpan, SpanContext, set_span_in_context

from sluice import __version__
from sluice.telemetry.catalog import METRICS, Metric

Labels = tuple[str, ...]
"""Values of a metric's labels, in the order of `Metric.labels`; an empty one is left out."""
Point = tuple[Labels, float]
Read = Callable[[], Iterable[Point]]
NO_CONTEXT: Final = set_span_in_context(INVALID_SPAN, Context())
"""Without a span; in place of an empty one the SDK would look for the current one."""


class Reported(NamedTuple):
    """A histogram that another process has counted; `buckets` has one count more than its metric has bounds."""

    buckets: Sequence[int]
    total: float
    smallest: float
    largest: float


ReadReported = Callable[[], Iterable[tuple[Labels, Reported]]]
Points = list[tuple[Labels, float | HistogramDataPoint]]


class Recorder:
    """A histogram of the SDK that takes labels in the order of its metric."""

    def __init__(self, metric: Metric, record: Callable[..., None]) -> None:
        self._metric = metric
        self._record = record
        self._attributes: dict[Labels, dict[str, str]] = {}

    def record(self, labels: Labels, value: float, span: SpanContext | None = None) -> None:
        """Add a value. A sampled `span` becomes the exemplar of its bucket."""
        attributes = self._attributes.get(labels)
        if attributes is None:
            attributes = self._attributes[labels] = attributes_of(self._metric, labels)
        context = NO_CONTEXT
        if span is not None and span.trace_flags.sampled:
            context = set_span_in_context(NonRecordingSpan(span), Context())
        self._record(value, attributes, context)


class Instruments:
    """The instruments of one process.

    `readers` collect beside `collect`, such as those that export.
    """

    def __init__(
        self, resource: Resource | None = None, readers: Sequence[MetricReader] = ()
    ) -> None:
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider(
            [self._reader, *readers], resource or Resource.get_empty(), shutdown_on_exit=False
        )
        self._meter = self._provider.get_meter("sluice", __version__)
        self._reads: dict[Metric, list[Read]] = {}
        self._reported: dict[Metric, ReadReported] = {}
        self._recorders: dict[Metric, Recorder] = {}
        self._started_ns = time.time_ns()

    def observe(self, name: str, read: Read) -> None:
        """Read the values of a counter or gauge with `read`, on other threads, whenever somebody collects."""
        metric = METRICS[name]
        if metric in self._reads:
            self._reads[metric].append(read)
            return
        reads = self._reads[metric] = [read]

        def observations(_: CallbackOptions) -> Iterator[Observation]:
            for reader in list(reads):
                for labels, value in reader():
                    yield Observation(value, attributes_of(metric, labels))

        create = self._meter.create_observable_gauge
        if metric.kind == "counter":
            create = self._meter.create_observable_counter  # type: ignore[assignment]
        create(metric.name, [observations], metric.unit, metric.what)

    def counter(self, name: str) -> defaultdict[Labels, float]:
        """Make the numbers of a counter by labels; the caller adds to them."""
        counts: defaultdict[Labels, float] = defaultdict(int)
        self.observe(name, lambda: list(counts.items()))
        return counts

    def histogram(self, name: str) -> Recorder:
        """Make a histogram with the bounds of its metric."""
        metric = METRICS[name]
        made = self._meter.create_histogram(
            metric.name,
            metric.unit,
            metric.what,
            explicit_bucket_boundaries_advisory=list(metric.bounds),
        )
        recorder = self._recorders[metric] = Recorder(metric, made.record)
        return recorder

    def report(self, name: str, read: ReadReported) -> None:
        """Read whole histograms of other processes with `read` whenever somebody collects."""
        self._reported[METRICS[name]] = read

    @property
    def metrics(self) -> list[Metric]:
        """The metrics that this process may emit."""
        return [*self._reads, *self._recorders, *self._reported]

    def collect(self, names: Collection[str] = ()) -> Iterator[tuple[Metric, Points]]:
        """Yield the values of the metrics of these `names` that have some; without any, of all."""
        for collected in self.read(self._reader):
            if not names or collected.name in names:
                metric = METRICS[collected.name]
                yield metric, points_of(metric, collected)

    def read(self, reader: InMemoryMetricReader) -> list[SdkMetric]:
        """Collect with one of the readers, and add what other processes have counted."""
        data = reader.get_metrics_data()
        scopes = (
            [one for group in data.resource_metrics for one in group.scope_metrics] if data else []
        )
        return [*(metric for scope in scopes for metric in scope.metrics), *self.reported()]

    def reported(self) -> list[SdkMetric]:
        """Read the histograms of other processes."""
        return [
            SdkMetric(metric.name, metric.what, metric.unit, Histogram(points, CUMULATIVE))
            for metric, read in self._reported.items()
            if (points := [self._point(metric, *pair) for pair in read() if any(pair[1].buckets)])
        ]

    def _point(self, metric: Metric, labels: Labels, histogram: Reported) -> HistogramDataPoint:
        return HistogramDataPoint(
            attributes=attributes_of(metric, labels),
            start_time_unix_nano=self._started_ns,
            time_unix_nano=time.time_ns(),
            count=sum(histogram.buckets),
            sum=histogram.total,
            bucket_counts=list(histogram.buckets),
            explicit_bounds=metric.bounds,
            min=histogram.smallest,
            max=histogram.largest,
        )

    def shutdown(self) -> None:
        """Export what is left with the readers that do so."""
        self._provider.shutdown()


CUMULATIVE: Final = AggregationTemporality.CUMULATIVE


def attributes_of(metric: Metric, labels: Labels) -> dict[str, str]:
    """Name the labels of a point."""
    return {name: value for name, value in zip(metric.labels, labels, strict=True) if value}


def points_of(metric: Metric, collected: SdkMetric) -> Points:
    """Read the points of a metric with labels in its order."""
    assert isinstance(collected.data, Sum | Gauge | Histogram)
    return [
        (
            tuple(str((point.attributes or {}).get(name, "")) for name in metric.labels),
            point if isinstance(point, HistogramDataPoint) else point.value,
        )
        for point in collected.data.data_points
    ]
