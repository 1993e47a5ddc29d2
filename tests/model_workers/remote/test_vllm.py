"""A real vLLM behind `engine: openai`: what arrives through a worker is what it says when it is asked directly.

SLUICE_VLLM names the Python of an environment with vLLM for CPUs (bench/chat.py says how to make one).
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final
from urllib.request import Request, urlopen

import pytest
import pytest_asyncio

from bench.chat import Setup, vllm_side
from model_workers.engine.protocol import Sampling
from model_workers.remote.api import ServerApi, find_text_tokens
from model_workers.remote.client import ServerClient
from sluice.internal.v1.task_pb2 import ServerOptions
from sluice.settings import ModelSettings, resolve_model_path
from tests.support.sequences import sequence_spec

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

PYTHON: Final = os.environ.get("SLUICE_VLLM", "")
QUESTION: Final = [{"role": "user", "content": "What is 12 plus 7?"}]
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look_up",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 5}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def url() -> AsyncIterator[str]:
    if not PYTHON:
        pytest.skip("SLUICE_VLLM names no Python")
    folder = Path(resolve_model_path("builtin:large"))
    more = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    async with vllm_side(PYTHON, folder, Setup("float32", 1), "m", 1024, more) as server:
        yield f"http://{server.address}/v1"


def model(url: str, api: str, **server: Any) -> ModelSettings:
    given = {"url": url, "model": "m", "api": api, **server}
    return ModelSettings.model_validate(
        {"name": "m", "path": "builtin:large", "engine": "openai", "server": given}
    )


async def answer(
    url: str, api: str, conversation: Any, sampling: Sampling, **server: Any
) -> tuple[str, Any]:
    """The text of an answer, or its tokens, and what the server counted."""
    one = model(url, api, **server)
    assert one.server is not None
    tokens = find_text_tokens(one)
    prompt = list(conversation)
    if tokens is not None:
        prompt = [tokens.conversation, *tokens.encode(json.dumps(conversation))]
    found: list[int] = []
    async with ServerClient(ServerApi(one.server, tokens, 1024), url) as client:
        spec = sequence_spec("r", prompt, sampling)
        _, usage = await client.answer(spec, lambda ids, _: found.extend(ids))
    return (tokens.decode(found) if tokens is not None else ""), (found, usage)


async def direct(url: str, path: str, **body: Any) -> Any:
    data = json.dumps({"model": "m", "temperature": 0, **body}).encode()
    request = Request(url + path, data, {"content-type": "application/json"})

    def ask() -> Any:
        with urlopen(request, timeout=120) as response:
            return json.load(response)

    return await asyncio.to_thread(ask)


async def test_chats_and_tokens_are_those_of_vllm(url: str) -> None:
    asked = await direct(url, "/chat/completions", messages=QUESTION, max_tokens=12)
    text, (_, usage) = await answer(url, "chat", [QUESTION], Sampling(max_tokens=12))
    assert text == asked["choices"][0]["message"]["content"]
    counted = asked["usage"]
    assert (usage.prompt_tokens, usage.answer_tokens) == (
        counted["prompt_tokens"],
        counted["completion_tokens"],
    )
    asked = await direct(
        url, "/completions", prompt=[5, 6, 7], max_tokens=12, return_token_ids=True
    )
    _, (found, _) = await answer(url, "tokens", [5, 6, 7], Sampling(max_tokens=12))
    assert found == asked["choices"][0]["token_ids"]


@pytest.mark.parametrize("options", [{"call_required": True}, {"function": "look_up"}])
async def test_demanded_calls_are_made(url: str, options: Any) -> None:
    sampling = Sampling(max_tokens=200, server=ServerOptions(**options))
    text, _ = await answer(url, "chat", [QUESTION, [TOOL]], sampling)
    calls = [json.loads(one.partition("</tool_call>")[0]) for one in text.split("<tool_call>")[1:]]
    assert {one["name"] for one in calls} == {"look_up"}
    assert all(list(one["arguments"]) == ["city"] for one in calls)


async def test_formats_go_out_as_they_came(url: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    named = {"name": "x", "schema": schema}
    for shape in ({"type": "json_object"}, {"type": "json_schema", "json_schema": named}):
        options = ServerOptions(response_format=json.dumps(shape))
        text, _ = await answer(url, "chat", [QUESTION], Sampling(max_tokens=60, server=options))
        assert text.lstrip().startswith("{")


async def test_a_grammar_holds_calls_by_token_ids(url: str) -> None:
    grammar = 'start: "<tool_call>" arguments\narguments: %json {"enum": ["Oslo"]}\n'
    sampling = Sampling(max_tokens=60, grammar=grammar)
    _, (found, _) = await answer(url, "tokens", [5, 6, 7], sampling)
    tokens = find_text_tokens(model(url, "chat"))
    assert tokens is not None
    assert tokens.decode(found).startswith('<tool_call>"Oslo"')


async def test_salts_and_extra_fields_are_taken(url: str) -> None:
    variables = ServerOptions(chat_template_kwargs='{"x": false}', reasoning_effort="low")
    sampling = Sampling(max_tokens=3, server=variables)
    extra = {"extra_body": {"ignore_eos": True}, "parameters": {"cache_salt": "cache_salt"}}
    _, (found, usage) = await answer(url, "chat", [QUESTION], sampling, **extra)
    assert found
    assert usage.answer_tokens == 3
