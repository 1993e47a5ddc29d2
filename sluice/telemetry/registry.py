"""What a process counts, kept as plain numbers that are read when metrics are collected.

An instrument call of OpenTelemetry's SDK takes many times as long as counting here. Counting and collecting
may happen on different threads: numbers are read one by one, and collections are copied in one step.
"""

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from opentelemetry.trace import SpanContext

from sluice.telemetry.catalog import Metric

Labels = tuple[str, ...]
"""Values of a metric's labels, in the order of `Metric.labels`; an empty one is left out."""


class Exemplar(NamedTuple):
    """One measurement and the trace that it belongs to; ``at`` is Unix seconds."""

    value: float
    trace_id: int
    span_id: int
    at: float


class Series:
    """One histogram: how many values are in each bucket, their sum, and the last measurement of each bucket."""

    __slots__ = ("counts", "exemplars", "total")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}


class Histogram:
    """Histograms by labels, with the bounds of their metric."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._series: dict[Labels, Series] = {}

    def record(self, labels: Labels, value: float, span: SpanContext | None = None) -> None:
        """Adds a value; ``span`` is where it was measured."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = Series(len(self._bounds) + 1)
        bucket = bisect_left(self._bounds, value)
        series.counts[bucket] += 1
        series.total += value
        if span is not None and span.trace_flags.sampled:
            series.exemplars[bucket] = Exemplar(value, span.trace_id, span.span_id, time.time())

    def read(self) -> list[tuple[Labels, Series]]:
        """All of them."""
        return list(self._series.items())


Point = tuple[Labels, float | Series]
Read = Callable[[], Iterable[Point]]


class MetricRegistry:
    """The metrics of a process."""

    def __init__(self) -> None:
        self._read: dict[Metric, list[Read]] = {}
        self.started_at: Final = time.time()
        """Unix seconds."""

    def observe(self, metric: Metric, read: Read) -> None:
        """``read`` gives the values of a metric; it is called on other threads."""
        self._read.setdefault(metric, []).append(read)

    def counter(self, metric: Metric) -> defaultdict[Labels, float]:
        """Numbers by labels; the caller adds to them."""
        counts: defaultdict[Labels, float] = defaultdict(int)
        self.observe(metric, lambda: list(counts.items()))
        return counts

    def histogram(self, metric: Metric) -> Histogram:
        """Histograms by labels."""
        made = Histogram(metric.bounds)
        self.observe(metric, made.read)
        return made

    @property
    def metrics(self) -> list[Metric]:
        """What this process may emit."""
        return list(self._read)

    def collect(self, names: Collection[str] = ()) -> Iterator[tuple[Metric, list[Point]]]:
        """The values of the metrics of these ``names``, without any of all, that have some."""
        for metric, readers in list(self._read.items()):
            if names and metric.name not in names:
                continue
            points = [point for read in readers for point in read()]
            if points:
                yield metric, points
