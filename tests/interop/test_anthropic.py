"""Anthropic's client, which knows nothing of Sluice, at the suite's mesh."""

from typing import Any

import pytest

from tests.support.mesh import RunningMesh

pytestmark = pytest.mark.mesh


def asked(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_chats_with_the_client_that_blocks(mesh: RunningMesh) -> None:
    from anthropic import Anthropic  # it takes a second to import

    turns = asked("Sort ascending: 31, 7, 19")
    with Anthropic(base_url=f"http://{mesh.http}", api_key="none") as client:
        answer = client.messages.create(model="small", max_tokens=32, messages=turns)
        (block,) = answer.content
        assert (block.type, block.text, answer.stop_reason) == ("text", "7, 19, 31", "end_turn")
        count = client.messages.count_tokens(model="small", messages=turns)
        assert count.input_tokens == answer.usage.input_tokens
        turns += [answer.to_param(), *asked("Sort ascending: 5, 2")]
        assert client.messages.create(model="small", max_tokens=32, messages=turns).content


async def test_streams_with_the_client_that_does_not_block(mesh: RunningMesh) -> None:
    from anthropic import AsyncAnthropic

    async with (
        AsyncAnthropic(base_url=f"http://{mesh.http}", api_key="none") as client,
        client.messages.stream(
            model="auto", max_tokens=32, messages=asked("Sort ascending: 31, 7, 19")
        ) as stream,
    ):
        text = "".join([piece async for piece in stream.text_stream])
        answer = await stream.get_final_message()
    assert text == "7, 19, 31"
    assert answer.usage.output_tokens > 0
