from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from model_workers.engine.protocol import SequenceEnd, SequenceStep
from model_workers.telemetry import SequenceTelemetry
from sluice.telemetry import names
from tests.support.sequences import sequence_spec

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def telemetry(exporter: InMemorySpanExporter) -> SequenceTelemetry:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return SequenceTelemetry(provider.get_tracer("test"), "small", "small-1")


def step(*tokens: int, end: SequenceEnd | None = None, attempt: int = 0) -> SequenceStep:
    return SequenceStep("r", "batcher-1", attempt, 0, tokens, end=end)


def lasted_s(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_times_and_spans_of_a_row(
    telemetry: SequenceTelemetry, exporter: InMemorySpanExporter
) -> None:
    spec = replace(sequence_spec("r", [1, 2], produced=[3]), traceparent=PARENT)
    telemetry.accept(spec, now=10.0)
    assert telemetry.add_step(step(5), 10.5) is None
    assert telemetry.add_step(step(6), 10.6) is None
    timings = telemetry.add_step(step(7, end=SequenceEnd.STOP), 12.0)
    assert timings is not None
    assert (timings.prefill_ms, timings.decode_ms) == (500.0, 1500.0)
    prefill, decode = exporter.get_finished_spans()
    assert (prefill.name, decode.name) == (names.SPAN_PREFILL, names.SPAN_DECODE)
    assert lasted_s(prefill) == pytest.approx(0.5, abs=1e-3)
    assert lasted_s(decode) == pytest.approx(1.5, abs=1e-3)
    for span in (prefill, decode):
        assert span.parent is not None
        assert format_trace_id(span.parent.trace_id) == PARENT.split("-")[1]
        assert format_span_id(span.parent.span_id) == PARENT.split("-")[2]
        assert span.attributes is not None
        assert span.attributes[names.REQUEST_ID] == "r"
        assert span.attributes[names.WORKER_ID] == "small-1"
    assert prefill.attributes is not None
    assert prefill.attributes[names.INPUT_TOKENS] == 3
    assert decode.attributes is not None
    assert decode.attributes[names.OUTPUT_TOKENS] == 3
    assert decode.attributes[names.GEN_AI_FINISH_REASONS] == ("stop",)


def test_a_row_without_a_token_has_prefill_only(
    telemetry: SequenceTelemetry, exporter: InMemorySpanExporter
) -> None:
    telemetry.accept(sequence_spec("r", [1]), now=1.0)
    timings = telemetry.add_step(step(end=SequenceEnd.DEADLINE), 3.0)
    assert timings is not None
    assert (timings.prefill_ms, timings.decode_ms) == (2000.0, 0.0)
    assert [span.name for span in exporter.get_finished_spans()] == [names.SPAN_PREFILL]


def test_a_failed_row_is_an_error(
    telemetry: SequenceTelemetry, exporter: InMemorySpanExporter
) -> None:
    telemetry.accept(sequence_spec("r", [1]), now=1.0)
    telemetry.add_step(step(4), 2.0)
    telemetry.add_step(step(end=SequenceEnd.FAILED), 3.0)
    prefill, decode = exporter.get_finished_spans()
    assert prefill.status.status_code is StatusCode.UNSET
    assert decode.status.status_code is StatusCode.ERROR


def test_a_replaced_row_is_closed_and_the_new_one_is_timed_anew(
    telemetry: SequenceTelemetry, exporter: InMemorySpanExporter
) -> None:
    telemetry.accept(sequence_spec("r", [1], attempt=0), now=1.0)
    telemetry.add_step(step(4), 2.0)
    telemetry.accept(sequence_spec("r", [1], attempt=1, owner="batcher-2"), now=5.0)
    ended = exporter.get_finished_spans()[-1]
    assert ended.attributes is not None
    assert ended.attributes[names.GEN_AI_FINISH_REASONS] == ("replaced",)
    assert not telemetry.owned("batcher-1")
    assert not telemetry.owned("batcher-2", before=5.0)
    assert [sequence.attempt for sequence in telemetry.owned("batcher-2", before=5.1)] == [1]
    timings = telemetry.add_step(step(5, end=SequenceEnd.STOP, attempt=1), 5.25)
    assert timings is not None
    assert timings.prefill_ms == 250.0
