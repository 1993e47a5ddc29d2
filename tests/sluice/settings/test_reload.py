"""What a running process may change of its configuration."""

from pathlib import Path

import pytest

from sluice.settings import Settings, SettingsError, load
from sluice.settings.reload import refuse_changes


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("batcher: {drain_s: 9}", "batcher.drain_s"),
        ("routing: {rules: []}", "routing.rules"),
        ("models: [{name: small, path: x}, {name: large, path: y}]", "models.0.path"),
    ],
)
def test_the_key_that_cannot_change_is_named(tmp_path: Path, text: str, key: str) -> None:
    path = tmp_path / "other.yaml"
    path.write_text(text)
    fixed = [name for name in Settings.model_fields if name != "safety"]
    refuse_changes(Settings(), Settings(safety={"default": "x"}), fixed)
    with pytest.raises(SettingsError, match=rf"^{key}: cannot be changed while running"):
        refuse_changes(Settings(), load(path), fixed)


def test_both_values_of_a_key_that_cannot_change_are_named() -> None:
    endpoint = "telemetry.otlp_http_endpoint"
    running = Settings(telemetry={"otlp_http_endpoint": "http://c:4318"})
    says = rf"{endpoint}: cannot be changed while running \(running: 'http://c:4318', new: unset\)"
    with pytest.raises(SettingsError, match=says):
        refuse_changes(running, Settings(), ["telemetry"])
    secret = Settings(identity={"mesh_key": "0123456789abcdef"})
    with pytest.raises(SettingsError) as caught:
        refuse_changes(secret, Settings(), ["identity"])
    assert "0123456789abcdef" not in str(caught.value)
