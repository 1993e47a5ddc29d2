"""Sets metrics up in a process: over OTLP, and as a page for Prometheus."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader

from sluice import __version__
from sluice.errors import SetupError
from sluice.startup import listen_problem, split_address
from sluice.telemetry.tracing import resource_of

SHUTDOWN_S: Final = 1.0
"""What the last export may take, seconds."""


@dataclass(frozen=True)
class Metrics:
    """The metrics of a process.

    Attributes:
        meter: makes instruments.
        page: where Prometheus scrapes, "HOST:PORT"; None: nowhere.
    """

    meter: Meter
    page: str | None


@contextmanager
def measuring(
    service: str, instance: str, address: str | None = None, key: str = ""
) -> Iterator[Metrics]:
    """The process's metrics inside the block; at its end the rest is sent, which may take `SHUTDOWN_S`.

    They leave over OTLP/gRPC when OTEL_EXPORTER_OTLP_ENDPOINT is set, every OTEL_METRIC_EXPORT_INTERVAL milliseconds
    (60,000), unless OTEL_METRICS_EXPORTER is "none".

    Args:
        instance: the name of this process among those of ``service``.
        address: "HOST:PORT" of a page for Prometheus; port 0 takes a free one. None: no page.
        key: the setting that ``address`` comes from, for the error.

    Raises:
        SetupError: the page cannot be served at ``address``.
    """
    readers: list[MetricReader] = []
    with ExitStack() as opened:
        page = None if address is None else _serve_page(address, key, readers, opened)
        if _exports():
            readers.append(_otlp_reader())
        provider = MeterProvider(readers, resource_of(service, instance))
        opened.callback(provider.shutdown, SHUTDOWN_S * 1000)
        yield Metrics(provider.get_meter(service, __version__), page)


def _exports() -> bool:
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return bool(endpoint) and os.environ.get("OTEL_METRICS_EXPORTER", "otlp") != "none"


def _otlp_reader() -> MetricReader:
    # Imported here, as the page's: what a process does not use it should not pay for.
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    return PeriodicExportingMetricReader(OTLPMetricExporter())


def _serve_page(address: str, key: str, readers: list[MetricReader], opened: ExitStack) -> str:
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

    host, port = split_address(address, key)
    problem = listen_problem(host, port)
    if problem is not None:
        raise SetupError(f"{key}: {address} is {problem}; choose another or stop what uses it")
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    readers.append(PrometheusMetricReader(registry=registry))
    server, thread = start_http_server(port, host, registry)
    opened.callback(thread.join)
    opened.callback(server.server_close)
    opened.callback(server.shutdown)
    return f"{address.rpartition(':')[0]}:{server.server_port}"
