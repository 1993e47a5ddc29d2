"""Anthropic's Messages API over HTTP, as Anthropic's own client has it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sluice.internal.v1.frame_pb2 import TASK_END_FAILED, TaskError
from tests.gateway.kit.batcher import frame
from tests.gateway.kit.http import Reply, answered, ask, send_text
from tests.gateway.kit.tokenizer import ASSISTANT, END, SYSTEM, TOOLS_TEMPLATE, USER, write_model
from tests.gateway.kit.wire import Wire

if TYPE_CHECKING:  # it takes a second to import: only the process that runs these tests does
    from anthropic import AsyncAnthropic

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
VERSION = "2023-06-01"
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}
ASKED: Any = [{"role": "user", "content": "Weather in Oslo?"}]
RESULT: Any = {"type": "tool_result", "tool_use_id": "no"}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import_module("anthropic")  # it takes seconds, in which a batcher that is there would be silent
    return write_model(tmp_path_factory.mktemp("messages"), template=TOOLS_TEMPLATE, context=2048)


@pytest.fixture
async def client(http: Wire) -> AsyncIterator[AsyncAnthropic]:
    """Anthropic's client as it is; no retries, so that errors show."""
    async with client_of(http) as made:
        yield made


def client_of(wire: Wire, **options: Any) -> AsyncAnthropic:
    settings = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
    from anthropic import AsyncAnthropic

    return AsyncAnthropic(base_url=f"http://{wire.http}", **settings)


def asked(**fields: Any) -> Any:
    return {"model": "small", "max_tokens": 64, "messages": ASKED, **fields}


async def test_message_has_the_fields_of_the_api(http: Wire, client: AsyncAnthropic) -> None:
    future = asyncio.ensure_future(client.messages.create(**asked(system="Be brief.")))
    task = await http.batcher.task()
    prompt = f"<|bos|>{SYSTEM}Be brief.{END}{USER}Weather in Oslo?{END}{ASSISTANT}"
    assert list(task.prompt_token_ids) == http.tokens(prompt)
    await send_text(http, task, "rain")
    message = await future
    (block,) = message.content
    assert (block.type, block.text) == ("text", "rain")
    assert (message.type, message.role, message.model) == ("message", "assistant", "small")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_req-")
    assert message.usage.output_tokens == len(http.tokens("rain"))
    assert message.usage.cache_creation_input_tokens == 0
    assert message.usage.cache_read_input_tokens == 0


async def test_count_is_that_of_the_message(http: Wire, client: AsyncAnthropic) -> None:
    prompt: Any = {"system": "Be brief.", "tools": [WEATHER]}
    message = await answered(http, client.messages.create(**asked(**prompt)), "rain")
    count = await client.messages.count_tokens(model="small", messages=ASKED, **prompt)
    assert count.input_tokens == message.usage.input_tokens


async def test_events_of_a_stream_in_order(http: Wire) -> None:
    reply = await answered(http, ask(http.http, MESSAGES, asked(stream=True)), "rain")
    events = events_of(reply)
    assert [kind for kind, _ in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(event["type"] == kind for kind, event in events)
    begun, ended = events[0][1]["message"], events[-2][1]
    assert (begun["content"], begun["stop_reason"]) == ([], None)
    assert begun["usage"]["input_tokens"] == ended["usage"]["input_tokens"] > 0
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert begun["id"] == f"msg_{reply.headers['request-id']}"


def events_of(reply: Reply) -> list[tuple[str, Any]]:
    events = []
    for text in reply.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = text.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


async def test_tool_runner_sends_the_conversation_itself(
    http: Wire, client: AsyncAnthropic
) -> None:
    """It asks for a thread that the server keeps first, and is told that there is none."""
    import anthropic as sdk

    @sdk.beta_async_tool(name="weather", description="Tells it.", input_schema=SCHEMA)
    async def weather(city: str) -> str:
        return f"rain in {city}"

    runner = client.beta.messages.tool_runner(**asked(tools=[weather]))
    message = await answered(http, runner.until_done(), CALL, "It rains.")
    assert message.content[0].text == "It rains."


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens: must be in [1"),
    ({"top_k": 1 << 40}, "top_k: "),
    ({"stop_sequences": ["x" * 65]}, "stop_sequences[0]: "),
    ({"stop_sequences": ["x"] * 99}, "stop_sequences: "),
    ({"messages": []}, "messages: must have 1 to"),
    ({"messages": [{"role": "user", "content": "a " * 4000}]}, "prompt is too long: "),
    (
        {"system": "Be brief.", "messages": [*ASKED, {"role": "user", "content": [RESULT]}]},
        "messages[1].content[0].tool_use_id: ",
    ),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name: "),
    ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools[0].input_schema: "),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name: "),
    ({"output_config": {"effort": "low"}}, "output_config.effort: small"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}},
        "output_config.format: ",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_wrong_is_refused_by_its_name(http: Wire, stream: bool) -> None:
    for fields, says in REFUSED:
        reply = await ask(http.http, MESSAGES, {**asked(stream=stream), **fields})
        check_error(reply, 400, "invalid_request_error", says)
    reply = await ask(http.http, MESSAGES, asked(stream=stream, model="x"))
    check_error(reply, 404, "not_found_error", "model: no model 'x'")


