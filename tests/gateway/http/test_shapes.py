"""Bodies as foreign clients send them, without the clients: what is harmless in them is taken."""

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import pytest

from sluice.internal.v1.task_pb2 import Task
from tests.gateway.kit.batcher import last
from tests.gateway.kit.http import CHAT, Reply, ask, chat
from tests.gateway.kit.tokenizer import ASSISTANT, END, SYSTEM, TOOLS_TEMPLATE, USER, write_model
from tests.gateway.kit.wire import Wire

RESPONSES: Final = "/v1/responses"
CITY: Final = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: Final = {"name": "weather", "description": "Tells the weather.", "parameters": CITY}
ARGUMENTS: Final = json.dumps({"city": "Oslo"})
CALLED: Final = (
    f"<tool_call>{json.dumps({'name': 'weather', 'arguments': {'city': 'Oslo'}})}</tool_call>"
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("shapes"), template=TOOLS_TEMPLATE, context=2048)


async def asked(wire: Wire, path: str, body: dict[str, Any]) -> tuple[Reply, Task]:
    """The answer to a body that is served, and its task."""
    asking = asyncio.ensure_future(ask(wire.http, path, body))
    tasking = asyncio.ensure_future(wire.batcher.task())
    await asyncio.wait({asking, tasking}, return_when=asyncio.FIRST_COMPLETED)
    if asking.done():
        tasking.cancel()
        raise AssertionError(asking.result().body.decode())
    task = await tasking
    await wire.batcher.send(task, last(0, wire.tokens("yes")))
    reply = await asking
    assert reply.status == 200
    return reply, task


async def prompted(wire: Wire, path: str, body: dict[str, Any], end: str) -> None:
    """The prompt of a body ends with ``end``."""
    _, task = await asked(wire, path, body)
    expected = wire.tokens(end)
    assert list(task.prompt_token_ids)[-len(expected) :] == expected


TURNS: Final[list[tuple[list[dict[str, Any]], str]]] = [
    # A name of a speaker, and marks for the caches of others.
    (
        [
            {"role": "system", "content": "s", "name": "x", "cache_control": {"type": "ephemeral"}},
            {"role": "user", "content": "u", "name": "me", "provider_specific_fields": {}},
        ],
        f"{SYSTEM}s{END}{USER}u{END}{ASSISTANT}",
    ),
    # Several system messages, and one behind a user's.
    (
        [
            {"role": "system", "content": "a"},
            {"role": "developer", "content": "b"},
            {"role": "user", "content": "u"},
            {"role": "system", "content": "c"},
        ],
        f"{SYSTEM}a\n\nb{END}{USER}u{END}{SYSTEM}c{END}{ASSISTANT}",
    ),
    # An answer comes last, or one that was empty, or refused.
    (
        [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}],
        f"{USER}u{END}{ASSISTANT}a{END}{ASSISTANT}",
    ),
    (
        [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": None, "refusal": None},
            {"role": "user", "content": ""},
            {"role": "assistant", "content": None, "refusal": "no"},
            {"role": "user", "content": "v"},
        ],
        f"{USER}u{END}{ASSISTANT}{END}{USER}{END}{ASSISTANT}no{END}{USER}v{END}{ASSISTANT}",
    ),
    # LiteLLM's message of an answer with calls, as `model_dump()` gives it, and a result with the function's name.
]


async def test_messages_that_clients_send_back(http: Wire) -> None:
    tools = [{"type": "function", "function": {**FUNCTION, "strict": None}, "cache_control": {}}]
    for turns, prompt in TURNS:
        await prompted(http, CHAT, chat(messages=turns, tools=tools), prompt)


ITEMS: Final[list[tuple[list[dict[str, Any]], str]]] = [
    # `model_dump()` of the output of a response, with all its nulls.
    (
        [
            {"role": "user", "content": "u", "type": None},
            {
                "id": "rs_1",
                "summary": [],
                "type": "reasoning",
                "content": None,
                "encrypted_content": None,
                "status": None,
            },
            {
                "id": "msg_1",
                "content": [
                    {"annotations": [], "text": "I look.", "type": "output_text", "logprobs": None}
                ],
                "role": "assistant",
                "status": "completed",
                "type": "message",
                "phase": None,
            },
            {
                "arguments": ARGUMENTS,
                "call_id": "call_1",
                "name": "weather",
                "type": "function_call",
                "id": "fc_1",
                "async_": None,
                "caller": None,
                "namespace": None,
                "status": "completed",
            },
            {
                "call_id": "call_1",
                "output": [{"type": "input_text", "text": "rain"}],
                "type": "function_call_output",
                "id": None,
                "status": None,
            },
        ],
        f"{USER}u{END}{ASSISTANT}I look.{CALLED}{END}{USER}rain{END}{ASSISTANT}",
    ),
    (
        [{"role": "user", "content": "u"}, {"role": "assistant", "content": ""}],
        f"{USER}u{END}{ASSISTANT}{END}{ASSISTANT}",
    ),
]
TAKEN_BY_RESPONSES: Final = {
    "store": True,
    "service_tier": "default",
    "prompt_cache_key": "k",
    "safety_identifier": "u-1",
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": None, "summary": "auto"},
    "text": {"verbosity": "medium", "format": {"type": "text"}},
    "max_tool_calls": 3,
    "truncation": "disabled",
}


async def test_items_that_clients_send_back(http: Wire) -> None:
    tools = [{"type": "function", **FUNCTION, "strict": None, "description": None}]
    for items, prompt in ITEMS:
        body = {"model": "small", "input": items, "tools": tools, **TAKEN_BY_RESPONSES}
        await prompted(http, RESPONSES, body, prompt)


async def test_instructions_come_before_a_system_message(http: Wire) -> None:
    items = [{"role": "system", "content": "b"}, {"role": "user", "content": "u"}]
    body = {"model": "small", "instructions": "a", "input": items}
    await prompted(http, RESPONSES, body, f"{SYSTEM}a\n\nb{END}{USER}u{END}{ASSISTANT}")


async def test_a_completion_has_16_tokens_where_nobody_says_more(http: Wire) -> None:
    _, task = await asked(http, "/v1/completions", {"model": "small", "prompt": "hello"})
    assert task.sampling.max_tokens == 16
    _, task = await asked(
        http, "/v1/completions", {"model": "small", "prompt": "hello", "min_tokens": 20}
    )
    assert (task.sampling.min_tokens, task.sampling.max_tokens) == (20, 20)
    _, task = await asked(http, CHAT, chat())
    assert task.sampling.max_tokens > 1000
