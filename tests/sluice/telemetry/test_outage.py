"""An OTLP endpoint that is down, slow, or answers errors: said once, its loss is counted, and nobody waits for it."""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event, Semaphore, Thread

import grpc
import pytest

from sluice.startup import free_port
from sluice.telemetry.instruments import Instruments
from sluice.telemetry.metrics import measuring
from sluice.telemetry.tracing import SHUTDOWN_S, start_tracing

WAIT_S = 20.0
Export = Callable[[grpc.ServicerContext], None]


class Collector(grpc.GenericRpcHandler):
    """Does something else than to take spans and metrics."""

    def __init__(self, export: Export) -> None:
        self._export = export

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self._answer)

    def _answer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self._export(context)
        return b""


@contextmanager
def collector(export: Export) -> Iterator[str]:
    """Gives the endpoint."""
    server = grpc.server(ThreadPoolExecutor(4), handlers=[Collector(export)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait(WAIT_S)


@pytest.fixture(params=["down", "slow", "errors"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """One that takes nothing."""
    ended = Event()

    def fail(context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "traces are not taken here")

    def hang(_: grpc.ServicerContext) -> None:
        ended.wait(WAIT_S)

    if request.param == "down":
        yield f"http://127.0.0.1:{free_port('127.0.0.1', set())}"
        return
    with collector(hang if request.param == "slow" else fail) as address:
        yield address
        ended.set()


def lost(instruments: Instruments) -> dict[str, float]:
    """Spans by why they were lost; under "" those that were taken."""
    (found,) = (
        points
        for metric, points in instruments.collect()
        if metric.name == "otel.sdk.exporter.span.exported"
    )
    return {labels[0]: float(value) for labels, value in found if isinstance(value, int | float)}


def test_it_is_said_once_and_the_loss_is_counted(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    instruments = Instruments()
    with caplog.at_level(logging.INFO):
        tracing = start_tracing("sluice-test", instruments)
        for count in (1, 2, 3):
            tracing.tracer.start_span("one").end()
            while sum(lost(instruments).values()) < count:
                time.sleep(0.01)
        counted = lost(instruments)
        said = [one.message for one in caplog.records if one.name.startswith("sluice.")]
        tracing.shutdown()
    assert counted == {"": 0, "export_failed": 3, "queue_full": 0}
    assert said == [f"OTLP export of traces to {endpoint} failed, dropping data"]


def test_who_ends_a_span_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    came, ended = Event(), Event()

    def hold(_: grpc.ServicerContext) -> None:
        came.set()
        assert ended.wait(WAIT_S)

    with collector(hold) as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        instruments = Instruments()
        tracing = start_tracing("sluice-test", instruments)
        tracer = tracing.tracer
        for _ in range(4):
            tracer.start_span("one").end()
        assert came.wait(WAIT_S)
        for _ in range(20):
            tracer.start_span("one").end()
        assert lost(instruments)[""] == 0
        assert lost(instruments)["queue_full"] >= 12
        ended.set()
        tracing.shutdown()
        counted = lost(instruments)
    assert (counted[""] + counted["queue_full"], counted["export_failed"]) == (24, 0)
    assert not [one for one in caplog.records if one.name.startswith("sluice.")]


def test_that_metrics_are_not_taken_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    came = Semaphore(0)

    def fail(context: grpc.ServicerContext) -> None:
        came.release()
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "traces alone")

    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
    monkeypatch.delenv("OTEL_METRICS_EXPORTER", raising=False)
    with collector(fail) as endpoint, caplog.at_level(logging.INFO):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        with measuring("sluice-test", "one") as metrics:
            metrics.instruments.counter("sluice.requests")["", "bulk", "stop"] += 1
            assert all(came.acquire(timeout=WAIT_S) for _ in range(3))
    (said,) = [one.message for one in caplog.records if one.name.startswith("sluice.")]
    assert said == f"OTLP export of metrics to {endpoint} failed, dropping data"


@pytest.mark.parametrize("endpoint", ["down", "slow"], indirect=True)
def test_the_end_of_a_process_does_not_wait_for_it(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    # With the SDK's own bounds an export takes 10 s, and the end of a process 30 s.
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TIMEOUT", raising=False)
    tracing = start_tracing("sluice-test", Instruments())
    tracing.tracer.start_span("one").end()
    ending = Thread(target=tracing.shutdown, daemon=True)
    ending.start()
    ending.join(4 * SHUTDOWN_S)
    assert not ending.is_alive()
