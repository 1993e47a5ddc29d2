"""The import contracts of pyproject.toml notice what they forbid. `scripts/check` holds the tree itself to them."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")
WRONG = {
    "gateway/__init__.py": ("batcher", "processes never import each other"),
    "sluice/errors.py": ("model_workers", "what both ends share knows no process"),
    "batcher/core/__init__.py": ("asyncio", "cores decide without I/O"),
    "gateway/streaming/__init__.py": ("time", "cores decide without I/O"),
    "simulator/__init__.py": ("torch", "a simulation runs cores"),
    "gateway/safety/__init__.py": ("gateway.server", "the gateway's layers"),
}
"""By file: a module that it must not import, and the beginning of the contract that says so."""
FLOORS_MAX = 9


def test_the_gateway_has_few_floors() -> None:
    """The longest chain of imports between its folders; a module beside them is one too."""
    graph = grimp.build_graph("gateway", cache_dir=None)
    folders = graph.find_children("gateway")
    for folder in folders:
        graph.squash_module(folder)

    def chain(folder: str) -> list[str]:
        below = graph.find_modules_directly_imported_by(folder) & folders
        return [folder, *max(map(chain, below), key=len, default=[])]

    longest = max(map(chain, folders), key=len)
    assert len(longest) <= FLOORS_MAX, longest


def test_wrong_imports_are_noticed(tmp_path: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]
    for package in contracts["root_packages"]:
        for source in (ROOT / package).rglob("*.py"):
            copy = tmp_path / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())
    for file, (imported, _) in WRONG.items():
        with (tmp_path / file).open("a", encoding="utf-8") as source_file:
            source_file.write(f"\nimport {imported}\n")

    result = subprocess.run(
        [str(LINT_IMPORTS), "--no-cache", "--config", str(ROOT / "pyproject.toml")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert result.returncode == 1, result.stdout + result.stderr
    for file, (imported, contract) in WRONG.items():
        module = ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")
        assert f"{module} -> {imported} " in result.stdout
        assert re.search(rf"^{contract}.* BROKEN\b", result.stdout, re.MULTILINE)
