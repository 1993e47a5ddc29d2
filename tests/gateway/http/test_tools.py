"""Tools, several answers and /v1/responses over HTTP, as OpenAI's own client has them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai as sdk
import pytest
from openai import AsyncOpenAI

from sluice.internal.v1.frame_pb2 import TASK_END_FAILED, TASK_END_LENGTH, TaskError
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.http import Connection, answered, ask
from tests.gateway.kit.tokenizer import ASSISTANT, END, TOOLS_TEMPLATE, USER, write_model
from tests.gateway.kit.wire import Wire

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
WEATHER: Any = {"type": "function", "function": FUNCTION}
ASKED: Any = [{"role": "user", "content": "Weather in Oslo?"}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tools"), template=TOOLS_TEMPLATE, context=2048)


async def read(asking: Any) -> list[Any]:
    return [chunk async for chunk in await asking]


async def test_a_conversation_with_a_tool(http: Wire, openai: AsyncOpenAI) -> None:
    asking = openai.chat.completions.create(model="small", messages=ASKED, tools=[WEATHER])
    answer = await answered(http, asking, f"I look.\n{CALL}")
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    future = asyncio.ensure_future(
        openai.chat.completions.create(
            model="small", messages=[*ASKED, choice.message, result], tools=[WEATHER]
        )
    )
    task = await http.batcher.task()
    function = json.dumps({"name": "weather", "arguments": {"city": "Oslo"}})
    seen = f"I look.<tool_call>{function}</tool_call>{END}{USER}rain{END}{ASSISTANT}"
    expected = http.tokens(f"{ASSISTANT}{seen}")
    assert list(task.prompt_token_ids)[-len(expected) :] == expected
    await http.batcher.send(task, last(0, http.tokens("It rains.")))
    last_answer = await future
    assert last_answer.choices[0].message.content == "It rains."
    assert last_answer.choices[0].message.tool_calls is None


async def test_calls_are_streamed(http: Wire, openai: AsyncOpenAI) -> None:
    asking = openai.chat.completions.create(
        model="small", messages=ASKED, tools=[WEATHER], stream=True
    )
    chunks = await answered(http, read(asking), f"{CALL}\n{CALL}")
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    assert [call.index for call in calls] == [0, 1]
    assert len({call.id for call in calls}) == 2
    assert all(json.loads(call.function.arguments) == {"city": "Oslo"} for call in calls)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""


async def test_several_answers(http: Wire, openai: AsyncOpenAI) -> None:
    asking = openai.chat.completions.create(model="small", messages=ASKED, n=3)
    answer = await answered(http, asking, "one", "two", "three")
    assert {choice.index for choice in answer.choices} == {0, 1, 2}
    assert {choice.message.content for choice in answer.choices} == {"one", "two", "three"}
    alone = openai.chat.completions.create(model="small", messages=ASKED)
    whole = await answered(http, alone, "one")
    assert answer.usage.prompt_tokens == whole.usage.prompt_tokens
    streamed = openai.chat.completions.create(model="small", messages=ASKED, n=2, stream=True)
    chunks = await answered(http, read(streamed), "one", "two")
    assert len({chunk.id for chunk in chunks}) == 1
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert sorted(texts) == ["one", "two"]


async def test_tools_and_a_schema_of_the_answer(http: Wire, openai: AsyncOpenAI) -> None:
    """As agents with a typed output ask: an answer is calls, or of the schema."""
    shape: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    asked: Any = {"model": "small", "messages": ASKED, "tools": [WEATHER], "response_format": shape}
    future = asyncio.ensure_future(openai.chat.completions.create(**asked))
    task = await http.batcher.task()
    assert "answer: " in task.sampling.grammar
    assert "weather" in task.sampling.grammar
    await http.batcher.send(task, last(0, http.tokens(CALL)))
    assert (await future).choices[0].finish_reason == "tool_calls"
    said = '{"city": "Oslo"}'
    answer = await answered(http, openai.chat.completions.create(**asked), said)
    assert answer.choices[0].message.content == said


BAD_TOOLS = [
    ({"tools": "all"}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]},
        "tools[0].function.x",
    ),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {**FUNCTION, "strict": 1}}]},
        "tools[0].function.strict",
    ),
    *(
        ({"tools": [{"type": "function", "function": {"name": "f", **broken}}]}, named)
        for broken, named in (
            ({"parameters": "{}"}, "tools[0].function.parameters"),
            ({"parameters": {"type": "string"}}, "tools[0].function.parameters"),
            ({"parameters": {"x": "y" * 70_000}}, "tools[0].function.parameters"),
            ({"parameters": {"not": {}}, "strict": True}, "tools[0].function.parameters"),
            ({"name": "a b"}, "tools[0].function.name"),
        )
    ),
    ({"tools": [WEATHER], "tool_choice": "some"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
]


async def test_bad_tools_are_refused(openai: AsyncOpenAI) -> None:
    for fields, param in BAD_TOOLS:
        asked: Any = {"model": "small", "messages": ASKED, **fields}
        with pytest.raises(sdk.BadRequestError) as caught:
            await openai.chat.completions.create(**asked)
        assert caught.value.param == param


TOOL: Any = {"type": "function", **FUNCTION}


async def test_a_response(http: Wire, openai: AsyncOpenAI) -> None:
    asking = openai.responses.create(
        model="small", instructions="Be brief.", input="hello", max_output_tokens=40, store=False
    )
    response = await answered(http, asking, " world, how are you?")
    assert response.output_text == " world, how are you?"
    assert (response.status, response.object) == ("completed", "response")
    assert response.id.startswith("resp_req-")
    assert response.usage is not None
    assert response.usage.total_tokens > response.usage.input_tokens > 0
    assert response.usage.input_tokens_details.cached_tokens == 0
    assert response.usage.input_tokens_details.cache_write_tokens == 0
    assert (response.instructions, response.max_output_tokens) == ("Be brief.", 40)


async def test_a_response_with_tools(http: Wire, openai: AsyncOpenAI) -> None:
    asking = openai.responses.create(model="small", input=ASKED, tools=[TOOL])
    response = await answered(http, asking, f"I look. {CALL}")
    message, call = response.output
    assert message.content[0].text == "I look."
    assert (call.type, call.name, json.loads(call.arguments)) == (
        *("function_call", "weather"),
        {"city": "Oslo"},
    )
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    turns: Any = [*ASKED, *response.output, output]
    again = openai.responses.create(model="small", input=turns, tools=[TOOL])
    assert (await answered(http, again, "It rains.")).output_text == "It rains."


async def test_a_response_is_streamed(http: Wire, openai: AsyncOpenAI) -> None:
    asking = openai.responses.create(model="small", input=ASKED, tools=[TOOL], stream=True)
    events = await answered(http, read(asking), f"I look. {CALL}")
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    final = events[-1].response
    assert text == final.output_text == "I look."
    assert [item.type for item in final.output] == ["message", "function_call"]


async def test_a_response_that_is_cut_off_says_why(http: Wire, openai: AsyncOpenAI) -> None:
    asking = openai.responses.create(model="small", input="hello")
    response = await answered(http, asking, "hello", end=TASK_END_LENGTH)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert [getattr(item, "status", None) for item in response.output] == ["incomplete"]


async def test_an_error_in_a_response_stream_is_a_typed_event(http: Wire) -> None:
    body = {"model": "small", "input": "hello", "stream": True}
    connection = await Connection.to(http.http)
    await connection.send("/v1/responses", body)
    task = await http.batcher.task()
    await http.batcher.send(task, frame(0, http.tokens("hello")))
    await connection.head()
    failed = TaskError(message="no memory")
    at = len(http.tokens("hello"))
    await http.batcher.send(task, frame(at, end=TASK_END_FAILED, error=failed))
    read = b""
    while chunk := await connection.chunk():
        read += chunk
    connection.close()
    kind, _, data = read.decode().rstrip().rpartition("\n\n")[2].partition("\n")
    said = json.loads(data.removeprefix("data: "))
    assert kind == "event: error"
    assert (said["type"], said["code"]) == ("error", "engine_failed")
    assert said["error"]["code"] == "engine_failed"
    assert said["sequence_number"] == read.count(b"event: ") - 1


NOT_IN_RESPONSES = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"store": 1}, "store"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"truncation": "auto"}, "truncation"),
    ({"background": True}, "background"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"stream_options": {"x": 1}}, "stream_options.x"),
    ({"temperature": 3}, "temperature"),
    ({"text": {"format": {"type": "json_schema", "name": "\ud800", "schema": {}}}}, None),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 5}}}},
        "text.format",
    ),
]


async def test_what_responses_do_not_have(http: Wire) -> None:
    for fields, param in NOT_IN_RESPONSES:
        body = {"model": "small", "input": "hello", **fields}
        reply = await ask(http.http, "/v1/responses", body)
        assert (reply.status, reply.error["param"]) == (400, param)
