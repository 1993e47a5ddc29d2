"""Which spans a process makes, and the context that it passes on."""

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NoOpTracer, Tracer

from sluice.telemetry.environment import clean
from sluice.telemetry.tracing import (
    TRACEPARENT,
    context_of,
    headers_of,
    is_unsampled,
    sampler_of,
    start_server_span,
    start_tracing,
)

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> Tracer:
    """The tracer of a process without an exporter."""
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
    return start_tracing("test").tracer


def test_call_without_exporter_has_a_trace_id(off: Tracer) -> None:
    assert isinstance(off, NoOpTracer)
    span = start_server_span(off, "call", {})
    assert not span.is_recording()
    assert is_unsampled(headers_of(span))
    parts = headers_of(span)[TRACEPARENT].split("-")
    assert [len(part) for part in parts] == [2, 32, 16, 2]
    assert set(parts[1]) != {"0"}
    assert headers_of(start_server_span(off, "call", {}))[TRACEPARENT].split("-")[1] != parts[1]


def test_call_without_exporter_passes_a_context_on(off: Tracer) -> None:
    span = start_server_span(off, "call", {TRACEPARENT: SAMPLED})
    assert headers_of(span) == {TRACEPARENT: SAMPLED}
    assert not is_unsampled(headers_of(span))


@pytest.mark.parametrize(
    ("traceparent", "unsampled"),
    [("", False), (SAMPLED, False), (SAMPLED[:-2] + "03", False), (SAMPLED[:-2] + "02", True)],
)
def test_sampled_flag_is_one_bit(traceparent: str, unsampled: bool) -> None:
    assert is_unsampled({TRACEPARENT: traceparent}) is unsampled


UNSAMPLED = SAMPLED[:-2] + "00"
SELDOM = "00-0af7651916cd43ddffffffffffffffff-b7ad6b7169203331-01"
"""The ratio leaves it out."""


@pytest.mark.parametrize(
    ("parent", "ratio", "sampler", "recorded"),
    [
        (UNSAMPLED, 1.0, "", True),
        (UNSAMPLED, 0.6, "", True),
        (SELDOM, 0.6, "", False),
        (SELDOM, 0.6, "parentbased_always_on", True),
        (UNSAMPLED, 1.0, "parentbased_always_on", False),
        (UNSAMPLED, 0.6, "parentbased_always_on", False),
    ],
)
def test_ratio_decides_about_traces_of_callers(
    parent: str, ratio: float, sampler: str, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    clean()
    sampling = sampler_of(ratio, trusts_callers=False)
    tracer = TracerProvider(sampling).get_tracer("test")
    span = tracer.start_span("call", context_of({TRACEPARENT: parent}))
    assert span.is_recording() is recorded
    below = tracer.start_span("hop", trace.set_span_in_context(span, Context()))
    assert below.is_recording() is recorded


def test_processes_behind_a_gateway_follow_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_TRACES_SAMPLER", raising=False)
    tracer = TracerProvider(sampler_of(0.0, trusts_callers=True)).get_tracer("test")
    assert tracer.start_span("batch", context_of({TRACEPARENT: SAMPLED})).is_recording()
    assert not tracer.start_span("batch", context_of({TRACEPARENT: UNSAMPLED})).is_recording()
