"""Servers that others wrote, of PyPI: what arrives through a worker is what they say to a plain HTTP client.

Needs `transformers[serving]` and the extra `peers`.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.internal.v1 import frame_pb2
from sluice.settings import resolve_model_path
from sluice.startup import free_port
from tests.model_workers.remote.test_worker import Channel, running
from tests.support.gguf_model import write_gguf
from tests.support.openai_server import OpenAIServer

pytestmark = pytest.mark.long

MODEL = resolve_model_path("builtin:small")
START_S = 120.0
QUESTIONS = ("What is 12 plus 7?", "Rewrite: naïve café 中文 😀", "Extract the order number: 4711.")


@contextlib.contextmanager
def served(log: Path, *arguments: str, model: str, port: int) -> Iterator[OpenAIServer]:
    """The server of a command, ready to answer."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=out, stderr=out, env=environment
        )
    try:
        one = OpenAIServer(url=f"http://127.0.0.1:{port}/v1", model=model)
        wait_ready(one, process, log)
        yield one
    finally:
        process.terminate()
        process.wait(30)


def wait_ready(one: OpenAIServer, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(int(START_S * 10)):
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            direct(one, "hi", 1)
            return
        assert process.poll() is None, log.read_text()[-2000:]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    pytest.fail(f"not ready: {log.read_text()[-2000:]}")


def direct(one: OpenAIServer, question: str, max_tokens: int) -> Any:
    """The choice that the server itself gives."""
    body = {
        "model": one.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{one.url}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=START_S) as response:
        return json.load(response)["choices"][0]


@pytest.fixture(scope="module", params=["transformers serve", "llama-cpp-python"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenAIServer]:
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    log, where = folder / "log", ("--host", "127.0.0.1", "--port", str(port))
    if request.param == "transformers serve":
        pytest.importorskip("fastapi")
        command: tuple[str, ...] = ("-m", "transformers.cli.transformers", "serve", MODEL, *where)
        model = MODEL
    else:
        pytest.importorskip("llama_cpp")
        pytest.importorskip("gguf")
        model = str(write_gguf(folder / "small.gguf", Path(MODEL)))
        command = ("-m", "llama_cpp.server", "--model", model, "--n_ctx", "1024", *where)
    with served(log, *command, model=model, port=port) as one:
        yield one


async def ended(channel: Channel, question: str, **row: Any) -> frame_pb2.Final:
    tokens = channel.engine.client.api.tokens
    assert tokens is not None
    await channel.ask(question, prompt=tokens.encode(question), **row)
    return await channel.ended(question)


async def test_texts_are_those_of_the_server(server: OpenAIServer) -> None:
    async with running(server, "chat") as channel:
        for question in QUESTIONS:
            final = await ended(channel, question, max_tokens=40)
            choice = await asyncio.to_thread(direct, server, question, 40)
            assert channel.text(question) == choice["message"]["content"]
            end = {"length": frame_pb2.TASK_END_LENGTH}.get(
                choice["finish_reason"], frame_pb2.TASK_END_STOP
            )
            assert final.end == end, final


async def test_an_answer_that_was_begun_goes_on(server: OpenAIServer) -> None:
    async with running(server, "chat") as channel:
        question = QUESTIONS[0]
        choice = await asyncio.to_thread(direct, server, question, 40)
        text, tokens = choice["message"]["content"], channel.engine.client.api.tokens
        assert tokens is not None
        await ended(channel, question, max_tokens=40, produced=tokens.encode(text[:3]))
        assert text[:3] + channel.text(question) == text


async def test_a_cancelled_row_leaves_the_server_free(server: OpenAIServer) -> None:
    async with running(server, "chat") as channel:
        final = await ended(channel, QUESTIONS[1], max_tokens=500, timeout_ms=50)
        assert final.end in (frame_pb2.TASK_END_DEADLINE, frame_pb2.TASK_END_STOP)
        final = await ended(channel, QUESTIONS[2], max_tokens=5)
        assert final.end in (frame_pb2.TASK_END_LENGTH, frame_pb2.TASK_END_STOP)


async def test_what_the_server_refuses_is_a_typed_error(server: OpenAIServer) -> None:
    unknown = OpenAIServer(url=server.url.replace("/v1", "/v0"), model=server.model)
    async with running(unknown, "chat") as channel:
        final = await ended(channel, QUESTIONS[0])
        assert final.error.reason == "MODEL_UNAVAILABLE", final
