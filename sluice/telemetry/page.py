"""The page for Prometheus: what the SDK has collected, as `prometheus_client` serves it.

OpenTelemetry's own exporter for it leaves exemplars out, and adds labels that dashboards do not expect.
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Final

from opentelemetry.sdk.metrics import Exemplar as SdkExemplar
from opentelemetry.sdk.metrics.export import HistogramDataPoint
from opentelemetry.sdk.metrics.export import Metric as SdkMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import format_span_id, format_trace_id
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from sluice.startup import listening_at
from sluice.telemetry.catalog import METRICS, Metric
from sluice.telemetry.instruments import Labels, Points, points_of


@contextmanager
def serving(
    read: Callable[[], list[SdkMetric]], resource: Resource, address: str, key: str
) -> Iterator[str]:
    """Serve the page inside the block, and give its address, "HOST:PORT".

    Raises:
        SetupError: it cannot be served at `address`, which comes from the setting `key`.
    """
    host, port = listening_at(address, key, " or stop what uses it")
    named = {_WORD.sub("_", name): str(value) for name, value in resource.attributes.items()}
    registry = CollectorRegistry(target_info=named)
    registry.register(_Metrics(read))
    ProcessCollector(registry=registry)
    server, thread = start_http_server(port, host, registry)
    try:
        yield f"{address.rpartition(':')[0]}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Metrics(Collector):
    def __init__(self, read: Callable[[], list[SdkMetric]]) -> None:
        self._read = read
        self._exemplars: dict[tuple[Metric, Labels], dict[int, Exemplar]] = defaultdict(dict)
        """The last exemplar of each bucket; the SDK gives each once, and there may be several readers of the page."""

    def collect(self) -> Iterable[Family]:
        """Collect anew, at each scrape."""
        for collected in self._read():
            metric = METRICS[collected.name]
            points = points_of(metric, collected)
            if metric.kind == "histogram":
                yield self._histogram(metric, points)
            else:
                yield _numbers(metric, points)

    def describe(self) -> Iterable[Family]:
        """Name nothing when it is registered: metrics appear with their first value."""
        return ()

    def _histogram(self, metric: Metric, points: Points) -> Family:
        family = HistogramMetricFamily(metric.page_name, metric.what, labels=metric.page_labels)
        for labels, point in points:
            assert isinstance(point, HistogramDataPoint)
            exemplars = self._exemplars[metric, labels]
            for exemplar in point.exemplars:
                exemplars[bisect_left(metric.bounds, exemplar.value)] = _exemplar(exemplar)
            family.add_metric(labels, _buckets(metric, point, exemplars), point.sum)
        return family


def _numbers(metric: Metric, points: Points) -> Family:
    made = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = made(metric.page_name, metric.what, labels=metric.page_labels)
    for labels, value in points:
        assert not isinstance(value, HistogramDataPoint)
        family.add_metric(labels, value)
    return family


_Bucket = tuple[str, float] | tuple[str, float, Exemplar]


def _buckets(
    metric: Metric, point: HistogramDataPoint, exemplars: Mapping[int, Exemplar]
) -> Sequence[_Bucket]:
    """Sum the buckets up, each with its exemplar."""
    bounds = (*map(str, metric.bounds), "+Inf")
    buckets: list[_Bucket] = []
    for place, count in enumerate(accumulate(point.bucket_counts)):
        bound = bounds[place]
        exemplar = exemplars.get(place)
        buckets.append((bound, count) if exemplar is None else (bound, count, exemplar))
    return buckets


def _exemplar(exemplar: SdkExemplar) -> Exemplar:
    ids = {"trace_id": format_trace_id(exemplar.trace_id or 0)}
    ids["span_id"] = format_span_id(exemplar.span_id or 0)
    return Exemplar(ids, exemplar.value, round(exemplar.time_unix_nano / 1e9, 3))


_WORD: Final = re.compile(r"[^a-zA-Z0-9_]")
