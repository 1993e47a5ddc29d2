"""Which exporters a process has, where they send to, and what a process is called there."""

import asyncio
from collections.abc import Callable

import pytest

from sluice.telemetry import names
from sluice.telemetry.catalog import METRICS
from sluice.telemetry.environment import clean
from sluice.telemetry.exporters import (
    exporter_kinds,
    make_exporters,
    resource_of,
    triton_endpoint,
)
from sluice.telemetry.instruments import Reported
from sluice.telemetry.metrics import measuring
from sluice.telemetry.tracing import start_tracing
from tests.support.otlp import TRACES_PATH, otlp_receiver

OTLP = "OTEL_EXPORTER_OTLP_"
SET = Callable[..., None]


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> SET:
    """Sets OpenTelemetry's variables; all others are unset."""
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "METRICS_ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL"):
        monkeypatch.delenv(f"{OTLP}{name}", raising=False)
    for name in ("SERVICE_NAME", "RESOURCE_ATTRIBUTES", "TRACES_EXPORTER", "METRICS_EXPORTER"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)

    def set_all(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(f"OTEL_{name}", value)

    return set_all


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({}, []),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, ["grpc"]),
        ({"EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, ["grpc"]),
        ({"EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4317"}, []),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c:4317", "TRACES_EXPORTER": "none"}, []),
        ({"TRACES_EXPORTER": "otlp"}, ["grpc"]),
        ({"TRACES_EXPORTER": "console"}, ["console"]),
        ({"TRACES_EXPORTER": "console, OTLP,console"}, ["console", "grpc"]),
        ({"TRACES_EXPORTER": "otlp", "EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, ["http"]),
        ({"TRACES_EXPORTER": "otlp", "EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, ["http"]),
        ({"TRACES_EXPORTER": "zipkin"}, []),
    ],
)
def test_exporters_are_those_of_the_variables(
    values: dict[str, str], kinds: list[str], variables: SET
) -> None:
    variables(**values)
    found = [
        next(
            word
            for word in ("grpc", "http", "console")
            if word in f"{kind.__module__}{kind}".lower()
        )
        for kind in exporter_kinds("traces")
    ]
    assert found == kinds


def test_unknown_exporter_is_named(caplog: pytest.LogCaptureFixture, variables: SET) -> None:
    variables(METRICS_EXPORTER="zipkin")
    assert exporter_kinds("metrics") == []
    assert caplog.messages == [
        "OTEL_METRICS_EXPORTER: no exporter is named 'zipkin'; it is left out"
    ]


def test_exporter_that_fails_to_start_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("no such file")

    kind: type = fail  # type: ignore[assignment]
    assert make_exporters("traces", [kind]) == []
    assert caplog.messages == ["export of traces failed to start: no such file"]


def test_resource_takes_what_the_operator_sets(variables: SET) -> None:
    of = resource_of("sluice-gateway", "g1").attributes
    assert (of["service.name"], of["service.instance.id"]) == ("sluice-gateway", "g1")
    variables(RESOURCE_ATTRIBUTES="deployment.environment=prod,service.instance.id=pod-7")
    of = resource_of("sluice-gateway", "g1").attributes
    assert (of["deployment.environment"], of["service.instance.id"]) == ("prod", "pod-7")
    variables(SERVICE_NAME="llm")
    assert resource_of("sluice-gateway").attributes["service.name"] == "llm"


@pytest.mark.parametrize(
    ("values", "setting", "url"),
    [
        ({}, None, None),
        ({}, "http://t:1/v1/traces", "http://t:1/v1/traces"),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, None, "http://c:4318/v1/traces"),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, "none", None),
        ({"EXPORTER_OTLP_ENDPOINT": "http://[::1]:4317"}, None, "http://[::1]:4318/v1/traces"),
        ({"EXPORTER_OTLP_TRACES_ENDPOINT": "c:4317"}, None, "http://c:4318/v1/traces"),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c:1", "TRACES_EXPORTER": "none"}, "http://t:1", None),
        ({"TRACES_EXPORTER": "otlp"}, None, "http://localhost:4318/v1/traces"),
        (
            {"EXPORTER_OTLP_ENDPOINT": "http://c:9/", "EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            None,
            "http://c:9/v1/traces",
        ),
    ],
)
def test_triton_sends_to_the_http_endpoint(
    values: dict[str, str], setting: str | None, url: str | None, variables: SET
) -> None:
    variables(**values)
    assert triton_endpoint(setting) == url


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_both_signals_leave_with_each_protocol(protocol: str, variables: SET) -> None:
    async with otlp_receiver() as receiver:
        endpoint = receiver.grpc_endpoint if protocol == "grpc" else receiver.http_endpoint
        endpoint = endpoint.removesuffix(TRACES_PATH)
        variables(EXPORTER_OTLP_ENDPOINT=endpoint, EXPORTER_OTLP_PROTOCOL=protocol)
        await asyncio.to_thread(send_one_of_each)
        assert [span.name for span in receiver.spans.snapshot()] == ["call"]
        assert {metric.name for metric in receiver.metrics} == {
            "sluice.requests",
            "otel.sdk.exporter.span.exported",
        }


async def test_disabled_sdk_counts_and_sends_nothing(variables: SET) -> None:
    async with otlp_receiver() as receiver:
        variables(TRACES_EXPORTER="otlp", METRICS_EXPORTER="otlp", SDK_DISABLED="true")
        variables(EXPORTER_OTLP_ENDPOINT=receiver.grpc_endpoint)
        clean()
        await asyncio.to_thread(send_one_of_each)
        assert not receiver.spans.snapshot()
        assert not receiver.metrics


def send_one_of_each() -> None:
    with measuring(names.SERVICE_JOBS, "one") as metrics:
        tracing = start_tracing(names.SERVICE_JOBS, metrics.instruments)
        metrics.instruments.counter("sluice.requests")["", "bulk", "stop"] += 1
        tracing.tracer.start_span("call").end()
        tracing.shutdown()
        counted = [metric.name for metric, _ in metrics.instruments.collect()]
    assert "sluice.requests" in counted


async def test_histograms_leave_with_true_bounds(variables: SET) -> None:
    async with otlp_receiver() as receiver:
        variables(EXPORTER_OTLP_ENDPOINT=receiver.grpc_endpoint)
        await asyncio.to_thread(record_two)
        points = {one.name: one.histogram.data_points[0] for one in receiver.metrics}
    own, reported = (
        points["sluice.queue.wait"],
        points["sluice.worker.step.duration"],
    )
    assert (own.count, own.min, own.max) == (2, 0.2, 0.6)
    assert (reported.count, reported.min, reported.max) == (2, 0.1, 0.3)


def record_two() -> None:
    with measuring(names.SERVICE_BATCHER, "one") as metrics:
        wait = metrics.instruments.histogram("sluice.queue.wait")
        wait.record(("small", "bulk"), 0.2)
        wait.record(("small", "bulk"), 0.6)
        buckets = [2] + [0] * len(METRICS["sluice.worker.step.duration"].bounds)
        step = Reported(buckets, 0.4, 0.1, 0.3)
        metrics.instruments.report("sluice.worker.step.duration", lambda: [(("small", "w"), step)])


def test_an_end_does_not_wait_for_a_dead_collector(
    variables: SET, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the exporters would try for seconds; nothing was exported before, so no outage is known."""
    variables(EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
    with measuring(names.SERVICE_GATEWAY, "g") as metrics:
        tracing = start_tracing(names.SERVICE_GATEWAY, metrics.instruments)
        tracing.tracer.start_span("last").end()
        tracing.shutdown()
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [
        "dropped the last traces",
        "dropped the last metrics",
    ]
