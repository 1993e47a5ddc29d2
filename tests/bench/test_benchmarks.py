"""Every benchmark can be imported, and a short run of it prints figures in the agreed form."""

import asyncio
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "bench").glob("*.py") if path.stem != "__init__")
SHORT = {
    "batcher": ["--runs", "1"],
    "engine": ["--runs", "1", "--figure", "engine_single_vs_generate"],
    "router": ["--runs", "1", "--decision"],
    "safety": ["--runs", "1", "--only", "output"],
    "simulation": ["--runs", "1", "--model", "small"],
}
"""Arguments of a run without a mesh."""
ON_A_MESH = {
    "jobs": ["--runs", "1", "--items", "60", "interactive"],
    "mesh": ["--runs", "1"],
    "processes": ["--runs", "1"],
    "telemetry": ["--runs", "1", "--seconds", "2"],
}


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    assert callable(importlib.import_module(f"bench.{name}").main)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHORT)
def test_a_short_run_prints_figures(name: str) -> None:
    check(figures(name, SHORT[name]))


@pytest.mark.long
@pytest.mark.mesh
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ON_A_MESH)
async def test_a_short_run_on_a_mesh_prints_figures(name: str) -> None:
    check(await asyncio.to_thread(figures, name, ON_A_MESH[name]))


def figures(name: str, arguments: list[str]) -> list[dict[str, object]]:
    result = subprocess.run(
        [sys.executable, ROOT / "bench" / f"{name}.py", "--json", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def check(found: list[dict[str, object]]) -> None:
    assert found
    for figure in found:
        assert {"figure", "ours", "peer", "ratio", "unit", "runs", "machine", "note"} <= set(figure)
        assert figure["ours"] is not None
