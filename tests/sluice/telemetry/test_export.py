"""Spans leave when a process ends, and where they are sampled."""

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, Status, StatusCode, Tracer

from sluice.telemetry.tracing import (
    CountedSpans,
    context_of,
    headers_of,
    is_unsampled,
)

REMOTE = context_of({"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"})


class Process:
    """A process that makes spans."""

    def __init__(self, ratio: float = 1.0) -> None:
        self.exporter = InMemorySpanExporter()
        self.processor = CountedSpans(self.exporter)
        self.provider = TracerProvider(ParentBased(TraceIdRatioBased(ratio)))
        self.provider.add_span_processor(self.processor)
        self.tracer: Tracer = self.provider.get_tracer("test")

    def sent(self) -> list[str]:
        """Names in the order in which they leave."""
        self.provider.force_flush()
        return [span.name for span in self.exporter.get_finished_spans()]

    def start(self, name: str, parent: Span | None = None) -> Span:
        context = REMOTE if parent is None else trace.set_span_in_context(parent, Context())
        return self.tracer.start_span(name, context)


@pytest.fixture
def process() -> Process:
    return Process()


def test_a_process_that_ends_sends_what_it_has(process: Process) -> None:
    root = process.start("root")
    process.start("hop", root).end()
    process.provider.shutdown()
    names: list[ReadableSpan] = list(process.exporter.get_finished_spans())
    assert [span.name for span in names] == ["hop"]


def test_a_call_that_is_not_sampled_leaves_nothing() -> None:
    process = Process(ratio=0)
    call = process.tracer.start_span("call", Context())
    assert is_unsampled(headers_of(call))
    assert not process.start("hop", call).is_recording()
    call.end()
    assert process.sent() == []


def test_what_a_caller_has_decided_holds() -> None:
    process = Process(ratio=0)
    sampled = process.start("sampled")
    sampled.end()
    ids = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
    unsampled = context_of({"traceparent": f"00-{ids}-00"})
    failed = process.tracer.start_span("failed", unsampled)
    failed.set_status(Status(StatusCode.ERROR))
    failed.end()
    assert process.sent() == ["sampled"]
