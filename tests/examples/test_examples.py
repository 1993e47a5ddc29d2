"""The programs and configurations of examples/ do what examples/README.md says."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sluice.client import Answer, AsyncClient
from sluice.settings import load, resolve_model_path
from supervisor.mesh import Mesh, running_mesh
from tests.support.mesh import RunningMesh

pytestmark = pytest.mark.mesh

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
README = ROOT / "README.md"
BOUND_S = 60.0


async def run(name: str, address: str) -> str:
    """What a program prints that ends well."""
    return await run_python([EXAMPLES / name], address)


async def run_python(arguments: Sequence[str | Path], address: str) -> str:
    result = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, *arguments],
        env={**os.environ, "SLUICE_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@asynccontextmanager
async def example_mesh(name: str) -> AsyncIterator[Mesh]:
    """A mesh of a configuration, on a free port."""
    settings = load(EXAMPLES / name)
    gateway = settings.gateway.model_copy(update={"address": "127.0.0.1:0", "drain_s": 1.0})
    async with running_mesh(settings.model_copy(update={"gateway": gateway})) as mesh:
        yield mesh


async def test_python_of_readme(mesh: RunningMesh) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)

    assert await run_python(["-c", program], mesh.address) == "7, 19, 31"


async def test_stream(mesh: RunningMesh) -> None:
    answer, figures = (await run("stream.py", mesh.address)).splitlines()

    assert answer == "small: 7, 19, 31"
    assert "tokens, the first after " in figures


async def test_stream_async(mesh: RunningMesh) -> None:
    lines = (await run("stream_async.py", mesh.address)).splitlines()

    assert lines == [
        "Sort ascending: 31, 7, 19",
        "  7, 19, 31",
        "What is the total of 12, 30?",
        "  Units first: 2100 +0300 =2400",
        "  Total: 42",
        "Which label fits this ticket? My lamp arrived broken.",
        "  damaged",
    ]


def test_transcribe_without_a_file_says_how_to_call_it() -> None:
    command = [sys.executable, str(EXAMPLES / "transcribe.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S)

    assert (result.returncode, result.stderr) == (
        1,
        "usage: python examples/transcribe.py FILE.wav\n",
    )


async def test_prompts_of_the_batch_examples(mesh: RunningMesh) -> None:
    lines = (EXAMPLES / "batch/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]

    async with AsyncClient(mesh.address) as client:
        batch = await client.generate_batch(prompts, model="small")

    assert [outcome.text for outcome in batch.outcomes if isinstance(outcome, Answer)] == [
        "3, 7, 12",
        "1, 4, 9",
    ]


@pytest.mark.long
async def test_cascade() -> None:
    async with example_mesh("cascade.yaml") as mesh:
        easy, hard = (await run("cascade.py", mesh.address)).splitlines()

    assert easy.startswith("small: '3, 7, 12' (tokens: small ")
    assert "large" not in easy
    assert hard.startswith("large: 'Units first: ")
    assert "Total: 2368' (tokens: small " in hard
    assert ", large " in hard


@pytest.mark.long
async def test_a_hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The hub's cache as a download leaves it, with another model under the name.
    hub = tmp_path / "hub"
    folder = hub / "models--Qwen--Qwen3-0.6B"
    shutil.copytree(resolve_model_path("builtin:large"), folder / "snapshots/0a1b2c")
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("0a1b2c")
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))

    async with example_mesh("hub_model.yaml") as mesh, AsyncClient(mesh.address) as client:
        asked = "Sort ascending: 812, 77, 340, 265"
        answer = await client.generate(asked, timeout_s=BOUND_S).answer()

    assert (answer.model, answer.text) == ("qwen", "77, 265, 340, 812")


def test_models_of_other_servers() -> None:
    settings = load(EXAMPLES / "remote_models.yaml")
    assert [model.server is not None for model in settings.models] == [True, True]
