"""Sets metrics up in a process: a registry that is read for a page of Prometheus, and sent over OTLP."""

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from sluice import __version__
from sluice.startup import listening_at
from sluice.telemetry.registry import MetricRegistry
from sluice.telemetry.tracing import otlp_endpoint

_log = logging.getLogger(__name__)

SHUTDOWN_S: Final = 1.0
"""What the last export may take, seconds."""


@dataclass(frozen=True)
class Metrics:
    """The metrics of a process.

    Attributes:
        registry: what it counts.
        page: where Prometheus scrapes, "HOST:PORT"; None: nowhere.
    """

    registry: MetricRegistry
    page: str | None


@contextmanager
def measuring(
    service: str, instance: str, address: str | None = None, key: str = ""
) -> Iterator[Metrics]:
    """The process's metrics inside the block; at its end the rest is sent, which may take `SHUTDOWN_S`.

    They leave over OTLP/gRPC when OTEL_EXPORTER_OTLP_ENDPOINT is set, every OTEL_METRIC_EXPORT_INTERVAL milliseconds
    (60,000), unless OTEL_METRICS_EXPORTER is "none". An endpoint that is down costs a line in the log.

    Args:
        instance: the name of this process among those of ``service``.
        address: "HOST:PORT" of a page for Prometheus; port 0 takes a free one. None: no page.
        key: the setting that ``address`` comes from, for the error.

    Raises:
        SetupError: the page cannot be served at ``address``.
    """
    registry = MetricRegistry()
    with ExitStack() as opened:
        page = None
        if address is not None:
            process = {
                "service_name": service,
                "service_instance_id": instance,
                "service_version": __version__,
            }
            page = _serve_page(address, key, registry, process, opened)
            _log.info("metrics at http://%s/metrics", page)
        if otlp_endpoint() and os.environ.get("OTEL_METRICS_EXPORTER", "otlp") != "none":
            # Imported here, as the page's: what a process does not use it should not pay for.
            from sluice.telemetry.otlp_metrics import exporting

            opened.enter_context(exporting(registry, service, instance, SHUTDOWN_S))
        yield Metrics(registry, page)


def _serve_page(
    address: str, key: str, registry: MetricRegistry, process: dict[str, str], opened: ExitStack
) -> str:
    from sluice.telemetry.page import serving

    host, port = listening_at(address, key, " or stop what uses it")
    port = opened.enter_context(serving(registry, process, host, port))
    return f"{address.rpartition(':')[0]}:{port}"
