"""OpenTelemetry's variables: what is empty or invalid counts as not set."""

import logging

import pytest

from sluice.telemetry.environment import clean


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("OTEL_METRIC_EXPORT_INTERVAL", "", None),
        ("OTEL_METRIC_EXPORT_INTERVAL", " ", None),
        ("OTEL_METRIC_EXPORT_INTERVAL", "60s", None),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0", None),
        ("OTEL_METRIC_EXPORT_INTERVAL", "500", "500"),
        ("OTEL_BSP_SCHEDULE_DELAY", "-1", None),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "1e3", None),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", None),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "inf", None),
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.5", "0.5"),
        ("OTEL_TRACES_SAMPLER", "sometimes", None),
        ("OTEL_TRACES_SAMPLER", "ParentBased_Always_On", "ParentBased_Always_On"),
        ("OTEL_TRACES_SAMPLER_ARG", "7", None),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", None),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", None),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "none", None),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many", None),
        ("OTEL_SERVICE_NAME", "", None),
        ("OTHER", "", ""),
    ],
)
def test_clean_removes_what_the_sdk_cannot_read(name: str, value: str, kept: str | None) -> None:
    environment = {name: value}
    clean(environment)
    assert environment.get(name) == kept


def test_clean_warns_of_invalid_values_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        clean({"OTEL_METRIC_EXPORT_INTERVAL": "", "OTEL_TRACES_SAMPLER": ""})
        assert not caplog.records
        clean({"OTEL_METRIC_EXPORT_INTERVAL": "60s"})
    (line,) = caplog.messages
    assert line == "OTEL_METRIC_EXPORT_INTERVAL: '60s' is not an integer; the default is used"


def test_clean_fits_the_batch_into_the_queue() -> None:
    environment = {"OTEL_BSP_MAX_QUEUE_SIZE": "100"}
    clean(environment)
    assert environment["OTEL_BSP_MAX_EXPORT_BATCH_SIZE"] == "100"


def test_clean_turns_a_disabled_sdk_into_no_exporters() -> None:
    environment = {"OTEL_SDK_DISABLED": "TRUE", "OTEL_TRACES_EXPORTER": "otlp"}
    clean(environment)
    assert environment == {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}
    other = {"OTEL_SDK_DISABLED": "no"}
    clean(other)
    assert not other
