"""Sends a registry over OTLP/gRPC from a thread of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Final

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import (
    Metric as SdkMetric,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from sluice import __version__
from sluice.telemetry.catalog import Kind, Metric
from sluice.telemetry.registry import Labels, MetricRegistry, Point, Series
from sluice.telemetry.tracing import Outage, resource_of

_CUMULATIVE: Final = AggregationTemporality.CUMULATIVE


@contextmanager
def exporting(
    registry: MetricRegistry, service: str, instance: str, shutdown_s: float
) -> Iterator[None]:
    """Exports ``registry`` every OTEL_METRIC_EXPORT_INTERVAL milliseconds, and at the end within ``shutdown_s``."""
    interval_s = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "60000")) / 1e3
    exporter, outage, ending = OTLPMetricExporter(), Outage("metrics"), Event()
    resource = resource_of(service, instance)

    def run() -> None:
        while True:
            ends = ending.wait(interval_s)
            result = exporter.export(snapshot(registry, resource, service))
            outage.note(failed=result is not MetricExportResult.SUCCESS)
            if ends:
                return

    thread = Thread(target=run, name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(shutdown_s)
        exporter.shutdown()


def snapshot(registry: MetricRegistry, resource: Resource, scope: str) -> MetricsData:
    """All values now, as OpenTelemetry's SDK would have collected them."""
    import time

    at = int(registry.started_at * 1e9), time.time_ns()
    metrics = [
        SdkMetric(metric.name, metric.what, metric.unit, _data(metric, points, *at))
        for metric, points in registry.collect()
    ]
    scoped = ScopeMetrics(InstrumentationScope(scope, __version__), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scoped], "")])


def _data(metric: Metric, points: list[Point], start: int, now: int) -> Sum | Gauge | Histogram:
    if metric.kind is Kind.HISTOGRAM:
        return Histogram([_histogram(metric, point, start, now) for point in points], _CUMULATIVE)
    numbers = [
        NumberDataPoint(_attributes(metric, labels), start, now, value)
        for labels, value in points
        if not isinstance(value, Series)
    ]
    if metric.kind is Kind.GAUGE:
        return Gauge(numbers)
    return Sum(numbers, _CUMULATIVE, is_monotonic=True)


def _histogram(metric: Metric, point: Point, start: int, now: int) -> HistogramDataPoint:
    labels, series = point
    assert isinstance(series, Series)
    return HistogramDataPoint(
        attributes=_attributes(metric, labels),
        start_time_unix_nano=start,
        time_unix_nano=now,
        count=sum(series.counts),
        sum=series.total,
        bucket_counts=list(series.counts),
        explicit_bounds=metric.bounds,
        min=0.0,
        max=0.0,
        exemplars=[
            Exemplar({}, one.value, int(one.at * 1e9), one.span_id, one.trace_id)
            for one in list(series.exemplars.values())
        ],
    )


def _attributes(metric: Metric, labels: Labels) -> dict[str, str]:
    return {name: value for name, value in zip(metric.labels, labels, strict=True) if value}
