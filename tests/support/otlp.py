"""An OTLP receiver for tests: gRPC and HTTP on free ports of loopback, spans as typed records.

The gRPC server runs on the loop that opened the receiver. `SpanStore` may be read and waited for from any thread
and any loop, because the mesh of the whole suite lives on a loop of its own.
"""

import asyncio
import base64
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import grpc
from aiohttp import web
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from tests.support.spans import SpanRecord, read_spans

TRACES_PATH: Final = "/v1/traces"
METRICS_PATH: Final = "/v1/metrics"
PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
_Request = trace_service_pb2.ExportTraceServiceRequest


class SpanStore:
    """The spans that came in, in order of arrival."""

    def __init__(self) -> None:
        self._spans: list[SpanRecord] = []
        self._changed = threading.Condition()

    def add(self, spans: Iterable[SpanRecord]) -> None:
        """Keeps ``spans`` and wakes everybody who waits."""
        with self._changed:
            self._spans.extend(spans)
            self._changed.notify_all()

    def snapshot(self) -> list[SpanRecord]:
        """What is here now."""
        with self._changed:
            return list(self._spans)

    def of_trace(self, trace_id: str) -> list[SpanRecord]:
        """The spans of one trace that are here now."""
        return [span for span in self.snapshot() if span.trace_id == trace_id]

    async def wait_for(
        self, predicate: Callable[[Sequence[SpanRecord]], bool], timeout_s: float = 10.0
    ) -> list[SpanRecord]:
        """Waits until ``predicate`` holds for all spans so far, and returns them.

        Raises:
            TimeoutError: it did not hold within ``timeout_s``; the message lists the spans that are here.
        """
        return await asyncio.to_thread(self._wait, predicate, timeout_s)

    def _wait(
        self, predicate: Callable[[Sequence[SpanRecord]], bool], timeout_s: float
    ) -> list[SpanRecord]:
        give_up_at = time.monotonic() + timeout_s
        with self._changed:
            while not predicate(tuple(self._spans)):
                left_s = give_up_at - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    raise TimeoutError(f"after {timeout_s} s there are {_summary(self._spans)}")
            return list(self._spans)


@dataclass(frozen=True)
class OtlpReceiver:
    """Where to send spans, and the spans.

    Attributes:
        grpc_endpoint: for OTEL_EXPORTER_OTLP_ENDPOINT.
        http_endpoint: full URL of the HTTP endpoint, for senders that know no gRPC.
        metrics: what came, in order of arrival; over HTTP only as protobuf.
    """

    grpc_endpoint: str
    http_endpoint: str
    spans: SpanStore
    metrics: list[Metric]

    async def wait_for(
        self, predicate: Callable[[Sequence[SpanRecord]], bool], timeout_s: float = 10.0
    ) -> list[SpanRecord]:
        """See `SpanStore.wait_for`."""
        return await self.spans.wait_for(predicate, timeout_s)


@asynccontextmanager
async def otlp_receiver() -> AsyncIterator[OtlpReceiver]:
    """A running receiver."""
    spans, metrics = SpanStore(), list[Metric]()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_TraceService(spans), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_MetricsService(metrics), server)
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    runner = web.AppRunner(_http_app(spans, metrics))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield OtlpReceiver(
            grpc_endpoint=f"http://127.0.0.1:{grpc_port}",
            http_endpoint=f"http://127.0.0.1:{runner.addresses[0][1]}{TRACES_PATH}",
            spans=spans,
            metrics=metrics,
        )
    finally:
        await runner.cleanup()
        await server.stop(grace=None)


class _TraceService(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, spans: SpanStore) -> None:
        self._spans = spans

    async def Export(
        self,
        request: _Request,
        context: object,
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self._spans.add(read_spans(request))
        return trace_service_pb2.ExportTraceServiceResponse()


class _MetricsService(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    async def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: object
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        self._metrics.extend(_metrics_of(request))
        return metrics_service_pb2.ExportMetricsServiceResponse()


def _metrics_of(request: metrics_service_pb2.ExportMetricsServiceRequest) -> list[Metric]:
    return [
        metric
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    ]


def _http_app(spans: SpanStore, metrics: list[Metric]) -> web.Application:
    """OTLP over HTTP; Triton sends JSON."""

    async def take_metrics(request: web.Request) -> web.Response:
        body = await request.read()
        metrics.extend(
            _metrics_of(metrics_service_pb2.ExportMetricsServiceRequest.FromString(body))
        )
        return web.Response(content_type=PROTOBUF)

    async def take_traces(request: web.Request) -> web.Response:
        kind, body = request.content_type, await request.read()
        if kind not in (PROTOBUF, JSON):
            raise web.HTTPUnsupportedMediaType
        try:
            export = _from_json(body) if kind == JSON else _Request.FromString(body)
        except (DecodeError, json_format.ParseError, ValueError) as error:
            raise web.HTTPBadRequest from error
        spans.add(read_spans(export))
        return web.Response(body=b"{}" if kind == JSON else b"", content_type=kind)

    app = web.Application(client_max_size=1 << 28)
    app.router.add_post(TRACES_PATH, take_traces)
    app.router.add_post(METRICS_PATH, take_metrics)
    return app


def _from_json(body: bytes) -> _Request:
    """OTLP's JSON is protobuf's, but for ids: they are hex digits instead of base64."""
    document = json.loads(body, object_hook=_ids_in_base64)
    return json_format.ParseDict(document, _Request(), ignore_unknown_fields=True)


def _ids_in_base64(fields: dict[str, object]) -> dict[str, object]:
    for name in ("traceId", "spanId", "parentSpanId"):
        digits = fields.get(name)
        if isinstance(digits, str):
            fields[name] = base64.b64encode(bytes.fromhex(digits)).decode("ascii")
    return fields


def _summary(spans: Sequence[SpanRecord]) -> str:
    names = sorted({f"{span.service} {span.name}" for span in spans})
    return f"{len(spans)} spans: {', '.join(names)}"
