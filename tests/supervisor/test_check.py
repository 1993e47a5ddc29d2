"""A configuration is checked whole before anything starts."""

from pathlib import Path

import pytest

from sluice.settings import SettingsError
from supervisor.check import check, load_with_policies

MODELS = "models:\n- {name: a, path: 'builtin:small', engine: echo}\n"


def problems(config: Path, text: str) -> list[str]:
    config.write_text(text)
    with pytest.raises(SettingsError) as caught:
        check(config)
    return str(caught.value).replace(f"{config}: ", "").splitlines()


def test_all_that_a_file_names_is_checked_at_once(tmp_path: Path) -> None:
    text = (
        f"{MODELS}"
        "- {name: b, path: /nowhere}\n"
        "- {name: c, path: 'builtin:medium'}\n"
        "routing:\n"
        "  default: a\n"
        "  rules:\n"
        "  - {model: a, reason: r, contains: ['(x']}\n"
        "  - {model: a, reason: r, contains: ['(y']}\n"
        "gateway: {address: '0.0.0.0:1'}\n"
        "http: {address: localhost}\n"
        "safety:\n"
        "  default: strict\n"
        "  policies: {loose: {actions: {pii.nothing: redact}}}\n"
    )
    found = problems(tmp_path / "mesh.yaml", text)
    starts = [
        "line 3: models.1: b: model folder /nowhere does not exist",
        "line 4: models.2: c: no shipped model 'builtin:medium'",
        "line 8: routing.rules.0.contains.0: missing )",
        "line 9: routing.rules.1.contains.0: missing )",
        "line 10: gateway.address: 0.0.0.0 can be reached",
        "line 11: http.address: 'localhost' is not HOST:PORT",
        "line 13: safety.default: no policy 'strict'",
        "line 14: safety.policies.loose.actions.pii.nothing: no rule",
    ]
    assert found[0] == "8 problems"
    assert [line.strip()[: len(start)] for line, start in zip(found[1:], starts, strict=True)] == (
        starts
    )


def test_a_variable_that_names_what_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_HTTP__ADDRESS", "localhost")
    (found,) = problems(tmp_path / "mesh.yaml", MODELS)
    assert found.startswith("SLUICE_HTTP__ADDRESS: http.address: 'localhost' is not HOST:PORT")


def test_a_file_that_works_gives_its_settings(tmp_path: Path) -> None:
    config = tmp_path / "mesh.yaml"
    config.write_text(MODELS)
    assert check(config) == load_with_policies(config)
    assert check(config).models[0].name == "a"
