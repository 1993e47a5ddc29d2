"""Sets OpenTelemetry up in a process, and carries W3C trace context over wires that have headers or a string."""

import os
from collections.abc import Mapping
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sluice import __version__

TRACEPARENT: Final = "traceparent"
_PROPAGATOR = TraceContextTextMapPropagator()


def start_tracing(service: str) -> TracerProvider:
    """Makes the process's tracer provider.

    Spans leave over OTLP/gRPC when OTEL_EXPORTER_OTLP_ENDPOINT is set; without it they are made (requests have trace
    ids) and dropped. The caller ends it with ``shutdown()``, which sends what is left.
    """
    provider = TracerProvider(resource=resource_of(service))
    if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        # Imported here: without an endpoint a process should not pay for the exporter.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider


def resource_of(service: str, instance: str = "") -> Resource:
    """The resource attributes of all telemetry of a process."""
    named = {"service.instance.id": instance} if instance else {}
    return Resource.create({"service.name": service, "service.version": __version__, **named})


def tracer(service: str) -> Tracer:
    """The tracer of a process; made from the provider that `start_tracing` set."""
    return trace.get_tracer(service, __version__)


def context_of(headers: Mapping[str, str] | None) -> Context:
    """The remote context in ``headers`` (NATS headers, gRPC metadata); an empty one without a valid traceparent."""
    return _PROPAGATOR.extract(dict(headers or {}), Context())


def headers_of(span: Span) -> dict[str, str]:
    """Headers that carry ``span`` as parent."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier


def traceparent_of(span: Span) -> str:
    """``span`` as a W3C traceparent; empty when it is not valid."""
    return headers_of(span).get(TRACEPARENT, "")


def trace_id_of(span: Span) -> str:
    """The trace id, 32 hex digits."""
    return trace.format_trace_id(span.get_span_context().trace_id)
