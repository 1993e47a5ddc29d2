"""What the spans of a call say; before a real nats-server."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from gateway.telemetry.request_log import RequestLog
from sluice.errors import InvalidRequest
from sluice.internal.v1.frame_pb2 import TaskTimings
from sluice.telemetry import names
from sluice.telemetry.tracing import CountedSpans, is_unsampled
from sluice.wire.clock import ms_of
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.metrics import values
from tests.gateway.kit.wire import Wire, error_of, events_of, open_wire, prompt

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
    call, task = await wire.begin(prompt("hello world"))
    tokens = wire.tokens("hello world")
    await wire.batcher.send(task, frame(0, tokens[:1]))
    await wire.batcher.forget(task)
    await wire.batcher.send(await wire.batcher.task(), last(1, tokens[1:]))
    await events_of(call)
    root = await root_of(wire)
    assert (root[names.RECOVERED], root[names.RECOVERED_FROM]) == (1, "batcher")
    assert root[names.RECOVERED_GAP_S] >= 0
    attempt = wire.span("chat small").attributes
    assert (attempt[names.END], attempt[names.GEN_AI_REQUEST_MODEL]) == ("answered", "small")
    assert list(values(wire.metrics, "sluice.recoveries").values()) == [1]
    assert root[names.MODELS_TRIED] == ("small",)


async def test_model_span_has_usage_cost_and_conversation(
    nats_url: str, model_folder: Path
) -> None:
    async with open_wire(nats_url, model_folder, prices={"small": (1e6, 2e6)}) as wire:
        call, task = await wire.begin(prompt("hello", labels={"conversation_id": "c-7"}))
        answer = last(0, wire.tokens("hello world"))
        answer.final.cached_prompt_tokens = 1
        await wire.batcher.send(task, answer)
        await events_of(call)
        root, work = await root_of(wire), wire.span("chat small").attributes
    asked, answered = len(task.prompt_token_ids), len(wire.tokens("hello world"))
    for span in (root, work):
        assert span[names.GEN_AI_INPUT_TOKENS] == asked
        assert span[names.GEN_AI_OUTPUT_TOKENS] == answered
        assert span[names.GEN_AI_CACHED_TOKENS] == 1
        assert span[names.GEN_AI_COST] == asked + 2 * answered
        assert span[names.GEN_AI_CONVERSATION] == "c-7"
    assert work[names.GEN_AI_OPERATION] == "chat"
    assert work[names.GEN_AI_RESPONSE_MODEL] == "small"
    usage = [
        s.name for s in wire.spans.get_finished_spans() if names.GEN_AI_INPUT_TOKENS in s.attributes
    ]
    assert sorted(usage) == ["chat small", names.SPAN_GENERATE]


async def test_error_of_a_call_is_told_with_its_message(wire: Wire) -> None:
    await error_of(wire.stub.Generate(prompt(model="nope")))
    await root_of(wire)
    root = wire.span(names.SPAN_GENERATE)
    assert root.attributes[names.RPC_SYSTEM] == "grpc"
    assert root.attributes[names.RPC_METHOD] == names.SPAN_GENERATE
    assert root.attributes[names.RPC_STATUS] == "NOT_FOUND"
    assert root.status.description.startswith("MODEL_UNKNOWN: no model '...'; there are ")


async def test_deadline_of_a_client_is_no_cancellation(wire: Wire) -> None:
    call = wire.stub.Generate(prompt("hello"), timeout=0.5)
    await wire.batcher.task()
    word = "DEADLINE_EXCEEDED"
    with pytest.raises(grpc.aio.AioRpcError, match=word):
        await events_of(call)
    root = await root_of(wire)
    work = wire.span("chat small")
    assert (root[names.ERROR_REASON], root[names.RPC_STATUS]) == (word, word)
    assert work.attributes[names.ERROR_REASON] == word
    outcomes = {
        dict(labels)["sluice.outcome"] for labels in values(wire.metrics, "sluice.requests")
    }
    assert outcomes == {word}


@pytest.mark.parametrize(
    ("variable", "attributes", "events"),
    [
        ("", False, 0),
        ("false", False, 0),
        ("true", False, 1),
        ("EVENT_ONLY", False, 1),
        ("SPAN_ONLY", True, 0),
        ("SPAN_AND_EVENT", True, 1),
    ],
)
async def test_content_is_in_traces_on_request(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, variable: str, attributes: bool, events: int
) -> None:
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", variable)
    call = wire.stub.Generate(prompt("good morning"))
    await wire.batcher.send(await wire.batcher.task(), last(0, wire.tokens("hello")))
    await events_of(call)
    await root_of(wire)
    work = wire.span("chat small")
    assert (names.GEN_AI_INPUT_MESSAGES in work.attributes) is attributes
    assert [event.name for event in work.events] == [names.GEN_AI_DETAILS] * events
    content = work.attributes if attributes else {}
    for found in (content, *(event.attributes for event in work.events)):
        if found:
            (asked,) = json.loads(found[names.GEN_AI_INPUT_MESSAGES])
            (answered,) = json.loads(found[names.GEN_AI_OUTPUT_MESSAGES])
            assert asked == {"role": "user", "parts": [{"type": "text", "content": "good morning"}]}
            assert answered["parts"] == [{"type": "text", "content": "hello"}]
            assert answered["finish_reason"] == "stop"


def test_a_call_that_is_not_sampled_leaves_no_span() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(ParentBased(ALWAYS_OFF))
    provider.add_span_processor(CountedSpans(exporter))
    log = RequestLog(provider.get_tracer("test"), names.SPAN_GENERATE, {})
    headers = log.run_sent("r1", "m")
    assert is_unsampled(headers)
    log.describe({names.REQUEST_ID: "r1"})
    log.step(names.SPAN_SAFETY)
    log.step(names.SPAN_ROUTE)
    with pytest.raises(InvalidRequest), log, log.child(names.SPAN_GUARD, {}):
        raise InvalidRequest.of("model", "is unknown")
    provider.shutdown()
    assert not exporter.get_finished_spans()
    assert log.trace_id in headers["traceparent"]


def test_each_step_of_an_admission_has_its_span_and_its_time() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    log = RequestLog(provider.get_tracer("test"), names.SPAN_GENERATE, {})
    log.step(names.SPAN_SAFETY)
    log.step(names.SPAN_ROUTE)
    with pytest.raises(InvalidRequest), log:
        raise InvalidRequest.of("model", "is unknown")
    safety, route, call = exporter.get_finished_spans()
    assert (safety.name, route.name) == (names.SPAN_SAFETY, names.SPAN_ROUTE)
    assert names.ERROR_REASON not in safety.attributes
    assert route.attributes == {names.ERROR_REASON: "REQUEST_INVALID"}
    assert {one.parent.span_id for one in (safety, route)} == {call.context.span_id}
    timings = log.timings(TaskTimings(), 0.0, log.arrived_at, log.arrived_at + 2)
    assert ms_of(timings.total) == 2000
    assert ms_of(timings.tokenize) == 0


def test_delivery_is_what_the_other_timings_leave_of_the_total() -> None:
    log = RequestLog(TracerProvider().get_tracer("test"), names.SPAN_GENERATE, {})
    row = TaskTimings(queue_ms=200.0, batch_ms=100.0, prefill_ms=300.0, decode_ms=300.0)
    timings = log.timings(row, 0.06, log.arrived_at + 0.7, log.arrived_at + 1)
    assert ms_of(timings.delivery) == pytest.approx(40.0)
