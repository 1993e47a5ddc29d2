"""Who may import whom: the contracts of pyproject.toml, and that they would notice."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")


def lint_imports(config: Path = ROOT / "pyproject.toml", cwd: Path = ROOT) -> tuple[int, str]:
    result = subprocess.run(
        [str(LINT_IMPORTS), "--no-cache", "--config", str(config)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return result.returncode, result.stdout + result.stderr


def test_contracts_are_kept() -> None:
    code, output = lint_imports()

    assert code == 0, output


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("gateway/__init__.py", "import batcher", "processes never import each other"),
        ("sluice/errors.py", "import model_workers", "what both ends share knows no process"),
        ("batcher/core/__init__.py", "import asyncio", "cores decide without I/O"),
        ("gateway/streaming/__init__.py", "from time import monotonic", "cores decide without I/O"),
    ],
)
def test_a_wrong_import_would_be_noticed(
    tmp_path: Path, module: str, line: str, broken: str
) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for package in settings["tool"]["importlinter"]["root_packages"]:
        for source in (ROOT / package).rglob("*.py"):
            copy = tmp_path / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())
    changed = tmp_path / module
    changed.write_text(f"{changed.read_text(encoding='utf-8')}\n{line}\n", encoding="utf-8")

    code, output = lint_imports(cwd=tmp_path)

    assert code != 0
    assert any(broken in text and "BROKEN" in text for text in output.splitlines()), output
