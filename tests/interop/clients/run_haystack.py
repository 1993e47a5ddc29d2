# /// script
# dependencies = ["haystack-ai==3.4.1"]
# ///
"""Haystack: chats, streams, an agent with tools, an object of a schema, embeddings."""

import json
import os
import sys
from typing import Annotated, Literal

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
os.environ["OPENAI_API_KEY"] = "none"

from haystack.components.agents import Agent
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import tool
from pydantic import BaseModel


class Ticket(BaseModel):
    topic: Literal["refund", "delivery"]
    urgent: bool


@tool
def weather(city: Annotated[str, "where"]) -> str:
    """Tells the weather."""
    return f"rain in {city}"


@tool
def wind(city: Annotated[str, "where"]) -> str:
    """Tells the wind."""
    return f"calm in {city}"


def served(name: str, **more: object) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(model=name, api_base_url=sys.argv[1], max_retries=0, **more)


SORT = [ChatMessage.from_user("Sort ascending: 31, 7, 19")]
assert served("small").run(messages=SORT)["replies"][0].text == "7, 19, 31"
pieces: list[StreamingChunk] = []
streamed = served("small", streaming_callback=pieces.append).run(messages=SORT)
assert streamed["replies"][0].text == "7, 19, 31"
assert "".join(piece.content for piece in pieces) == "7, 19, 31"

agent = Agent(chat_generator=served("agent"), tools=[weather, wind], system_prompt="Be brief.")
agent.warm_up()
first = agent.run(messages=[ChatMessage.from_user("Weather?")])
assert first["last_message"].text == "You said: calm in Oslo", first["last_message"]
again = agent.run(messages=[*first["messages"], ChatMessage.from_user("And now?")])
assert again["last_message"].text == "You said: calm in Oslo"

for name in ("small", "agent"):
    shaped = served(name, generation_kwargs={"response_format": Ticket, "max_tokens": 200})
    told = shaped.run(messages=[ChatMessage.from_user("I never got my lamp.")])
    Ticket.model_validate(json.loads(told["replies"][0].text))

embedder = OpenAITextEmbedder(model="embed", api_base_url=sys.argv[1])
assert len(embedder.run(text="w1")["embedding"]) == 32
