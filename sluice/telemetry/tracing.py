"""Set OpenTelemetry's traces up in a process, and carry W3C trace context over wires that have headers or a string.

Spans are the SDK's, and leave with its batch processor and its exporters, which `CountedSpans` counts.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    NoOpTracer,
    Span,
    SpanContext,
    SpanKind,
    Tracer,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sluice import __version__
from sluice.telemetry.exporters import (
    Outage,
    make_exporters,
    resource_of,
    send_last,
)

if TYPE_CHECKING:  # workers have traces and no instruments
    from sluice.telemetry.instruments import Instruments, Point

logger = logging.getLogger(__name__)

TRACEPARENT: Final = "traceparent"
UNSAMPLED: Final = "-00"
"""Flags at the end of a traceparent that is not sampled."""
QUEUE_SPANS: Final = 2048
"""Default of OTEL_BSP_MAX_QUEUE_SIZE."""
EXPORT_DELAY_MS: Final = 100
"""How long a span that is complete waits for others unless OTEL_BSP_SCHEDULE_DELAY says so, in milliseconds."""
SHUTDOWN_S: Final = 1.0
"""How long a process that ends waits until its last spans are sent, in seconds."""
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_IDS: Final = RandomIdGenerator()
_OFF: Final = NoOpTracer()


class Tracing:
    """The tracer of a process.

    Attributes:
        tracer: without an exporter it is the API's own, which makes no spans.
    """

    def __init__(self, tracer: Tracer, provider: TracerProvider | None = None) -> None:
        self.tracer = tracer
        self._provider = provider

    def shutdown(self) -> None:
        """Send what is left; a collector that does not answer holds it up for `SHUTDOWN_S`."""
        if self._provider is not None:
            send_last("traces", self._provider.shutdown, SHUTDOWN_S)


def start_tracing(
    service: str,
    instruments: "Instruments | None" = None,
    ratio: float = 1.0,
    *,
    instance: str = "",
    trusts_callers: bool = True,
) -> Tracing:
    """Set the traces of a process up; `instruments` count the spans that are sent and lost.

    Args:
        service: a name of `sluice.telemetry.names`.
        instruments: None where nobody reads the counts.
        ratio: the share of the traces that begin here to sample, unless OTEL_TRACES_SAMPLER is set.
        instance: the name of this process among those of `service`.
        trusts_callers: Whether the sampled flag of a caller decides about its trace. False: `ratio` does, by the
            trace id, unless OTEL_TRACES_SAMPLER is set.
    """
    exporters = make_exporters("traces")
    if not exporters:
        return Tracing(_OFF)
    try:
        provider = TracerProvider(
            sampler_of(ratio, trusts_callers=trusts_callers),
            resource_of(service, instance),
            shutdown_on_exit=False,
        )
        processors = list(map(CountedSpans, exporters))
    except (
        ValueError
    ) as error:  # a variable that the SDK refuses; telemetry shall not keep a process from starting
        logger.error("export of traces failed to start: %s", error)
        return Tracing(_OFF)
    for processor in processors:
        provider.add_span_processor(processor)
        if instruments is not None:
            instruments.observe("otel.sdk.exporter.span.exported", processor.counts)
    return Tracing(provider.get_tracer(service, __version__), provider)


def sampler_of(ratio: float, *, trusts_callers: bool) -> Sampler | None:
    """Make the sampler of a process; None: the one that the environment names."""
    if os.environ.get("OTEL_TRACES_SAMPLER"):
        return None
    root = TraceIdRatioBased(ratio)
    if trusts_callers:
        return ParentBased(root)
    return ParentBased(root, remote_parent_sampled=root, remote_parent_not_sampled=root)


class CountingExporter(SpanExporter):
    """Counts what an exporter sends and loses.

    Attributes:
        taken_spans: spans that came.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self.taken_spans = self.sent = self.lost = 0
        self._exporter = exporter
        self._outage = Outage("traces")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export `spans` and count them."""
        self.taken_spans += len(spans)
        result = self._exporter.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed:
            self.lost += len(spans)
        else:
            self.sent += len(spans)
        self._outage.note(failed=failed)
        return result

    def shutdown(self) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown()


class CountedSpans(BatchSpanProcessor):
    """The SDK's batch processor, which counts what it sends, loses, and drops for want of room in its queue."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._counting = CountingExporter(exporter)
        self._queue_spans = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_SPANS))
        self._given_spans = self._dropped = 0
        super().__init__(
            self._counting,
            max_queue_size=self._queue_spans,
            schedule_delay_millis=float(os.environ.get("OTEL_BSP_SCHEDULE_DELAY", EXPORT_DELAY_MS)),
        )

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span that has ended, if there is room."""
        if self._given_spans - self._counting.taken_spans >= self._queue_spans:
            self._dropped += 1
        else:
            self._given_spans += 1
            super().on_end(span)

    def counts(self) -> Iterator["Point"]:
        """Yield the spans sent and lost, for `otel.sdk.exporter.span.exported`."""
        yield ("",), self._counting.sent
        yield ("export_failed",), self._counting.lost
        yield ("queue_full",), self._dropped


def start_server_span(tracer: Tracer, name: str, headers: Mapping[str, str]) -> Span:
    """Start the span of a call. Where no spans are made it has ids all the same, for answers, records and logs."""
    context = context_of(headers)
    span = tracer.start_span(name, context, SpanKind.SERVER)
    if span.get_span_context().is_valid:
        return span
    ids = _IDS.generate_trace_id(), _IDS.generate_span_id()
    return NonRecordingSpan(SpanContext(*ids, is_remote=False))


def context_of(headers: Mapping[str, str] | None) -> Context:
    """Return the remote context in `headers` (NATS headers, gRPC metadata); empty without a valid traceparent."""
    if not headers or TRACEPARENT not in headers:
        return Context()
    return _PROPAGATOR.extract(headers, Context())


def is_unsampled(headers: Mapping[str, str]) -> bool:
    """Return whether the sender of `headers` decided against sampling."""
    return is_unsampled_parent(headers.get(TRACEPARENT, ""))


def is_unsampled_parent(traceparent: str) -> bool:
    """Return whether a traceparent has the sampled flag, the last bit of its last digit, at 0."""
    return traceparent[-1:] in _EVEN


_EVEN: Final = frozenset("02468ace")


def headers_of(span: Span) -> dict[str, str]:
    """Return headers that carry `span` as parent."""
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers, set_span_in_context(span, Context()))
    return headers


def traceparent_of(span: Span) -> str:
    """Return `span` as a W3C traceparent; empty if it is not valid."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
