# /// script
# dependencies = ["langchain-anthropic==1.7.10", "pydantic-ai-slim[anthropic]==2.68.0"]
# ///
"""Anthropic's Messages API by LangChain and pydantic-ai: chats, streams, tools in a loop, objects by tools."""

import sys
from typing import Any, Literal

from anthropic import AsyncAnthropic
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider

BASE = sys.argv[1].removesuffix("/v1")


class Ticket(BaseModel):
    """A ticket."""

    topic: Literal["refund", "delivery"]
    urgent: bool


@tool
def weather(city: str) -> str:
    """Tells the weather."""
    return f"rain in {city}"


def chat(model: str) -> ChatAnthropic:
    return ChatAnthropic(model=model, base_url=BASE, api_key="none", max_retries=0, max_tokens=200)


assert chat("small").invoke("Sort ascending: 31, 7, 19").text == "7, 19, 31"
pieces = [piece.text for piece in chat("small").stream("Sort ascending: 31, 7, 19")]
assert "".join(pieces) == "7, 19, 31"
turns: list[Any] = [SystemMessage("Be brief."), HumanMessage("Weather?")]
called = chat("agent").bind_tools([weather]).invoke(turns)
assert called.tool_calls[0]["args"] == {"city": "Oslo"}
turns += [called, weather.invoke(called.tool_calls[0])]
assert chat("agent").bind_tools([weather]).invoke(turns).text == "You said: rain in Oslo"
for name in ("any", "weather"):
    held = chat("agent").bind_tools([weather], tool_choice=name).invoke("Weather?")
    assert held.tool_calls[0]["name"] == "weather"
shaped = chat("agent").with_structured_output(Ticket, method="function_calling")
assert isinstance(shaped.invoke("I never got my lamp."), Ticket)

client = AsyncAnthropic(base_url=BASE, api_key="none", max_retries=0)
served = AnthropicModel("agent", provider=AnthropicProvider(anthropic_client=client))


def wind(city: str) -> str:
    """Tells the wind."""
    return f"calm in {city}"


agent = Agent(served, instructions="Be brief.", tools=[wind])
first = agent.run_sync("Wind?")
assert first.output == "You said: calm in Oslo", first.output
again = agent.run_sync("And now?", message_history=first.all_messages())
assert again.output == "You said: calm in Oslo", again.output
assert isinstance(Agent(served, output_type=Ticket).run_sync("No lamp.").output, Ticket)
