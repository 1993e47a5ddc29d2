"""What is wrong in a configuration is said in words of ours: all of it, where it is, and what was meant."""

from pathlib import Path

import pytest

from sluice import settings
from sluice.settings import SettingsError


def message_of(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mesh.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        settings.load(path)
    return str(caught.value).replace(f"{path}: ", "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "models:\n  - name: small\n    path: x\n    slot: 4\n",
            "line 4: models.0.slot: no such key; did you mean slots?",
        ),
        ("\nroutng: {default: small}\n", "line 2: routng: no such key; did you mean routing?"),
        (
            "tenants:\n  acme:\n    weigth: 2\n",
            "line 3: tenants.acme.weigth: no such key; did you mean weight?",
        ),
        ("nats: {xyz: 1}", "line 1: nats.xyz: no such key; there are url, port,"),
        ("gateway:\n  drain_s: -1\n", "line 2: gateway.drain_s: -1 is too small; use at least 0"),
        ("nats: {port: 70000}", "line 1: nats.port: 70000 is too large; use at most 65535"),
        ("nats: {port: many}", "line 1: nats.port: 'many' is not a whole number"),
        ("gateway: {drain_s: soon}", "line 1: gateway.drain_s: 'soon' is not a number"),
        ("gateway: {address: 5}", "line 1: gateway.address: 5 is not a text; put it in quotes"),
        ("jobs: 7", "line 1: jobs: 7 is not a section; write keys below it"),
        ("models: 7", "line 1: models: 7 is not a list; write [...] or lines that"),
        ("models:\n  - path: x\n", "line 2: models.0.name: is missing"),
        ("telemetry: {log_level: loud}", "'loud' is not one of debug, info, warning, error"),
        ("identity: {api_keys: perhaps}", "'perhaps' is neither true nor false"),
        ("models:\n  - {path: {{ MODEL }}}\n", "line 2, column 13: is not YAML: braces make a"),
    ],
)
def test_a_problem_is_one_line_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    message = message_of(tmp_path, text)
    assert says in message
    assert "\n" not in message


def test_all_problems_are_listed_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = "models:\n  - {name: a, path: b, slot: 4}\nroutng: {}\ngateway: {drain_s: x}\n"
    assert message_of(tmp_path, text).splitlines() == [
        "3 problems",
        "  line 2: models.0.slot: no such key; did you mean slots?",
        "  line 3: routng: no such key; did you mean routing?",
        "  line 4: gateway.drain_s: 'x' is not a number",
    ]


def test_secrets_are_not_repeated(tmp_path: Path) -> None:
    assert "hunter2" not in message_of(tmp_path, "identity: {mesh_key: hunter2}")
    assert "hunter2" not in message_of(tmp_path, "nats: {port: 'nats://me:hunter2@host'}")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("SLUICE_NATS", "nats://10.0.0.1:4222", "SLUICE_NATS: is not JSON"),
        ("SLUICE_JOBS__INPUT_PREFIXES", "s3://prompts", "SLUICE_JOBS__INPUT_PREFIXES: is not JSON"),
        ("SLUICE_GATEWAY__DRAIN_S", "soon", "SLUICE_GATEWAY__DRAIN_S: gateway.drain_s: 'soon' is"),
    ],
)
def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=says):
        settings.load()
