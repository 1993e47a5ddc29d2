import sys
from pathlib import Path

import pytest

from sluice import startup


def test_a_child_reads_settings_from_its_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_NATS__PORT", "0")
    monkeypatch.setenv("SLUICE_MODELS", "[]")
    monkeypatch.setenv("SLUICE_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    environment = startup.child_environment()
    assert "SLUICE_NATS__PORT" not in environment
    assert "SLUICE_MODELS" not in environment
    assert environment["SLUICE_ADDRESS"] == "127.0.0.1:1"
    assert environment["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://127.0.0.1:4317"
    assert startup.child_environment(keep_settings=True)["SLUICE_NATS__PORT"] == "0"


def test_one_thread_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert startup.child_environment()["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert startup.child_environment()["OMP_NUM_THREADS"] == "4"


def test_our_modules_are_found_from_any_folder() -> None:
    environment = startup.child_environment()
    root = str(Path(startup.__file__).resolve().parents[1])
    assert root in environment.get("PYTHONPATH", "").split(":") + sys.path
    assert startup.module_command("batcher", Path("/c.yaml")) == (
        *(sys.executable, "-P", "-m", "batcher"),
        *("--config", "/c.yaml"),
    )
