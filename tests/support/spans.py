"""A span as tests look at it, read from OTLP."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan

from cli.trace_rules import TraceSpan

Value = str | bool | int | float | bytes | tuple["Value", ...] | None
"""An attribute's value; key-value lists do not occur in our spans and read as None."""


@dataclass(frozen=True)
class SpanKey:
    """Names one span: 32 and 16 hex digits."""

    trace_id: str
    span_id: str


@dataclass(frozen=True)
class SpanRecord:
    """One finished span.

    Attributes:
        service: ``service.name`` of the resource that sent it.
        parent_id: 16 hex digits; empty for a root.
        links: the spans it links to.
        start_ns: Unix nanoseconds, as ``end_ns``.
        scope: the instrumentation scope.
    """

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    links: tuple[SpanKey, ...]
    attributes: Mapping[str, Value]
    start_ns: int
    end_ns: int
    scope: str = ""
    resource: Mapping[str, Value] = field(default_factory=dict)

    @property
    def key(self) -> SpanKey:
        """What links to this span name."""
        return SpanKey(self.trace_id, self.span_id)

    def of_trace(self) -> TraceSpan:
        """As the rules of a trace look at it."""
        links = tuple((link.trace_id, link.span_id) for link in self.links)
        times = self.start_ns, self.end_ns
        return TraceSpan(
            self.service, self.name, self.span_id, self.parent_id, *times, self.attributes, links
        )


def read_spans(request: ExportTraceServiceRequest) -> Iterator[SpanRecord]:
    """The spans of one export, in its order."""
    for resource_spans in request.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield _span(span, resource, scope_spans.scope.name)


def _span(span: ProtoSpan, resource: Mapping[str, Value], scope: str) -> SpanRecord:
    return SpanRecord(
        service=str(resource.get("service.name", "")),
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        # Some exporters send a parent of eight zero bytes for a root.
        parent_id=span.parent_span_id.hex() if any(span.parent_span_id) else "",
        links=tuple(SpanKey(link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        attributes=_attributes(span.attributes),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        scope=scope,
        resource=resource,
    )


def _attributes(pairs: Sequence[KeyValue]) -> dict[str, Value]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Value:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case "bytes_value":
            return value.bytes_value
        case "array_value":
            return tuple(_value(item) for item in value.array_value.values)
        case _:
            return None
