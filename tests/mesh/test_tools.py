"""Demanded calls, several answers and a tool's result through a whole mesh: shipped weights, templates with tools."""

import json
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import grpc
import jsonschema
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from sluice import settings as config
from sluice.client import AsyncClient, FinishReason, Message, Tool
from sluice.v1 import inference_pb2 as pb
from sluice.v1.inference_pb2_grpc import InferenceServiceStub
from supervisor.mesh import Mesh, running_mesh
from tests.support.mesh import kill, quick_settings
from tests.support.tool_templates import MARKS, small_with_tools

pytestmark = [pytest.mark.mesh, pytest.mark.long]

SCHEMA: Any = {
    "type": "object",
    "properties": {
        "order": {"type": "string", "pattern": "^D-[0-9]{5}$"},
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 2},
    },
    "required": ["order", "items"],
    "additionalProperties": False,
    "$defs": {"item": {"type": "integer", "minimum": 0, "maximum": 99}},
}
REFUND = Tool("refund", "Pays back items of an order.", SCHEMA)
CLOSE = Tool("close", "Closes the ticket.")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    models = []
    for name in MARKS:
        path = small_with_tools(tmp_path_factory.mktemp("models") / name, name)
        models.append(config.ModelSettings(name=name, path=path, slots=8))
    settings = quick_settings(*models, http=config.HttpSettings(address="127.0.0.1:0"))
    async with running_mesh(settings) as running:
        yield running


def check(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMA if name == "refund" else {"maxProperties": 0})


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("model", MARKS)
async def test_a_demanded_call_is_valid_and_can_be_answered(mesh: Mesh, model: str) -> None:
    turns = [Message("user", "My lamp is broken, order D-91198.")]
    async with AsyncClient(mesh.address) as client:
        for choice in ("required", "refund"):
            answer = await client.generate(
                turns,
                model=model,
                tools=[REFUND, CLOSE],
                tool_choice=choice,
                parallel_tool_calls=False,
                temperature=1.0,
                seed=3,
                timeout_s=60,
            ).answer()
            assert answer.finish_reason is FinishReason.TOOL_CALLS
            (call,) = answer.tool_calls
            assert choice in ("required", call.name)
            check(call.name, call.arguments)
            assert answer.text == ""
        turns += [
            Message("assistant", "", [call]),
            Message("tool", "done", tool_call_id=call.id),
        ]
        last = await client.generate(turns, model=model, tools=[REFUND], max_tokens=8).answer()
        assert last.usage.completion_tokens


@pytest.mark.asyncio(loop_scope="module")
async def test_openais_client_gets_several_answers_with_calls(mesh: Mesh) -> None:
    function = {"name": "refund", "description": REFUND.description, "parameters": SCHEMA}
    tools: Any = [{"type": "function", "function": {**function, "strict": True}}]
    messages: Any = [{"role": "user", "content": "My lamp is broken."}]
    async with AsyncOpenAI(base_url=f"http://{mesh.http}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(
            model="hermes",
            messages=messages,
            tools=tools,
            tool_choice={"type": "function", "function": {"name": "refund"}},
            n=3,
            temperature=1.0,
            seed=5,
        )
        made = [c.message.tool_calls[0] for c in answer.choices if c.message.tool_calls]
        assert len(made) == 3
        for call in made:
            assert call.type == "function"
            check("refund", call.function.arguments)
        assert len({call.function.arguments for call in made}) > 1, "each has draws of its own"
        stream = await client.responses.create(
            model="mistral",
            input=messages,
            tools=[{"type": "function", "strict": True, **function}],  # type: ignore[list-item]
            tool_choice="required",
            parallel_tool_calls=False,
            stream=True,
        )
        events = [event async for event in stream]
        final = events[-1]
        assert final.type == "response.completed"
        (item,) = final.response.output
        assert item.type == "function_call"
        check(item.name, item.arguments)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("model", MARKS)
async def test_anthropics_client_answers_calls(mesh: Mesh, model: str) -> None:
    from anthropic import AsyncAnthropic  # it takes a second to import

    tool: Any = {"name": "refund", "description": REFUND.description, "input_schema": SCHEMA}
    turns: list[Any] = [{"role": "user", "content": "My lamp is broken, order D-91198."}]
    asked: Any = {"model": model, "max_tokens": 512, "tools": [tool]}
    forced: Any = {"type": "tool", "name": "refund"}
    async with AsyncAnthropic(base_url=f"http://{mesh.http}", api_key="none") as client:
        async with client.messages.stream(**asked, messages=turns, tool_choice=forced) as stream:
            answer = await stream.get_final_message()
        (call,) = answer.content
        assert (answer.stop_reason, call.type) == ("tool_use", "tool_use")
        check("refund", json.dumps(call.input))
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
        turns += [answer.to_param(), {"role": "user", "content": [result]}]
        last = await client.messages.create(**{**asked, "max_tokens": 8}, messages=turns)
        count = await client.messages.count_tokens(model=model, messages=turns, tools=[tool])
    assert last.usage.input_tokens == count.input_tokens
    assert last.usage.output_tokens


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_batcher_changes_none_of_several_answers(mesh: Mesh) -> None:
    turn = pb.ChatMessage(role=pb.ROLE_USER, content="My lamp is broken.")
    request = pb.GenerateRequest(
        chat=pb.ChatInput(messages=[turn]),
        model="hermes",
        sampling=pb.SamplingParams(n=3, temperature=1.0, seed=5, min_tokens=400, max_tokens=400),
    )

    async def texts(*, strike: bool) -> dict[int, str]:
        said, events = defaultdict(str), 0
        async with grpc.aio.insecure_channel(mesh.address) as channel:
            async for event in InferenceServiceStub(channel).Generate(request, timeout=90):
                said[event.answer_index] += event.delta.text
                events += 1
                if strike and events == 10:
                    kill(mesh, "batcher")
        return said

    calm = await texts(strike=False)
    assert len(set(calm.values())) == 3
    assert await texts(strike=True) == calm
