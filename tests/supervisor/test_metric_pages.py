"""Pages for Prometheus that `sluice up --metrics` turns on."""

from pathlib import Path

import pytest

from sluice.settings import Settings
from supervisor.control import carried
from supervisor.serve import settings_of
from supervisor.state import Origin


def settings_with(telemetry: dict[str, object]) -> Settings:
    return Settings.model_validate({"telemetry": telemetry})


def test_metrics_adds_the_pages_that_the_file_leaves_out(tmp_path: Path) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(
        "models: [{name: small, path: 'builtin:small', engine: echo}]\n"
        "routing: {default: small}\n"
        "telemetry: {prometheus: {gateway: '[::1]:9464'}}\n"
    )
    assert settings_of(Origin(str(file)), None).telemetry.prometheus.get("batcher") is None
    pages = settings_of(Origin(str(file), metrics=True), None).telemetry.prometheus
    assert pages["gateway"] == "[::1]:9464"
    assert pages["batcher"] == pages["jobs"] == pages["triton"] == "127.0.0.1:0"
    assert "nats" not in pages


@pytest.mark.parametrize(
    ("file", "page"),
    [
        ({}, "127.0.0.1:15000"),
        ({"prometheus": {"gateway": "127.0.0.1:0"}}, "127.0.0.1:15000"),
        ({"prometheus": {"gateway": "127.0.0.1:9464"}}, "127.0.0.1:9464"),
    ],
)
def test_reload_keeps_pages_that_are_in_no_file(file: dict[str, object], page: str) -> None:
    running = settings_with({"prometheus": {"gateway": "127.0.0.1:15000"}})
    again = settings_with(file)
    assert carried(again, running).telemetry.prometheus.get("gateway") == page