def check_error(reply: Reply, status: int, kind: str, says: str) -> None:
    body = reply.json
    assert body.keys() == {"type", "error", "request_id"}
    assert (reply.status, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["error"]["message"].startswith(says), body
    assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]


async def test_errors_before_the_body_is_read(http: Wire) -> None:
    for path in (MESSAGES, COUNT):
        reply = await ask(http.http, path, asked(), host="evil.example")
        check_error(reply, 403, "permission_error", "host: 'evil.example'")
        reply = await ask(http.http, path, b"{")
        check_error(reply, 400, "invalid_request_error", "the body is not JSON")
        reply = await ask(http.http, path, asked(), x_sluice_priority="high")
        check_error(reply, 400, "invalid_request_error", "x-sluice-priority: ")
        reply = await ask(http.http, path, b"", content_length="100000000")
        check_error(reply, 413, "request_too_large", "the body has")
        reply = await ask(http.http, path, method="GET")
        check_error(reply, 405, "invalid_request_error", f"GET {path} is not served")
    for path in ("/v1/messages/batches", "/v1/messages/", "/v1/complete"):
        reply = await ask(http.http, path, asked(), anthropic_version=VERSION)
        check_error(reply, 404, "not_found_error", f"POST {path} is not served")


async def test_error_in_a_stream_is_an_event(http: Wire, client: AsyncAnthropic) -> None:
    import anthropic as sdk

    async def read() -> None:
        async with client.messages.stream(**asked()) as events:
            async for _ in events:
                pass

    future = asyncio.ensure_future(read())
    task = await http.batcher.task()
    tokens = http.tokens("rain")
    await http.batcher.send(task, frame(0, tokens))
    failed = TaskError(message="no memory")
    await http.batcher.send(task, frame(len(tokens), end=TASK_END_FAILED, error=failed))
    with pytest.raises(sdk.APIStatusError) as caught:
        await future
    assert caught.value.type == "api_error"
    assert caught.value.body["request_id"].startswith("req-")  # type: ignore[index]


async def test_models_have_the_shape_of_the_caller(http: Wire, client: AsyncAnthropic) -> None:
    import anthropic as sdk

    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["auto", "small", "large"]
    assert {(model.type, model.max_input_tokens) for model in models} == {("model", 2048)}
    pages = await client.models.list(limit=2)
    assert (pages.has_more, pages.first_id, pages.last_id) == (True, "auto", "small")
    assert [model.id async for model in pages] == ["auto", "small", "large"]
    before = await client.models.list(before_id="large", limit=1)
    assert [model.id for model in before.data] == ["small"]
    small = await client.models.retrieve("small")
    assert (small.display_name, small.lifecycle, small.max_tokens) == ("small", "active", 2048)
    with pytest.raises(sdk.NotFoundError):
        await client.models.retrieve("x")
    with pytest.raises(sdk.BadRequestError, match="after_id"):
        await client.models.list(after_id="x")
    with pytest.raises(sdk.BadRequestError, match="limit"):
        await client.models.list(limit=0)
    plain = await ask(http.http, "/v1/models", method="GET")
    assert (plain.json["object"], "request-id" in plain.headers) == ("list", False)
