"""Speech through gateway, NATS, batcher and engine in this process: chunks of 30 s, and a worker that is lost."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from openai import AsyncOpenAI, OpenAI
from opentelemetry.trace import NoOpTracer

from gateway.config.policies import load_all
from gateway.models.speech import JoinedTexts, chunks_of
from gateway.server import Gateway
from model_workers.engine.families import load_encoder_decoder
from model_workers.engine.protocol import SequenceStep
from model_workers.remote.server import start_server
from model_workers.runners import LoopRunner
from model_workers.worker import Worker
from sluice.client import AsyncClient, Audio, Event, Notice, NoticeKind
from sluice.settings import GatewaySettings, HttpSettings, ModelSettings, Settings
from sluice.startup import free_port
from sluice.telemetry.instruments import Instruments
from tests.batcher.batchers import running_batcher, settings_of
from tests.gateway.kit.wire import is_served
from tests.support.sounds import sound, wav
from tests.support.tiny_whisper import WORDS, extractor, save_whisper, tiny_whisper

pytestmark = pytest.mark.long

CHUNK_S: Final = 30
ROOT: Final = Path(__file__).parents[2]
LONG: Final = sound(95.0, seed=7)
"""Five chunks of almost a megabyte."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSettings:
    folder = save_whisper(tmp_path_factory.mktemp("whisper"), chunk_s=CHUNK_S)
    return ModelSettings(name="ears", path=str(folder), device="cpu")


class StruckWorker:
    """A worker that can be lost."""

    def __init__(self, model: ModelSettings, address: str) -> None:
        self._model = model
        self._address = address
        self.on_step: Callable[[], None] = lambda: None
        """Called before each step that has rows."""

    async def start(self) -> None:
        engine: Any = await asyncio.to_thread(load_encoder_decoder, self._model)
        step = engine.step

        def watched(now: float) -> list[SequenceStep]:
            self.on_step()
            found: list[SequenceStep] = step(now)
            return found

        engine.step = watched
        # `start_server` serves workers of its event loop alone.
        runner = LoopRunner(asyncio.get_running_loop())
        self._worker = Worker("ears", engine, NoOpTracer(), lambda: None, runner)
        self._worker.start()
        self._server = await start_server(self._worker, self._address)

    async def stop(self) -> None:
        await self._server.stop(grace=None)
        self._worker.stop()


@asynccontextmanager
async def served(settings: Settings) -> AsyncIterator[Gateway]:
    """A gateway without a policy."""
    policies = load_all(settings)
    telemetry = NoOpTracer(), Instruments()
    gateway = Gateway(settings, "gw1", policies, *telemetry, load_all)
    async with gateway.running():
        yield gateway


def expected(pcm: bytes) -> str:
    """What transformers says of each chunk, joined."""
    joined, said = JoinedTexts(), list[int]()
    torch_model: Any = tiny_whisper(chunk_s=CHUNK_S)
    for chunk in chunks_of(pcm, CHUNK_S):
        wave = np.frombuffer(chunk, "<i2").astype(np.float32) / 32768
        asked = {"sampling_rate": 16_000, "return_tensors": "pt"}
        features = extractor(CHUNK_S)(wave, **asked).input_features
        found = torch_model.generate(features, language="en", task="transcribe", num_beams=1)
        said += joined.add([token for token in found[0].tolist() if token < WORDS])
    return "".join(f" w{token}" for token in said + joined.end())


async def heard(client: AsyncClient, pcm: bytes) -> tuple[str, list[Event]]:
    """The text, and all events."""
    audio, events = Audio(pcm, language="en", pcm=True), list[Event]()
    async with client.generate(audio, timeout_s=120) as stream:
        events = [event async for event in stream]
    return "".join(getattr(event, "text", "") for event in events), events


@asynccontextmanager
async def whole(nats_url: str, model: ModelSettings) -> AsyncIterator[tuple[Gateway, StruckWorker]]:
    """Gateway, batcher and worker."""
    address = f"127.0.0.1:{free_port()}"
    worker = StruckWorker(model, address)
    await worker.start()
    parts = {
        "gateway": GatewaySettings(address="127.0.0.1:0", drain_s=1.0),
        "http": HttpSettings(address="127.0.0.1:0"),
    }
    settings = settings_of(nats_url, address, model).model_copy(update=parts)
    async with running_batcher(settings), served(settings) as gateway:
        async with asyncio.timeout(60):
            while not is_served(gateway, "ears"):  # noqa: ASYNC110, it has no event for it
                await asyncio.sleep(0.01)
        yield gateway, worker
    await worker.stop()


async def test_texts_equal_transformers_also_when_a_worker_is_lost(
    nats_url: str, model: ModelSettings
) -> None:
    short = sound(30.0, seed=1)
    async with (
        whole(nats_url, model) as (gateway, worker),
        AsyncClient(gateway.address) as client,
    ):
        found = await asyncio.gather(heard(client, short), heard(client, LONG))
        assert [text for text, _ in found] == [expected(short), expected(LONG)]
        struck, loop, steps = asyncio.Event(), asyncio.get_running_loop(), iter(range(12))

        def strike() -> None:
            if next(steps, None) is None:
                loop.call_soon_threadsafe(struck.set)

        worker.on_step = strike
        asking = [asyncio.ensure_future(heard(client, pcm)) for pcm in (short, LONG, LONG)]
        await struck.wait()
        await worker.stop()
        assert not any(one.done() for one in asking)
        worker.on_step = lambda: None
        await worker.start()
        again = [await one for one in asking]
    assert [text for text, _ in again] == [expected(short), expected(LONG), expected(LONG)]
    kinds = {event.kind for _, events in again for event in events if isinstance(event, Notice)}
    assert kinds == {NoticeKind.RECOVERED}


async def test_openais_client_the_command_and_the_example(
    nats_url: str, model: ModelSettings, tmp_path: Path
) -> None:
    file = tmp_path / "speech.wav"
    file.write_bytes(wav(LONG))
    async with whole(nats_url, model) as (gateway, _):
        assert gateway.http is not None
        url = f"http://{gateway.http.address}/v1"
        text = await asyncio.to_thread(check_blocking_client, url, file)
        async with AsyncOpenAI(base_url=url, api_key="none") as client:
            stream = await client.audio.transcriptions.create(file=file, model="ears", stream=True)
            *deltas, done = [event async for event in stream]
        assert len(deltas) > 1
        assert "".join(event.delta for event in deltas) == done.text  # type: ignore[union-attr]
        environment = {**os.environ, "SLUICE_ADDRESS": gateway.address}
        command = ("-m", "cli", "transcribe", str(file), "--language", "en")
        plain, asked, example, wrong = await asyncio.gather(
            ran(environment, *command),
            ran(environment, *command, "--json"),
            ran(environment, "examples/transcribe.py", str(file)),
            ran(environment, "-m", "cli", "transcribe", __file__),
        )
    assert plain.stdout.strip() == json.loads(asked.stdout)["text"].strip() == text
    assert text == expected(LONG).strip()
    assert example.stdout.strip() == done.text  # type: ignore[union-attr]
    assert wrong.returncode != 0
    assert "ffmpeg" in wrong.stderr


def check_blocking_client(url: str, file: Path) -> str:
    """The text that OpenAI's client gets that blocks."""
    with OpenAI(base_url=url, api_key="none") as client, file.open("rb") as opened:
        found = client.audio.transcriptions.create(file=opened, model="ears", language="en")
    return found.text


async def ran(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    """A program of Python that has ended."""
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, *command],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120,
    )  # fmt: skip
