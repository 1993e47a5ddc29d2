"""What the spans of a call say; before a real nats-server."""

from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from gateway.telemetry.request_log import RequestLog
from sluice.errors import InvalidRequest
from sluice.internal.v1.frame_pb2 import RowTimings
from sluice.telemetry import catalog, names
from sluice.telemetry.tracing import _CountingProcessor, is_unsampled
from sluice.wire.clock import ms_of
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.metrics import values
from tests.gateway.kit.wire import Wire, error_of, events_of, prompt

TENANT = (("sluice-tenant", "acme"),)


async def root_of(wire: Wire) -> Any:
    await wire.until(lambda: wire.span(names.SPAN_GENERATE) is not None)
    return wire.span(names.SPAN_GENERATE).attributes


async def test_a_refused_call_says_what_one_searches_by(wire: Wire) -> None:
    _, error = await error_of(wire.stub.Generate(prompt(model="nope"), metadata=TENANT))
    root = await root_of(wire)
    assert root[names.ERROR_REASON] == error.reason
    assert root[names.TENANT] == "acme"
    assert root[names.GEN_AI_REQUEST_MODEL] == "nope"
    assert root[names.PRIORITY_CLASS]
    assert root[names.REQUEST_ID].startswith("req-")


async def test_an_answer_that_was_recovered_says_so(wire: Wire) -> None:
    call = wire.stub.Generate(prompt("hello world"))
    task = await wire.batcher.task()
    tokens = wire.tokens("hello world")
    await wire.batcher.send(task, frame(0, tokens[:1]), last(1, tokens[1:], attempt=1))
    await events_of(call)
    root = await root_of(wire)
    assert (root[names.RECOVERED], root[names.RECOVERED_FROM]) == (1, "worker")
    assert root[names.RECOVERED_GAP_S] >= 0
    attempt = wire.span(names.SPAN_ATTEMPT).attributes
    assert (attempt[names.END], attempt[names.GEN_AI_REQUEST_MODEL]) == ("answered", "small")
    assert list(values(wire.metrics, catalog.RECOVERIES).values()) == [1]
    assert root[names.MODELS_TRIED] == ("small",)


def test_a_call_that_is_not_sampled_leaves_no_span() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(ParentBased(ALWAYS_OFF))
    provider.add_span_processor(_CountingProcessor(exporter))
    log = RequestLog(provider.get_tracer("test"), names.SPAN_GENERATE, {})
    headers = log.row_sent("r1", "m")
    assert is_unsampled(headers)
    log.describe({names.REQUEST_ID: "r1"})
    log.hop(names.SPAN_SAFETY)
    log.hop(names.SPAN_ROUTE)
    with pytest.raises(InvalidRequest), log, log.child(names.SPAN_GUARD, {}):
        raise InvalidRequest.of("model", "is unknown")
    provider.shutdown()
    assert not exporter.get_finished_spans()
    assert log.trace_id in headers["traceparent"]


def test_each_step_of_an_admission_has_its_span_and_its_time() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    log = RequestLog(provider.get_tracer("test"), names.SPAN_GENERATE, {})
    log.hop(names.SPAN_SAFETY)
    log.hop(names.SPAN_ROUTE)
    with pytest.raises(InvalidRequest), log:
        raise InvalidRequest.of("model", "is unknown")
    safety, route, call = exporter.get_finished_spans()
    assert (safety.name, route.name) == (names.SPAN_SAFETY, names.SPAN_ROUTE)
    assert names.ERROR_REASON not in safety.attributes
    assert route.attributes == {names.ERROR_REASON: "REQUEST_INVALID"}
    assert {one.parent.span_id for one in (safety, route)} == {call.context.span_id}
    timings = log.timings(RowTimings(), log.arrived_at, log.arrived_at + 2)
    assert ms_of(timings.total) == 2000
    assert ms_of(timings.tokenize) == 0


def test_delivery_is_what_the_other_timings_leave_of_the_total() -> None:
    log = RequestLog(TracerProvider().get_tracer("test"), names.SPAN_GENERATE, {})
    log.publish_ms = 60.0
    row = RowTimings(queue_ms=200.0, batch_ms=100.0, prefill_ms=300.0, decode_ms=300.0)
    timings = log.timings(row, log.arrived_at + 0.7, log.arrived_at + 1)
    assert ms_of(timings.delivery) == pytest.approx(40.0)
