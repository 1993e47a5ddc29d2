from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from model_workers.deploy import PARAMETER, render_repository
from sluice.settings import ModelSettings, Settings
from sluice.settings.routing import RoutingSettings


def parsed(path: Path) -> model_config_pb2.ModelConfig:
    config = model_config_pb2.ModelConfig()
    text_format.Parse(path.read_text(encoding="utf-8"), config)
    return config


def settings_in(path: Path) -> ModelSettings:
    return ModelSettings.model_validate_json(parsed(path).parameters[PARAMETER].string_value)


def test_both_tiers_are_in_the_repository_of_the_defaults(tmp_path: Path) -> None:
    render_repository(Settings(), tmp_path)
    files = sorted(
        str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*") if path.is_file()
    )
    assert files == [
        f"{tier}/{name}" for tier in ("large", "small") for name in ("1/model.py", "config.pbtxt")
    ]


def test_rendered_configuration_carries_the_settings(tmp_path: Path) -> None:
    folder = tmp_path / 'a "quoted" Ordner ü'
    folder.mkdir()
    model = ModelSettings(name="echo", path=str(folder), engine="echo", slots=7)
    render_repository(
        Settings(models=(model,), routing=RoutingSettings(default="echo")), tmp_path / "out"
    )
    path = tmp_path / "out" / "echo" / "config.pbtxt"
    config = parsed(path)
    assert (config.name, config.backend, config.max_batch_size) == ("echo", "python", 0)
    assert config.model_transaction_policy.decoupled
    assert [(t.name, list(t.dims)) for t in config.input] == [("request", [-1])]
    assert [(t.name, list(t.dims)) for t in config.output] == [("response", [-1])]
    assert settings_in(path) == model


def test_every_worker_of_a_model_is_a_triton_model(tmp_path: Path) -> None:
    model = ModelSettings(name="echo", path="none", engine="echo", replicas=3)
    render_repository(Settings(models=(model,), routing=RoutingSettings(default="echo")), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["echo", "echo.1", "echo.2"]
    path = tmp_path / "echo.2" / "config.pbtxt"
    assert parsed(path).name == "echo.2"
    assert settings_in(path) == model


def test_relative_folders_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in ("models", "./models"):
        model = ModelSettings(name="echo", path=path, engine="echo")
        render_repository(
            Settings(models=(model,), routing=RoutingSettings(default="echo")), tmp_path / "out"
        )
        rendered = settings_in(tmp_path / "out" / "echo" / "config.pbtxt")
        assert rendered.path == str(tmp_path / "models")
