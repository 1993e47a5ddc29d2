# /// script
# dependencies = ["pydantic-ai-slim[anthropic,openai]==2.68.0"]
# ///
"""pydantic-ai: agents with tools, histories, typed outputs by tools and by schema, retries, streams, embeddings."""

import asyncio
import sys
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Ticket(BaseModel):
    topic: Literal["refund", "delivery"]
    urgent: bool


def weather(city: str) -> str:
    """Tells the weather."""
    tries.append(city)
    if len(tries) % 2:
        raise ModelRetry("say it again")
    return f"rain in {city}"


def wind(city: str) -> str:
    """Tells the wind."""
    return f"calm in {city}"


tries: list[str] = []


async def main() -> None:
    provider = OpenAIProvider(base_url=sys.argv[1], api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent: Any = Agent(
            kind("agent", provider=provider),
            instructions="Be brief.",
            system_prompt="You help.",
            tools=[weather, wind],
        )
        result = await agent.run("Weather?")
        assert result.output == "You said: calm in Oslo", result.output
        again = await agent.run("And now?", message_history=result.all_messages())
        assert again.output == "You said: calm in Oslo", again.output
        async with agent.run_stream("And now?", message_history=again.all_messages()) as stream:
            assert await stream.get_output() == "You said: calm in Oslo"
        for output, model in (
            (ToolOutput(Ticket), "tools"),
            (NativeOutput(Ticket), "small"),
            (Ticket, "agent"),
            (NativeOutput(Ticket), "agent"),
        ):
            typed: Any = Agent(kind(model, provider=provider), output_type=output, retries=2)
            result = await typed.run("I never got my lamp.", model_settings={"max_tokens": 200})
            assert isinstance(result.output, Ticket)
            again = await typed.run(
                "Again.", message_history=result.all_messages(), model_settings={"max_tokens": 200}
            )
            assert isinstance(again.output, Ticket)
        both: Any = Agent(
            kind("agent", provider=provider),
            output_type=NativeOutput(Ticket),
            tools=[weather, wind],
        )
        assert isinstance((await both.run("I never got my lamp.")).output, Ticket)
        status = None
        try:
            await Agent(kind("none", provider=provider)).run("a")
        except ModelHTTPError as error:
            status = error.status_code
        assert status == 404
    # By Anthropic's API.
    access = AnthropicProvider(base_url=sys.argv[1].removesuffix("/v1"), api_key="none")
    served = AnthropicModel("agent", provider=access)
    agent = Agent(served, instructions="Be brief.", tools=[wind])
    result = await agent.run("Wind?")
    assert result.output == "You said: calm in Oslo", result.output
    again = await agent.run("And now?", message_history=result.all_messages())
    assert again.output == "You said: calm in Oslo", again.output
    typed = await Agent(served, output_type=Ticket).run("I never got my lamp.")
    assert isinstance(typed.output, Ticket)


asyncio.run(main())
