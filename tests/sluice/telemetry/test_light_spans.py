"""Light spans are as the SDK's, and so is what is sent of them."""

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace import Tracer as SdkTracer
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, Tracer

from sluice.telemetry.light_spans import LightTracer
from sluice.telemetry.otlp_spans import encoded
from sluice.telemetry.tracing import context_of, resource_of
from tests.support.spans import read_spans

REMOTE = context_of(
    {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "a=b",
    }
)


class Numbers:
    """Ids in their order."""

    def __init__(self) -> None:
        self._last = 0

    def generate_span_id(self) -> int:
        self._last += 1
        return self._last

    generate_trace_id = generate_span_id

    def is_trace_id_random(self) -> bool:
        return False


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def tracers(exporter: InMemorySpanExporter) -> tuple[Tracer, Tracer]:
    """The SDK's, and ours with the same ids."""
    found = []
    for _ in range(2):
        ids: Any = Numbers()
        provider = TracerProvider(resource=resource_of("test", "one"), id_generator=ids)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        tracer = provider.get_tracer("test", "1.0")
        assert isinstance(tracer, SdkTracer)
        found.append(tracer)
    return found[0], LightTracer(found[1])


def make_spans(tracer: Tracer) -> None:
    """Spans of every kind that there is here."""
    call = tracer.start_span("call", REMOTE, SpanKind.SERVER, {"text": "a", "yes": True}, None, 1)
    inside = trace.set_span_in_context(call, Context())
    hop = tracer.start_span("hop", inside, attributes={"count": 3, "share": 0.5}, start_time=2)
    hop.set_attributes({"words": ["a", "b"], "numbers": (1, 2), "empty": ()})
    hop.set_attribute("count", 4)
    hop.set_status(StatusCode.ERROR, "why")
    links = [Link(call.get_span_context()), Link(hop.get_span_context())]
    hop.end(3)
    tracer.start_span("first", Context(), SpanKind.CONSUMER, {}, links, 4).end(5)
    call.set_status(Status(StatusCode.OK))
    call.end(6)


def fields(span: ProtoSpan) -> tuple[object, ...]:
    return span.kind, span.flags, span.trace_state, span.status.code, span.status.message


def test_spans_are_sent_as_those_of_the_sdk(exporter: InMemorySpanExporter) -> None:
    sent: list[tuple[ReadableSpan, ...]] = []
    for tracer in tracers(exporter):
        make_spans(tracer)
        sent.append(exporter.get_finished_spans())
        exporter.clear()
    theirs, ours = encode_spans(sent[0]), encoded(sent[1])
    assert len(sent[1]) == 3
    assert list(read_spans(ours)) == list(read_spans(theirs))
    spans = [one.resource_spans[0].scope_spans[0].spans for one in (ours, theirs)]
    assert [fields(span) for span in spans[0]] == [fields(span) for span in spans[1]]


def test_a_span_ends_once(exporter: InMemorySpanExporter) -> None:
    _, tracer = tracers(exporter)
    span = tracer.start_span("call", Context(), start_time=1)
    span.end(2)
    span.set_attributes({"late": True})
    span.set_attribute("late", True)
    span.set_status(StatusCode.ERROR)
    span.end(3)
    (sent,) = exporter.get_finished_spans()
    assert (dict(sent.attributes or {}), sent.end_time) == ({}, 2)
    assert sent.status.is_unset


def test_below_a_span_that_is_not_sampled_nothing_is_recorded(
    exporter: InMemorySpanExporter,
) -> None:
    _, tracer = tracers(exporter)
    unsampled = context_of(
        {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}
    )
    call = tracer.start_span("call", unsampled)
    below = tracer.start_span("hop", trace.set_span_in_context(call, Context()))
    assert not call.is_recording()
    assert not below.is_recording()
    assert below.get_span_context().trace_id == call.get_span_context().trace_id
    assert not tracer.start_span("hop", unsampled).is_recording()


def test_a_block_that_fails_says_so(exporter: InMemorySpanExporter) -> None:
    _, tracer = tracers(exporter)
    with pytest.raises(ValueError, match="why"), tracer.start_as_current_span("job"):
        raise ValueError("why")
    (sent,) = exporter.get_finished_spans()
    assert sent.status.status_code is StatusCode.ERROR
