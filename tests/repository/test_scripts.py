"""The scripts say clearly what is missing, and the checks compare protos with what was committed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    "tar",
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
    for name in ("scripts", "protos"):
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


def check_lines(checkout: Path) -> list[str]:
    """What scripts/check says of the protos."""
    # Only the protos are here, so the other checks have nothing to say that matters.
    result = run(checkout / "scripts/check", PYTHON=sys.executable, PATH=os.environ["PATH"])
    return [line for line in result.stdout.splitlines() if "buf-breaking" in line]


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
    digest = subprocess.run(
        ["sha256sum", "pyproject.toml"], cwd=checkout, capture_output=True, text=True, check=True
    ).stdout.split()[0]
    (checkout / ".venv/.sluice-environment").write_text(f"{digest} dev\n", encoding="utf-8")

    for arguments in ((), ("dev",)):
        result = run(checkout / "scripts/environment", *arguments, PATH=str(tools))
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_protos_of_a_first_commit_have_nothing_to_be_compared_with(checkout: Path) -> None:
    (line,) = check_lines(checkout)

    assert line.startswith("ok ")
    assert "no earlier commit" in line


def test_a_removed_field_is_breaking_before_and_after_it_is_committed(checkout: Path) -> None:
    proto = checkout / "protos/sluice/v1/inference.proto"
    text = proto.read_text(encoding="utf-8")
    comment, field = "  // The text of the turn.\n", "  string content = 2;\n"
    assert comment + field in text
    proto.write_text(text.replace(comment + field, ""), encoding="utf-8")

    assert check_lines(checkout)[0].startswith("FAILED")
    commit(checkout, "second")
    assert check_lines(checkout)[0].startswith("FAILED")


def test_an_added_field_is_fine(checkout: Path) -> None:
    proto = checkout / "protos/sluice/v1/inference.proto"
    text = proto.read_text(encoding="utf-8")
    proto.write_text(
        text.replace("message Usage {", "message Usage {\n  // New.\n  string note = 99;"),
        encoding="utf-8",
    )

    (line,) = check_lines(checkout)

    assert line.startswith("ok ")
    assert "against" in line


def test_a_shallow_clone_says_that_it_cannot_compare(checkout: Path, tmp_path: Path) -> None:
    (checkout / "note").write_text("more history", encoding="utf-8")
    commit(checkout, "second")
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{checkout}", "shallow")

    (line,) = check_lines(tmp_path / "shallow")

    assert line.startswith("ok ")
    assert "no earlier commit" in line
