"""Every benchmark can be imported, and a short run of it prints figures in the agreed form."""

import asyncio
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.support import transformers_sides
from bench.support.llama_model import LARGE
from bench.support.setup import CACHE_GB, Setup
from model_workers.engine.forward.flash import FLASH_BLOCK_TOKENS

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "bench").glob("*.py") if path.stem != "__init__")
SHORT = {
    "engine": ["--runs", "1", "--figure", "engine_single_vs_generate"],
    "router": ["--runs", "1", "--n", "3"],
    "simulation": ["--runs", "1", "--model", "small"],
}
"""Arguments of a run without a mesh."""
ON_A_MESH = {
    "admission": ["--runs", "1", "--seconds", "5", "--load", "0.9"],
    "jobs": ["--runs", "1", "--items", "60", "throughput"],
    "mesh": ["--runs", "1", "echo"],
    "policies": ["--runs", "1", "--seconds", "2"],
    "processes": ["--runs", "1"],
    "tails": ["--runs", "1", "bulk"],
    "telemetry": ["--runs", "1"],
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
        # A single run has too few calls.
        assert figure["ours"] is not None or str(figure["figure"]).endswith("_p99")


@pytest.mark.parametrize("size", transformers_sides.CUDA_SIZES, ids=str)
def test_peer_on_a_gpu_leaves_memory_for_the_next(
    size: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_sides, "load", lambda *_: None)
    made = transformers_sides.Manager(
        tmp_path, "cuda", "bfloat16", 128, 768, attention="sdpa", **size
    )
    assert made._config.num_blocks == 640


def test_two_sides_of_a_benchmark_fit_on_a_card_of_80_gb(tmp_path: Path) -> None:
    work = Setup(tmp_path, LARGE, "cuda", "bfloat16", 2, 5).batch
    # Every running row keeps a block in reserve (`Scheduler`): with less they would not run all at once.
    blocks = work.rows * (-(-(work.longest + work.new_tokens) // FLASH_BLOCK_TOKENS) + 1)
    embeddings = 2 * LARGE.hidden * LARGE.vocab
    assert blocks * FLASH_BLOCK_TOKENS * LARGE.cache_bytes_per_token < CACHE_GB * 1e9
    assert 2 * (LARGE.weight_bytes + embeddings + CACHE_GB * 1e9) < 70e9
