# /// script
# dependencies = ["semantic-kernel==1.45.0"]
# ///
"""Semantic Kernel: chats, streams, an agent with functions, a schema, embeddings."""

import asyncio
import json
import sys
from typing import Literal

from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextEmbedding,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Ticket(BaseModel):
    topic: Literal["refund", "delivery"]
    urgent: bool


class Tools:
    @kernel_function(description="Tells the weather.")
    def weather(self, city: str) -> str:
        return f"rain in {city}"

    @kernel_function(description="Tells the wind.")
    def wind(self, city: str) -> str:
        return f"calm in {city}"


async def main() -> None:
    client = AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)

    def served(name: str) -> OpenAIChatCompletion:
        return OpenAIChatCompletion(ai_model_id=name, async_client=client)

    def asked(text: str) -> ChatHistory:
        history = ChatHistory(system_message="Be brief.")
        history.add_user_message(text)
        return history

    plain = OpenAIChatPromptExecutionSettings()
    said = await served("agent").get_chat_message_content(asked("hi"), plain)
    assert str(said) == "You said: hi", said
    pieces = [
        str(piece)
        async for piece in served("agent").get_streaming_chat_message_content(asked("hi"), plain)
    ]
    assert "".join(pieces) == "You said: hi"

    agent = ChatCompletionAgent(
        service=served("agent"), name="a", instructions="Be brief.", plugins=[Tools()]
    )
    response = await agent.get_response(messages="Weather?")
    assert str(response) == "You said: calm in Oslo", response
    again = await agent.get_response(messages="And now?", thread=response.thread)
    assert str(again) == "You said: calm in Oslo", again

    for name in ("small", "agent"):
        shaped = OpenAIChatPromptExecutionSettings(response_format=Ticket, max_tokens=200)
        told = await served(name).get_chat_message_content(asked("I never got my lamp."), shaped)
        Ticket.model_validate(json.loads(str(told)))
    vectors = await OpenAITextEmbedding(
        ai_model_id="embed", async_client=client
    ).generate_embeddings(["w1", "w2"])
    assert vectors.shape == (2, 32)


asyncio.run(main())
