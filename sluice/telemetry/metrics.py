"""Set metrics up in a process: its instruments, a page for Prometheus, and what exports them over OTLP."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from opentelemetry.sdk.metrics.export import (
    InMemoryMetricReader,
    MetricExporter,
    MetricExportResult,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
    ResourceMetrics,
)
from opentelemetry.sdk.metrics.export import Metric as SdkMetric

from sluice.telemetry.exporters import (
    Outage,
    exporter_kinds,
    make_exporters,
    resource_of,
    send_last,
)
from sluice.telemetry.instruments import Instruments

logger = logging.getLogger(__name__)

SHUTDOWN_S: Final = 0.5
"""How long the last export may take, in seconds."""


@dataclass(frozen=True)
class Metrics:
    """The metrics of a process.

    Attributes:
        page: where Prometheus scrapes, "HOST:PORT"; None: nowhere.
    """

    instruments: Instruments
    page: str | None


@contextmanager
def measuring(
    service: str, instance: str, address: str | None = None, key: str = ""
) -> Iterator[Metrics]:
    """Give the process its metrics inside the block; at its end the rest is sent, which takes `SHUTDOWN_S` at most.

    They leave with the exporters of OTEL_METRICS_EXPORTER, over OTLP where an endpoint is set, every
    OTEL_METRIC_EXPORT_INTERVAL milliseconds (60,000). An endpoint that is down costs a line in the log.

    Args:
        service: A name of `sluice.telemetry.names`.
        instance: The name of this process among those of `service`.
        address: "HOST:PORT" of a page for Prometheus; port 0 takes a free one. None: no page.
        key: the setting that `address` comes from, for the error.

    Raises:
        SetupError: the page cannot be served at `address`.
    """
    resource = resource_of(service, instance)
    scraped = None if address is None else InMemoryMetricReader()
    with ExitStack() as opened:
        readers = _readers(lambda: instruments.reported())
        instruments = Instruments(resource, readers if scraped is None else [scraped, *readers])
        opened.callback(send_last, "metrics", instruments.shutdown, SHUTDOWN_S)
        page = None
        if address is not None and scraped is not None:
            # Imported here: what a process does not use it should not pay for.
            from sluice.telemetry.page import serving

            read = partial(instruments.read, scraped)
            page = opened.enter_context(serving(read, resource, address, key))
            logger.info("metrics at http://%s/metrics", page)
        yield Metrics(instruments, page)


def _readers(reported: Callable[[], list[SdkMetric]]) -> list[MetricReader]:
    """Make what exports the metrics of this process, those `reported` by others included."""
    readers: list[MetricReader] = []
    for kind in exporter_kinds("metrics"):
        if issubclass(kind, MetricReader):
            logger.warning("OTEL_METRICS_EXPORTER: %s is left out; see telemetry.prometheus", kind)
            continue
        with_reports = type(kind.__name__, (_Reporting, kind), {"reported": staticmethod(reported)})
        try:
            readers += map(PeriodicExportingMetricReader, make_exporters("metrics", [with_reports]))
        except ValueError as error:  # an interval that is none
            logger.error("export of metrics failed to start: %s", error)
    return readers


class _Reporting(MetricExporter):
    """What stands before an exporter: it adds histograms that no instrument of the SDK takes, and logs outages."""

    reported: Callable[[], list[SdkMetric]]

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._outage = Outage("metrics")

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **more: Any
    ) -> MetricExportResult:
        """Export `metrics_data` and what was reported."""
        data = MetricsData([_with(part, self.reported()) for part in metrics_data.resource_metrics])
        result = super().export(data, timeout_millis, **more)  # type: ignore[safe-super]
        self._outage.note(failed=result is not MetricExportResult.SUCCESS)
        return result


def _with(collected: ResourceMetrics, reported: list[SdkMetric]) -> ResourceMetrics:
    first, *more = collected.scope_metrics
    scope = replace(first, metrics=[*first.metrics, *reported])
    return replace(collected, scope_metrics=[scope, *more])
