"""`sluice config check`, as a user calls it."""

import json
from pathlib import Path

import pytest

from cli.main import run

MODELS = "models: [{name: echo, path: 'builtin:small', engine: echo}]\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mesh.yaml"
    path.write_text(MODELS)
    return path


def test_check_shows_what_a_mesh_would_serve(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["config", "check", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{file}: ok\n  models: echo (echo, builtin:small)\n  default: echo\n")
    assert run(["config", "check", str(file), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is True
    assert shown["grpc"] == "127.0.0.1:50051"


def test_check_tells_http_that_is_off_from_the_default(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for section, shown in (("", "127.0.0.1:8000 with"), ("http: {address: null}\n", "off\n")):
        file.write_text(f"{MODELS}{section}")
        assert run(["config", "check", str(file)]) == 0
        assert f"  http: {shown}" in capsys.readouterr().out


def test_check_exits_with_1_and_lists_all_problems(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(f"{MODELS}gatway: {{}}\nhttp: {{address: 5}}\n")
    assert run(["config", "check", str(file)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        f"sluice: SETUP: {file}: 2 problems",
        "  line 2: gatway: no such key; did you mean gateway?",
        "  line 3: http.address: 5 should be a valid string",
    ]
