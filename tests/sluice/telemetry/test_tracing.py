"""Which spans a process makes, and the context that it passes on."""

import pytest
from opentelemetry.trace import Tracer

from sluice.telemetry.tracing import (
    TRACEPARENT,
    context_of,
    headers_of,
    is_unsampled,
    start_tracing,
)

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def unexported(monkeypatch: pytest.MonkeyPatch) -> Tracer:
    """The tracer of a process without an endpoint."""
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    return start_tracing("test").get_tracer("test")


def test_without_an_endpoint_requests_have_trace_ids_and_no_spans(unexported: Tracer) -> None:
    span = unexported.start_span("call", context_of({}))
    headers = headers_of(span)
    assert not span.is_recording()
    assert is_unsampled(headers)
    parts = headers[TRACEPARENT].split("-")
    assert [len(part) for part in parts] == [2, 32, 16, 2]
    assert set(parts[1]) != {"0"}
    below = unexported.start_span("hop", context_of(headers))
    assert headers_of(below)[TRACEPARENT].split("-")[1] == parts[1]


def test_a_sampled_context_is_passed_on_without_an_endpoint(unexported: Tracer) -> None:
    span = unexported.start_span("call", context_of({TRACEPARENT: SAMPLED}))
    assert headers_of(span)[TRACEPARENT].startswith(SAMPLED[:36])
    assert headers_of(span)[TRACEPARENT].endswith("-01")
    assert not is_unsampled(headers_of(span))
