"""Embeddings and rerank over HTTP, as OpenAI's own client reads them."""

import asyncio
import base64
import json
import re
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from sluice.internal.v1.frame_pb2 import TASK_END_STOP
from sluice.settings import ModelSettings
from tests.gateway.kit.batcher import frame
from tests.gateway.kit.http import ask, chat
from tests.gateway.kit.wire import Wire, open_wire
from tests.support.tiny_encoders import config_of, save_reranker, save_transformer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSettings, ...]:
    encoder, reranker = (tmp_path_factory.mktemp(name) for name in ("encoder", "reranker"))
    save_transformer(encoder, config_of("bert"))
    save_reranker(reranker)
    return (
        ModelSettings(name="embed", path=str(encoder), engine="embedding"),
        ModelSettings(name="rank", path=str(reranker), engine="reranker"),
    )


@pytest.fixture
async def http(
    nats_url: str, model_folder: Path, models: tuple[ModelSettings, ...]
) -> AsyncIterator[Wire]:
    opened = open_wire(nats_url, model_folder, http="127.0.0.1:0", more_models=models)
    async with opened as wire:
        yield wire


async def answered(wire: Wire, asking: Any, model: str, *rows: tuple[float, ...]) -> Any:
    """What ``asking`` gets when its rows give these numbers."""
    future = asyncio.ensure_future(asking)
    for numbers in rows:
        task = await wire.batcher.task(model)
        whole = frame(0, end=TASK_END_STOP)
        whole.final.values = array("f", numbers).tobytes()
        await wire.batcher.send(task, whole)
    return await future


@pytest.mark.parametrize("encoding", ["float", "base64", None])
async def test_embeddings_as_openai_reads_them(
    http: Wire, openai: AsyncOpenAI, encoding: Any
) -> None:
    more = {} if encoding is None else {"encoding_format": encoding}
    asking = openai.embeddings.create(model="embed", input=["w1", "w2 w3"], dimensions=2, **more)
    found = await answered(http, asking, "embed", (1, 2), (3, 4))
    numbers = [one.embedding for one in found.data]
    if encoding == "base64":  # asked for by name, the client leaves it as it is
        numbers = [array("f", base64.b64decode(str(one))).tolist() for one in numbers]
    assert numbers == [[1, 2], [3, 4]]
    assert [one.index for one in found.data] == [0, 1]
    assert (found.model, found.usage.prompt_tokens, found.usage.total_tokens) == ("embed", 7, 7)


async def test_documents_by_score(http: Wire) -> None:
    body = {"model": "rank", "query": "w1", "documents": ["w2", {"text": "w3"}], "top_n": 1}
    async with httpx.AsyncClient(base_url=f"http://{http.http}", timeout=60) as client:
        asking = client.post("/v1/rerank", json={**body, "return_documents": True})
        found = (await answered(http, asking, "rank", (0.25,), (0.75,))).json()
    assert found["results"] == [{"index": 1, "relevance_score": 0.75, "document": {"text": "w3"}}]
    assert found["usage"]["total_tokens"] == 10


@pytest.mark.parametrize(
    ("name", "does"), [("embed", "computes embeddings"), ("rank", "scores documents")]
)
async def test_a_model_that_answers_no_prompts_is_said_so(http: Wire, name: str, does: str) -> None:
    reply = await ask(http.http, body=chat() | {"model": name})
    assert (reply.status, reply.error["param"]) == (400, "model")
    assert f"{name} {does}; prompts are answered by small, large" in reply.error["message"]


WRONG = [
    ("embeddings", {"input": [[1, 2]]}, "input: token ids are not supported"),
    ("embeddings", {"input": [1, 2]}, "input: token ids are not"),
    ("embeddings", {"input": []}, "input: must be a text"),
    ("embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format: must be one of"),
    ("embeddings", {"input": "a", "late_chunking": True}, "late_chunking: is not supported"),
    ("embeddings", {"input": ["a", " "]}, r"input\[1\]: must not be empty"),
    ("embeddings", {"input": "a", "dimensions": 99}, "dimensions: must be at most 32"),
    ("embeddings", {"input": "a", "input_type": "x"}, "input_type: must be one of query"),
    ("embeddings", {"input": "w1 " * 99}, r"context length is \d+ tokens: input: has 99 tokens"),
    ("rerank", {"query": "a", "documents": "b", "rank_fields": []}, "rank_fields: is not"),
    ("rerank", {"documents": ["b"]}, "query: must not be empty"),
]


async def test_what_is_wrong_is_named(http: Wire) -> None:
    for path, body, words in WRONG:
        async with httpx.AsyncClient(base_url=f"http://{http.http}/v1", timeout=60) as client:
            answer = await client.post(f"/{path}", json=body)
        assert answer.status_code == 400
        assert re.search(words, json.loads(answer.text)["error"]["message"])
