import asyncio
import gzip
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource as ProtoResource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Link, set_span_in_context

from tests.support.otlp import OtlpReceiver, SpanStore, otlp_receiver
from tests.support.spans import SpanKey


@pytest.fixture
async def receiver() -> AsyncIterator[OtlpReceiver]:
    async with otlp_receiver() as running:
        yield running


def an_export(name: str) -> bytes:
    span = Span(
        name=name,
        trace_id=bytes(range(16)),
        span_id=bytes(range(8)),
        parent_span_id=bytes(8),
        start_time_unix_nano=1,
        end_time_unix_nano=3,
    )
    service = KeyValue(key="service.name", value=AnyValue(string_value="triton"))
    return ExportTraceServiceRequest(
        resource_spans=[
            ResourceSpans(
                resource=ProtoResource(attributes=[service]),
                scope_spans=[ScopeSpans(spans=[span])],
            )
        ]
    ).SerializeToString()


def post(url: str, body: bytes, **headers: str) -> int:
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    with urllib.request.urlopen(request, timeout=60) as response:
        return int(response.status)


def send_three_spans(endpoint: str) -> None:
    provider = TracerProvider(resource=Resource.create({"service.name": "shop"}))
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=True)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    other = tracer.start_span("other")
    parent = tracer.start_span("parent")
    child = tracer.start_span(
        "child",
        context=set_span_in_context(parent),
        attributes={"rows": 3, "cause": "full", "models": ["a", "b"], "late": False, "share": 0.5},
        links=[Link(other.get_span_context())],
    )
    for span in (child, parent, other):
        span.end()
    provider.shutdown()


async def test_spans_over_grpc_become_records(receiver: OtlpReceiver) -> None:
    await asyncio.to_thread(send_three_spans, receiver.grpc_endpoint)

    spans = {span.name: span for span in await receiver.wait_for(lambda spans: len(spans) == 3)}

    assert spans["child"].service == "shop"
    assert spans["child"].parent_id == spans["parent"].span_id
    assert spans["child"].trace_id == spans["parent"].trace_id != spans["other"].trace_id
    assert spans["child"].links == (spans["other"].key,)
    assert spans["child"].attributes == {
        "rows": 3,
        "cause": "full",
        "models": ("a", "b"),
        "late": False,
        "share": 0.5,
    }
    assert spans["parent"].parent_id == ""
    assert spans["parent"].start_ns <= spans["child"].start_ns <= spans["child"].end_ns
    assert receiver.spans.of_trace(spans["other"].trace_id) == [spans["other"]]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
async def test_spans_over_http_become_records(receiver: OtlpReceiver, packed: bool) -> None:
    headers = {"Content-Type": "application/x-protobuf"}
    body = an_export("InferRequest")
    if packed:
        headers["Content-Encoding"], body = "gzip", gzip.compress(body)

    assert post(receiver.http_endpoint, body, **headers) == 200

    (span,) = await receiver.wait_for(bool)
    assert (span.service, span.name, span.parent_id) == ("triton", "InferRequest", "")
    assert span.key == SpanKey(bytes(range(16)).hex(), bytes(range(8)).hex())
    assert (span.start_ns, span.end_ns) == (1, 3)


async def test_spans_in_json_have_their_ids_in_hex(receiver: OtlpReceiver) -> None:
    trace_id, span_id, parent_id = "00112233445566778899aabbccddeeff", "a1" * 8, "b2" * 8
    span: dict[str, object] = {
        "traceId": trace_id,
        "spanId": span_id,
        "parentSpanId": parent_id,
        "name": "compute",
    }
    span |= {"startTimeUnixNano": "5", "endTimeUnixNano": "7", "later": "field"}
    service = {"key": "service.name", "value": {"stringValue": "triton"}}
    resource_spans = {"resource": {"attributes": [service]}, "scopeSpans": [{"spans": [span]}]}
    body = json.dumps({"resourceSpans": [resource_spans]}).encode()

    assert post(receiver.http_endpoint, body, **{"Content-Type": "application/json"}) == 200

    (record,) = await receiver.wait_for(bool)
    assert (record.service, record.name, record.parent_id) == ("triton", "compute", parent_id)
    assert record.key == SpanKey(trace_id, span_id)
    assert (record.start_ns, record.end_ns) == (5, 7)


@pytest.mark.parametrize(
    ("path", "content_type", "body", "status"),
    [
        ("/v1/logs", "application/x-protobuf", b"", 404),
        ("/v1/traces", "text/plain", b"spans", 415),
        ("/v1/traces", "application/json", b"{", 400),
        ("/v1/traces", "application/x-protobuf", b"\xff\xff", 400),
    ],
)
async def test_what_is_no_trace_export_is_refused(
    receiver: OtlpReceiver, path: str, content_type: str, body: bytes, status: int
) -> None:
    url = receiver.http_endpoint.replace("/v1/traces", path)

    with pytest.raises(urllib.error.HTTPError) as refused:
        post(url, body, **{"Content-Type": content_type})

    with refused.value as answer:
        assert answer.code == status
    assert receiver.spans.snapshot() == []


async def test_waiting_for_a_span_that_never_comes_says_what_came() -> None:
    store = SpanStore()

    with pytest.raises(TimeoutError, match="there are 0 spans"):
        await store.wait_for(bool, timeout_s=0.01)
