"""OpenTelemetry's variables: what is empty counts as not set, and what is invalid keeps no process from starting."""

import pytest

from sluice.telemetry.environment import clean
from sluice.telemetry.metrics import measuring
from sluice.telemetry.tracing import start_tracing


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("OTEL_METRIC_EXPORT_INTERVAL", "", None),
        ("OTEL_METRIC_EXPORT_INTERVAL", " ", None),
        ("OTEL_METRIC_EXPORT_INTERVAL", "500", "500"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "none", None),
        ("OTEL_SERVICE_NAME", "", None),
        ("OTHER", "", ""),
    ],
)
def test_clean_removes_empty_variables(name: str, value: str, kept: str | None) -> None:
    environment = {name: value}
    clean(environment)
    assert environment.get(name) == kept


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_METRIC_EXPORT_INTERVAL", "60s"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
        ("OTEL_METRICS_EXEMPLAR_FILTER", "some"),
        ("OTEL_BSP_SCHEDULE_DELAY", "-1"),
        ("OTEL_BSP_SCHEDULE_DELAY", "soon"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "1e3"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "100"),  # less than a batch
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_TRACES_SAMPLER", "sometimes"),
        ("OTEL_TRACES_SAMPLER_ARG", "7"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "new"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many"),
    ],
)
def test_an_invalid_variable_keeps_no_process_from_starting(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)
    clean()
    with measuring("sluice-gateway", "one") as metrics:
        start_tracing("sluice-gateway", metrics.instruments).shutdown()


def test_clean_turns_a_disabled_sdk_into_no_exporters() -> None:
    environment = {"OTEL_SDK_DISABLED": "TRUE", "OTEL_TRACES_EXPORTER": "otlp"}
    clean(environment)
    assert environment == {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}
    other = {"OTEL_SDK_DISABLED": "no"}
    clean(other)
    assert not other
