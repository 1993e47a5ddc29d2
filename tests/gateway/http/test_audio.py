"""Speech over HTTP, as OpenAI's own client sends it and reads its text."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.gateway.kit.speech import MODEL, say, speech_model
from tests.gateway.kit.wire import Wire, open_wire
from tests.support.sounds import sound, wav
from tests.support.tiny_whisper import LANGUAGES, NO_TIMESTAMPS, START, TASKS

PCM = sound(1.5)
FILE = ("speech.wav", wav(PCM))


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return speech_model(tmp_path_factory.mktemp("whisper"))


@pytest.fixture
async def http(nats_url: str, model_folder: Path, speech: Any) -> AsyncIterator[Wire]:
    opened = open_wire(
        nats_url, model_folder, http="127.0.0.1:0", more_models=[speech], audio_max_s=20.0
    )
    async with opened as wire:
        yield wire


async def answered(wire: Wire, asking: Any, *words: int) -> Any:
    """What ``asking`` gets when its row says these words."""
    future = asyncio.ensure_future(asking)
    task = await wire.batcher.task(MODEL)
    assert task.audio.pcm == PCM
    await say(wire, task, *words)
    return await future


async def test_a_transcription_as_openai_reads_it(http: Wire, openai: AsyncOpenAI) -> None:
    asking = openai.audio.transcriptions.create(
        file=FILE, model=MODEL, language="en", prompt="w8", temperature=0
    )
    found = await answered(http, asking, 5, 6)
    assert found.text == "w5 w6"
    assert (found.usage.type, found.usage.seconds) == ("duration", 2)


async def test_the_language_and_the_duration(http: Wire, openai: AsyncOpenAI) -> None:
    opening = (LANGUAGES["<|fr|>"], TASKS["transcribe"], NO_TIMESTAMPS)
    asking = openai.audio.transcriptions.create(
        file=FILE, model=MODEL, response_format="verbose_json"
    )
    found = await answered(http, asking, *opening, 5, 6)
    assert (found.text, found.language, found.duration) == ("w5 w6", "fr", 1.5)


async def test_a_mesh_without_such_a_model_reads_no_file(nats_url: str, model_folder: Path) -> None:
    async with open_wire(nats_url, model_folder, http="127.0.0.1:0") as wire:
        host, _, port = str(wire.http).rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = (
            "POST /v1/audio/transcriptions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99999\r\n"
        )
        writer.write(f"{head}content-type: multipart/form-data; boundary=x\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 20)
        assert b"404" in answer.splitlines()[0]
        assert b"no model of this mesh takes audio" in answer
        writer.close()


async def test_a_translation(http: Wire) -> None:
    # OpenAI's client calls its own method for this deprecated.
    async with httpx.AsyncClient(base_url=f"http://{http.http}", timeout=30) as client:
        form, url = {"model": MODEL}, "/v1/audio/translations"
        asking = asyncio.ensure_future(client.post(url, data=form, files={"file": FILE}))
        task = await http.batcher.task(MODEL)
        assert list(task.prompt_token_ids) == [START]
        assert list(task.audio.opening_token_ids) == [TASKS["translate"], NO_TIMESTAMPS]
        await say(http, task, LANGUAGES["<|fr|>"], *task.audio.opening_token_ids, 5)
        assert (await asking).json()["text"] == "w5"


async def test_a_stream_of_text(http: Wire, openai: AsyncOpenAI) -> None:
    async def read() -> list[Any]:
        stream = await openai.audio.transcriptions.create(
            file=FILE, model=MODEL, language="en", stream=True
        )
        return [event async for event in stream]

    *deltas, done = await answered(http, read(), 5, 6)
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert "".join(event.delta for event in deltas) == done.text == "w5 w6"
    assert done.type == "transcript.text.done"


NOT_SERVED = [
    ({"file": ("a.mp3", b"ID3")}, "file", "is not a WAV file; convert it: ffmpeg"),
    ({"file": ("a.wav", wav(PCM, rate=44_100))}, "file", "44100 Hz"),
    ({"response_format": "srt"}, "response_format", "json, text, verbose_json"),
    ({"timestamp_granularities": ["word"]}, "timestamp_granularities[]", "not supported"),
    ({"language": "xx"}, "language", "known: de, en, fr"),
    ({"temperature": 9}, "temperature", "must be in [0, 2]"),
    ({"model": "small"}, "model", "takes no audio"),
    ({"response_format": "text", "stream": True}, "response_format", "json with stream"),
]


async def test_what_is_not_served_is_an_error(openai: AsyncOpenAI) -> None:
    for fields, param, words in NOT_SERVED:
        given = {"file": FILE, "model": MODEL, **fields}
        with pytest.raises(BadRequestError) as raised:
            await openai.audio.transcriptions.create(**given)
        assert raised.value.param == param
        assert words in raised.value.message


async def test_files_that_are_too_long_or_no_form(http: Wire) -> None:
    async with httpx.AsyncClient(base_url=f"http://{http.http}", timeout=30) as client:
        url, form = "/v1/audio/transcriptions", {"model": MODEL}
        found = await client.post(url, data=form, files={"file": wav(bytes(2 * 16_000 * 21))})
        assert (found.status_code, found.json()["error"]["param"]) == (400, "file")
        assert "21.0 s, the limit is 20 s" in found.json()["error"]["message"]
        found = await client.post(url, data=form, files={"file": wav(bytes(2 * 16_000 * 60))})
        assert (found.status_code, found.json()["error"]["code"]) == (413, "message_too_large")
        found = await client.post(url, json=form)
        assert found.status_code == 400
        found = await client.post(url, files={"other": b"x"})
        assert found.json()["error"]["param"] == "file"
