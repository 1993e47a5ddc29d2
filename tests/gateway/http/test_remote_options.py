"""What a request asks of a model behind `engine: openai`: what reaches the task, and what is refused by name."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
from openai import AsyncOpenAI, BadRequestError

from sluice.internal.v1.frame_pb2 import Frame, ServerTokens
from sluice.internal.v1.task_pb2 import ServerOptions, Task
from sluice.settings import ModelSettings
from sluice.v1 import inference_pb2 as pb
from sluice.wire.text_tokens import CONVERSATION
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.wire import Wire, open_wire

ASKED: Any = [{"role": "user", "content": "Weather?"}]
ANY_SCHEMA: Final = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
NAMED: Final = {"type": "function", "function": {"name": "look_up"}}


def tool(**more: Any) -> Any:
    function = {"name": "look_up", "description": "d", "parameters": {"type": "object"}, **more}
    return {"type": "function", "function": function}


def model(name: str, **server: Any) -> ModelSettings:
    given = {"url": "http://127.0.0.1:9/v1", "model": "m", **server}
    return ModelSettings.model_validate(
        {"name": name, "engine": "openai", "path": "builtin:small", "server": given}
    )


NONE: Final = {"tool_choice": None, "strict": None, "reasoning_effort": None}
MODELS: Final = [
    model("chat"),
    model("plain", parameters=NONE),
    model("text", api="completions"),
    model("vllm", api="tokens"),
]


@pytest.fixture
async def http(nats_url: str, model_folder: Path) -> AsyncIterator[Wire]:
    more: Any = {"more_models": MODELS}
    async with open_wire(nats_url, model_folder, http="127.0.0.1:0", **more) as opened:
        await opened.ready("small", *(one.name for one in MODELS))
        yield opened


async def task_of(wire: Wire, asking: Any, name: str = "chat") -> Task:
    """The task that ``asking`` leads to; the answer is empty."""
    future = asyncio.ensure_future(asking)
    task = await wire.batcher.task(name)
    await wire.batcher.send(task, counted())
    await future
    return task


def counted() -> Frame:
    """The end of an empty answer, with the tokens as the server counts them."""
    end = last(0)
    end.final.server_tokens.CopyFrom(ServerTokens(prompt_tokens=30, completion_tokens=7))
    return end


def conversation_in(wire: Wire, task: Task, name: str = "chat") -> Any:
    tokenizer = wire.catalog[name].tokenizer.tokenizer
    text = tokenizer.decode(list(task.prompt_token_ids), skip_special_tokens=False)
    return json.loads(text.removeprefix(CONVERSATION))


async def test_tools_reach_the_task_as_they_were_asked(http: Wire, openai: AsyncOpenAI) -> None:
    create = openai.chat.completions.create
    cases: list[tuple[Any, ServerOptions]] = [
        ({"tool_choice": "required"}, ServerOptions(call_required=True)),
        ({"tool_choice": NAMED}, ServerOptions(function="look_up")),
        ({"tool_choice": "auto"}, ServerOptions()),
        ({"parallel_tool_calls": False}, ServerOptions(one_call=True)),
        ({"reasoning_effort": "low"}, ServerOptions(reasoning_effort="low")),
    ]
    for given, expected in cases:
        asking = create(model="chat", messages=ASKED, tools=[tool(strict=True)], **given)
        task = await task_of(http, asking)
        assert task.sampling.server == expected
        assert not task.sampling.HasField("constraint")
        _, tools = conversation_in(http, task)
        assert tools == [tool(strict=True)]
    task = await task_of(http, create(model="chat", messages=ASKED, tools=[tool()]))
    assert conversation_in(http, task)[1] == [tool()]


SHAPES: Final[list[dict[str, Any]]] = [
    {"type": "json_object"},
    {"type": "json_object", "schema": {"type": "object"}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    {
        "type": "json_schema",
        "json_schema": {"name": "y", "description": "d", "schema": ANY_SCHEMA, "strict": False},
    },
    {"type": "json_schema", "json_schema": {"name": "z", "schema": {}, "strict": True}},
]


async def test_a_response_format_goes_out_as_it_came(http: Wire, openai: AsyncOpenAI) -> None:
    for shape in SHAPES:
        given: Any = {"response_format": shape}
        asking = openai.chat.completions.create(model="chat", messages=ASKED, **given)
        task = await task_of(http, asking)
        assert json.loads(task.sampling.server.response_format) == shape


async def test_template_variables_reach_server_or_template(http: Wire, openai: AsyncOpenAI) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False, "effort": "low", "n": 2}}
    create = openai.chat.completions.create
    task = await task_of(http, create(model="chat", messages=ASKED, extra_body=extra))
    sent = json.loads(task.sampling.server.chat_template_kwargs)
    assert sent == extra["chat_template_kwargs"]
    for name in ("text", "vllm", "small"):
        task = await task_of(http, create(model=name, messages=ASKED, extra_body=extra), name)
        assert not task.sampling.HasField("server")


async def test_responses_pass_on_how_much_to_reason(http: Wire, openai: AsyncOpenAI) -> None:
    asking = openai.responses.create(model="chat", input="7?", reasoning={"effort": "high"})
    task = await task_of(http, asking)
    assert task.sampling.server.reasoning_effort == "high"


async def test_usage_is_what_the_server_counted(http: Wire, openai: AsyncOpenAI) -> None:
    for answers in (1, 2):
        asking = openai.chat.completions.create(model="chat", messages=ASKED, n=answers)
        future = asyncio.ensure_future(asking)
        for _ in range(answers):
            await http.batcher.send(await http.batcher.task("chat"), counted())
        usage = (await future).usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (30, 7 * answers)
    future = asyncio.ensure_future(openai.chat.completions.create(model="chat", messages=ASKED))
    task = await http.batcher.task("chat")
    await http.batcher.send(task, frame(0, [5, 6]))
    await http.batcher.send(task, last(2, []))  # without a count
    usage = (await future).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(task.prompt_token_ids), 2)


REFUSED: Final[list[tuple[str, Any, str]]] = [
    ("plain", {"tools": [tool()], "tool_choice": "required"}, "tool_choice"),
    ("plain", {"tools": [tool()], "tool_choice": NAMED}, "tool_choice"),
    ("plain", {"tools": [tool(), tool(name="b", strict=True)]}, "tools[1].function.strict"),
    ("plain", {"reasoning_effort": "low"}, "reasoning_effort"),
    ("small", {"reasoning_effort": "low"}, "reasoning_effort"),
    ("chat", {"reasoning_effort": "very low"}, "reasoning_effort"),
    ("chat", {"extra_body": {"chat_template_kwargs": {"x": "a b"}}}, "chat_template_kwargs.x"),
    ("chat", {"extra_body": {"chat_template_kwargs": {"tools": 1}}}, "chat_template_kwargs"),
    ("chat", {"extra_body": {"chat_template_kwargs": "x"}}, "chat_template_kwargs"),
    ("small", {"extra_body": {"chat_template_kwargs": {"messages": 1}}}, "chat_template_kwargs"),
]


async def test_what_a_server_does_not_take_is_named(http: Wire, openai: AsyncOpenAI) -> None:
    for name, given, field in REFUSED:
        with pytest.raises(BadRequestError) as refused:
            await openai.chat.completions.create(model=name, messages=ASKED, **given)
        assert refused.value.param == field, (name, given)


async def test_grpc_shape_and_schema_must_agree(http: Wire) -> None:
    sampling = pb.SamplingParams(
        json_schema='{"type": "object"}', response_format='{"type": "json_object"}'
    )
    request = pb.GenerateRequest(prompt="x", model="chat", sampling=sampling)
    task = await task_of(http, http.stub.GenerateText(request))
    assert task.sampling.server.response_format == sampling.response_format
    for wrong in ('{"type": "text"}', "{", '{"type": "json_object", "schema": {}}', "[]"):
        request.sampling.response_format = wrong
        with pytest.raises(Exception, match=r"sampling\.response_format: must ask for the same"):
            await http.stub.GenerateText(request)
