"""Sets metrics up in a process: a registry that is read for a page of Prometheus, and sent over OTLP.

The page has the text format, and OpenMetrics, with exemplars, for who asks for that. It is written here because
prometheus_client takes 40 ms for what ten models need, on a thread that keeps requests waiting.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from threading import Thread
from typing import Any, Final

from sluice import __version__
from sluice.startup import listening_at
from sluice.telemetry.catalog import Kind, Metric
from sluice.telemetry.registry import Exemplar, Labels, MetricRegistry, Series
from sluice.telemetry.tracing import otlp_endpoint

_log = logging.getLogger(__name__)

SHUTDOWN_S: Final = 1.0
"""What the last export may take, seconds."""
PATH: Final = "/metrics"
PLAIN: Final = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS: Final = "application/openmetrics-text"
_TIMEOUT_S: Final = 10.0
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


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
    process = {
        "service_name": service,
        "service_instance_id": instance,
        "service_version": __version__,
    }
    with ExitStack() as opened:
        page = None
        if address is not None:
            host, port = listening_at(address, key, " or stop what uses it")
            port = opened.enter_context(_serving(registry, process, host, port))
            page = f"{address.rpartition(':')[0]}:{port}"
            _log.info("metrics at http://%s/metrics", page)
        if otlp_endpoint() and os.environ.get("OTEL_METRICS_EXPORTER", "otlp") != "none":
            from sluice.telemetry.otlp_metrics import exporting

            opened.enter_context(exporting(registry, service, instance, SHUTDOWN_S))
        yield Metrics(registry, page)


def _render(
    registry: MetricRegistry, process: Mapping[str, str], *, open_metrics: bool = False
) -> str:
    """The page; ``process`` are the labels of ``target_info``."""
    labels = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in process.items())
    target = "target" if open_metrics else "target_info"
    lines = [
        f"# HELP {target} The process that this page is of.",
        f"# TYPE {target} {'info' if open_metrics else 'gauge'}",
        f"target_info{{{labels}}} 1",
    ]
    for metric, points in registry.collect():
        name, ending = metric.page_name, ""
        if metric.kind is Kind.COUNTER:
            ending = "_total"
        family = name if open_metrics else name + ending
        lines += (f"# HELP {family} {metric.what}", f"# TYPE {family} {metric.kind.value}")
        for values, value in points:
            labels = _labels(metric, values)
            if isinstance(value, Series):
                lines += _histogram(metric, labels, value, exemplars=open_metrics)
            else:
                lines.append(f"{name}{ending}{{{labels}}} {value}")
    return "\n".join([*lines, ""])


@lru_cache(maxsize=16_384)
def _labels(metric: Metric, values: Labels) -> str:
    pairs = zip(metric.page_labels, values, strict=True)
    return ",".join(f'{label}="{value.translate(_ESCAPES)}"' for label, value in pairs)


def _histogram(metric: Metric, labels: str, series: Series, *, exemplars: bool) -> Iterator[str]:
    name = metric.page_name
    start = f"{name}_bucket{{{labels}{',' if labels else ''}le="
    total = 0
    for place, total in enumerate(accumulate(series.counts)):
        last = series.exemplars.get(place) if exemplars else None
        yield f"{start}{metric.page_bounds[place]}}} {total}{'' if last is None else _mark(last)}"
    yield f"{name}_count{{{labels}}} {total}"
    yield f"{name}_sum{{{labels}}} {series.total}"


def _mark(last: Exemplar) -> str:
    ids = f'trace_id="{last.trace_id:032x}",span_id="{last.span_id:016x}"'
    return f" # {{{ids}}} {last.value} {last.at:.3f}"


@contextmanager
def _serving(
    registry: MetricRegistry, process: Mapping[str, str], host: str, port: int
) -> Iterator[int]:
    """Serves the page inside the block; gives the port."""
    # Imported here, as what sends them: what a process does not use it should not pay for.
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
    from prometheus_client.openmetrics.exposition import generate_latest as generate_open_metrics

    own = CollectorRegistry()
    ProcessCollector(registry=own)

    def page(*, open_metrics: bool) -> str:
        text = _render(registry, process, open_metrics=open_metrics)
        # The second one ends with the mark of the end.
        return text + (generate_open_metrics if open_metrics else generate_latest)(own).decode()

    with ThreadingHTTPServer((host, port), partial(_Handler, page)) as server:
        thread = Thread(target=server.serve_forever, name="metrics page", daemon=True)
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_S

    def __init__(self, page: Callable[..., str], *connection: Any) -> None:
        self._page = page
        super().__init__(*connection)

    def do_GET(self) -> None:
        """Answers a scrape."""
        if self.path.partition("?")[0] not in (PATH, "/"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        open_metrics = OPEN_METRICS in self.headers.get("Accept", "")
        body = self._page(open_metrics=open_metrics).encode()
        kind = f"{OPEN_METRICS}; version=1.0.0; charset=utf-8" if open_metrics else PLAIN
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not logged."""
