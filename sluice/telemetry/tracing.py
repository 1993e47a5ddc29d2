"""Sets OpenTelemetry up in a process, and carries W3C trace context over wires that have headers or a string."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace import Tracer as SdkTracer
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ParentBased,
    Sampler,
    TraceIdRatioBased,
)
from opentelemetry.trace import Span, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sluice import __version__
from sluice.telemetry import catalog
from sluice.telemetry.light_spans import LightTracer
from sluice.telemetry.registry import MetricRegistry, Point

TRACEPARENT: Final = "traceparent"
UNSAMPLED: Final = "-00"
"""Flags at the end of a traceparent."""
EXPORT_DELAY_MS: Final = 100
"""How long a span that is complete may wait for others, unless OTEL_BSP_SCHEDULE_DELAY says so."""
SHUTDOWN_S: Final = 2.0
"""How long a process that ends waits until its last spans are sent, seconds."""
_PROPAGATOR = TraceContextTextMapPropagator()
_log = logging.getLogger(__name__)


def start_tracing(
    service: str,
    registry: MetricRegistry | None = None,
    ratio: float = 1.0,
    *,
    trusts_callers: bool = True,
) -> TracerProvider:
    """Makes the process's tracer provider; spans that are sent and lost are counted in ``registry``.

    Spans leave over OTLP/gRPC when OTEL_EXPORTER_OTLP_ENDPOINT is set; without it requests have trace ids, and no
    spans. The caller ends it with ``shutdown()``, which sends what is left.

    Args:
        ratio: of the traces that begin here, how many are sampled; 1: as OTEL_TRACES_SAMPLER says.
        trusts_callers: Whether the sampled flag of a caller decides about its trace. False: ``ratio`` does, by the
            trace id, unless OTEL_TRACES_SAMPLER is set.
    """
    exports = bool(otlp_endpoint())
    provider = TracerProvider(_sampler(ratio, exports, trusts_callers), resource_of(service))
    if exports:
        # Imported here: without an endpoint a process should not pay for the exporter.
        from sluice.telemetry.otlp_spans import SpanExporter as OtlpExporter

        processor = _CountingProcessor(OtlpExporter())
        provider.add_span_processor(processor)
        if registry is not None:
            registry.observe(catalog.SPANS, processor.counts)
    trace.set_tracer_provider(provider)
    return provider


def _sampler(ratio: float, exports: bool, trusts_callers: bool) -> Sampler | None:
    """Return the sampler of a process; None: the one that the environment names."""
    if not exports:
        # The context of a caller who samples still goes on to processes that may have an endpoint.
        return ParentBased(ALWAYS_OFF)
    root = TraceIdRatioBased(ratio)
    if not trusts_callers and not os.environ.get("OTEL_TRACES_SAMPLER"):
        return ParentBased(root, remote_parent_sampled=root, remote_parent_not_sampled=root)
    return None if ratio == 1.0 else ParentBased(root)


def otlp_endpoint() -> str:
    """Where telemetry goes; empty: nowhere."""
    return os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")


class Outage:
    """Says once that the OTLP endpoint does not take a signal, and once that it does again."""

    def __init__(self, signal: str) -> None:
        self._signal = signal
        self._failed = False
        # These say it at every try.
        for name in (
            "opentelemetry.exporter.otlp.proto.grpc",
            "opentelemetry.sdk._shared_internal",
        ):
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def note(self, *, failed: bool) -> None:
        """The outcome of an export."""
        if failed and not self._failed:
            _log.warning("%s does not take %s: they are dropped", otlp_endpoint(), self._signal)
        elif self._failed and not failed:
            _log.info("%s takes %s again", otlp_endpoint(), self._signal)
        self._failed = failed


class _CountingExporter(SpanExporter):
    """Counts what an exporter sends and loses."""

    def __init__(self, exporter: SpanExporter) -> None:
        self.sent = self.lost = 0
        self._exporter = exporter
        self._outage = Outage("spans")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed:
            self.lost += len(spans)
        else:
            self.sent += len(spans)
        self._outage.note(failed=failed)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _CountingProcessor(BatchSpanProcessor):
    """Sends the spans of one request together, when the first of them ends, and that one before the others.

    So a process that is killed leaves no span without its parent. Spans that end later, such as a shadow's, are sent at
    once. Counts what does not fit into the queue.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._counting = _CountingExporter(exporter)
        self._dropped = 0
        self._open: dict[int, list[ReadableSpan]] = {}
        """By the first span of a tree in this process, the ended ones below it."""
        self._first: dict[int, int] = {}
        """The first span of the tree of each span that is open or waits for it."""
        delay_ms = float(os.environ.get("OTEL_BSP_SCHEDULE_DELAY", EXPORT_DELAY_MS))
        super().__init__(self._counting, schedule_delay_millis=delay_ms)

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        own, parent = span.get_span_context().span_id, span.parent
        first = own
        if parent is None or parent.is_remote:
            self._open[own] = []
        else:
            first = self._first.get(parent.span_id, parent.span_id)
        self._first[own] = first

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        own = 0 if context is None else context.span_id
        first = self._first.get(own, own)
        below = self._open.get(first)
        if first == own or below is None:
            self._send(span)
            for each in self._open.pop(own, ()):
                self._send(each)
        else:
            below.append(span)

    def _send(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is not None:
            self._first.pop(context.span_id, None)
        queue = self._batch_processor._queue
        self._dropped += len(queue) == queue.maxlen  # The oldest goes.
        self._batch_processor.emit(span)

    def shutdown(self) -> None:
        """Sends what is left; a collector that is down holds the end of a process up for `SHUTDOWN_S` and no longer."""
        # Of spans that never ended: better without a parent than lost.
        for below in list(self._open.values()):
            for each in below:
                self._send(each)
        self._batch_processor.shutdown(timeout_millis=int(SHUTDOWN_S * 1e3))

    def counts(self) -> Iterator[Point]:
        """Spans sent and lost, for `catalog.SPANS`."""
        exporter = self._counting
        yield ("",), exporter.sent
        yield ("export_failed",), exporter.lost
        yield ("queue_full",), self._dropped


def resource_of(service: str, instance: str = "") -> Resource:
    """The resource attributes of all telemetry of a process."""
    named = {"service.instance.id": instance} if instance else {}
    return Resource.create({"service.name": service, "service.version": __version__, **named})


def tracer(service: str) -> Tracer:
    """The tracer of a process; made from the provider that `start_tracing` set."""
    found = trace.get_tracer(service, __version__)
    return LightTracer(found) if isinstance(found, SdkTracer) else found


def context_of(headers: Mapping[str, str] | None) -> Context:
    """The remote context in ``headers`` (NATS headers, gRPC metadata); an empty one without a valid traceparent."""
    if not headers or TRACEPARENT not in headers:
        return Context()
    return _PROPAGATOR.extract(headers, Context())


def is_unsampled(headers: Mapping[str, str]) -> bool:
    """Whether the sender of ``headers`` has decided that nobody makes spans of what it sent."""
    return headers.get(TRACEPARENT, "").endswith(UNSAMPLED)


def headers_of(span: Span) -> dict[str, str]:
    """Headers that carry ``span`` as parent."""
    parent = traceparent_of(span)
    headers = {TRACEPARENT: parent} if parent else {}
    if state := span.get_span_context().trace_state:
        headers["tracestate"] = state.to_header()
    return headers


def traceparent_of(span: Span) -> str:
    """``span`` as a W3C traceparent; empty when it is not valid."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    flags = "-01" if context.trace_flags.sampled else UNSAMPLED
    return f"00-{context.trace_id:032x}-{context.span_id:016x}{flags}"


def trace_id_of(span: Span) -> str:
    """The trace id, 32 hex digits."""
    return trace.format_trace_id(span.get_span_context().trace_id)
