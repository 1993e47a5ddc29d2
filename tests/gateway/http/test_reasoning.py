"""Reasoning that a server sends apart from its answer, as callers get it; the test plays the batcher."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
from openai import AsyncOpenAI

from sluice.settings import ModelSettings
from sluice.v1 import inference_pb2 as pb
from tests.gateway.kit.batcher import frame, last
from tests.gateway.kit.wire import Wire, open_wire

SAID: Final = "\x0eIs 7 odd? AKIAQ3ZK7WPX2MNB5TRD says so.\x0fYes, 7 is odd."
THOUGHT: Final = "Is 7 odd? <AWS_ACCESS_KEY_1> says so."
ASKED: Any = [{"role": "user", "content": "Is 7 odd?"}]
SAFETY: Final = {"policies": {"default": {}}}


@pytest.fixture
async def http(nats_url: str, model_folder: Path) -> AsyncIterator[Wire]:
    server = {"url": "http://127.0.0.1:9/v1", "model": "m"}
    thinker = ModelSettings.model_validate(
        {"name": "thinker", "engine": "openai", "path": "builtin:small", "server": server}
    )
    models = {"more_models": [thinker], "safety": SAFETY}
    async with open_wire(nats_url, model_folder, http="127.0.0.1:0", **models) as opened:
        await opened.ready("small", "thinker")
        yield opened


async def answered(wire: Wire, asking: Any, text: str = SAID, size: int = 5) -> Any:
    """What ``asking`` gets when the batcher sends ``text``, so many tokens a frame."""
    future = asyncio.ensure_future(asking)
    tokenizer = wire.catalog["thinker"].tokenizer.tokenizer
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    task = await wire.batcher.task("thinker")
    for start in range(0, len(tokens), size):
        await wire.batcher.send(task, frame(start, tokens[start : start + size]))
    await wire.batcher.send(task, last(len(tokens), []))
    return await future


async def test_reasoning_is_beside_the_answer_and_inspected(
    http: Wire, openai: AsyncOpenAI
) -> None:
    asking = openai.chat.completions.create(model="thinker", messages=ASKED)
    message = (await answered(http, asking)).choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes, 7 is odd.", THOUGHT)
    # The message as it is, in the next turn.
    turns: Any = [*ASKED, message, {"role": "user", "content": "Sure?"}]
    again = openai.chat.completions.create(model="thinker", messages=turns)
    message = (await answered(http, again, "Yes.")).choices[0].message
    assert message.content == "Yes."
    assert not hasattr(message, "reasoning_content")


async def test_reasoning_is_streamed_before_the_answer(http: Wire, openai: AsyncOpenAI) -> None:
    async def read() -> list[Any]:
        asking = openai.chat.completions.create(model="thinker", messages=ASKED, stream=True)
        return [chunk.choices[0].delta async for chunk in await asking]

    deltas = await answered(http, read(), size=1)
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == "Yes, 7 is odd."
    first = next(at for at, delta in enumerate(deltas) if delta.content)
    assert not any(thoughts[first:])


async def test_responses_have_an_item_of_reasoning(http: Wire, openai: AsyncOpenAI) -> None:
    async def read() -> list[Any]:
        asking = openai.responses.create(model="thinker", input="Is 7 odd?", stream=True)
        return [event async for event in await asking]

    events = await answered(http, read())
    thought, answer = events[-1].response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", THOUGHT)
    assert answer.content[0].text == "Yes, 7 is odd."
    parts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(parts) == THOUGHT
    turns: Any = [
        {"role": "user", "content": "Is 7 odd?"},
        *(item.model_dump(exclude_none=True) for item in (thought, answer)),
        {"role": "user", "content": "Sure?"},
    ]
    again = openai.responses.create(model="thinker", input=turns)
    assert (await answered(http, again, "Yes.")).output_text == "Yes."


async def test_grpc_has_a_field_for_it(http: Wire) -> None:
    request = pb.GenerateRequest(prompt="Is 7 odd?", model="thinker")
    answer = await answered(http, http.stub.GenerateText(request))
    assert (answer.reasoning, answer.text) == (THOUGHT, "Yes, 7 is odd.")
    assert len(answer.token_ids) > 10
