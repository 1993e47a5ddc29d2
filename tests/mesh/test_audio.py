"""Speech through a mesh that serves a Whisper model alone, which hears 30 s at a time; a worker and a batcher die."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI

from gateway.models.speech import JoinedTexts, chunks_of
from sluice import settings as config
from sluice.client import AsyncClient, Audio, Notice
from supervisor.mesh import Mesh, running_mesh
from tests.support.mesh import kill, quick_settings, stubs_of, until_counted
from tests.support.sounds import sound, wav
from tests.support.tiny_whisper import WORDS, extractor, save_whisper, tiny_whisper

pytestmark = [pytest.mark.mesh, pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

CHUNK_S: Final = 30
LONG: Final = sound(95.0, seed=7)
"""Five chunks."""
ROOT: Final = Path(__file__).parents[2]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    folder = save_whisper(tmp_path_factory.mktemp("whisper"), chunk_s=CHUNK_S)
    settings = quick_settings(
        config.ModelSettings(name="ears", path=str(folder), device="cpu"),
        http=config.HttpSettings(address="127.0.0.1:0"),
        triton=config.TritonSettings(start_s=240),
    )
    async with running_mesh(settings) as running:
        yield running


def generated(pcm: bytes) -> list[int]:
    """What transformers says of a chunk, without control tokens."""
    wave = np.frombuffer(pcm, "<i2").astype(np.float32) / 32768
    asked = {"sampling_rate": 16_000, "return_tensors": "pt"}
    features = extractor(CHUNK_S)(wave, **asked).input_features
    with torch.inference_mode():
        model: Any = tiny_whisper(chunk_s=CHUNK_S)
        found = model.generate(features, language="en", task="transcribe", num_beams=1)
    return [token for token in found[0].tolist() if token < WORDS]


def expected(pcm: bytes) -> str:
    joined, said = JoinedTexts(), []
    for chunk in chunks_of(pcm, CHUNK_S):
        said += joined.add(generated(chunk))
    return "".join(f" w{token}" for token in said + joined.end())


async def heard(client: AsyncClient, pcm: bytes) -> tuple[str, bool]:
    """The text, and whether another process continued it."""
    text, recovered = "", False
    async with client.generate(Audio(pcm, language="en", pcm=True), timeout_s=120) as stream:
        async for event in stream:
            text += getattr(event, "text", "")
            recovered |= isinstance(event, Notice)
    return text, recovered


async def test_texts_are_those_of_transformers(mesh: Mesh) -> None:
    short = sound(30.0, seed=1)
    async with AsyncClient(mesh.address) as client:
        found = await asyncio.gather(heard(client, short), heard(client, LONG))
    assert [text for text, _ in found] == [expected(short), expected(LONG)]


async def test_a_long_text_survives_the_loss_of_worker_and_batcher(mesh: Mesh) -> None:
    async with AsyncClient(mesh.address) as client:
        calm, _ = await heard(client, LONG)
        asking = [asyncio.ensure_future(heard(client, LONG)) for _ in range(4)]
        await until_counted(client, "sluice.rows.in_flight", "ears")
        os.kill(stubs_of(mesh)["ears"], signal.SIGKILL)
        await until_counted(client, "sluice.rows.resent", "ears")
        assert not all(one.done() for one in asking)
        kill(mesh, "batcher")
        disturbed = await asyncio.gather(*asking)
    assert {text for text, _ in disturbed} == {calm}


async def test_openais_client_sends_a_file(mesh: Mesh, tmp_path: Path) -> None:
    file = tmp_path / "speech.wav"
    file.write_bytes(wav(LONG))
    async with AsyncOpenAI(base_url=f"http://{mesh.http}/v1", api_key="none") as client:
        with file.open("rb") as opened:
            whole = await client.audio.transcriptions.create(
                file=opened, model="ears", language="en"
            )
        stream = await client.audio.transcriptions.create(file=file, model="ears", stream=True)
        events = [event async for event in stream]
    assert whole.text == expected(LONG).strip()
    assert events[-1].type == "transcript.text.done"
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == events[-1].text


async def test_the_command_and_the_example(mesh: Mesh, tmp_path: Path) -> None:
    file = tmp_path / "speech.wav"
    file.write_bytes(wav(LONG))
    environment = {**os.environ, "SLUICE_ADDRESS": mesh.address}

    async def run(*command: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(
            subprocess.run,
            [sys.executable, *command],
            capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120,
        )  # fmt: skip

    command = ("-m", "cli", "transcribe")
    plain, asked, example, wrong = await asyncio.gather(
        run(*command, str(file), "--language", "en"),
        run(*command, str(file), "--language", "en", "--json"),
        run("examples/transcribe.py", str(file)),
        run(*command, __file__),
    )
    assert plain.stdout.strip() == json.loads(asked.stdout)["text"].strip()
    assert plain.stdout.strip() == expected(LONG).strip()
    assert example.stdout.strip()
    assert wrong.returncode != 0
    assert "ffmpeg" in wrong.stderr
