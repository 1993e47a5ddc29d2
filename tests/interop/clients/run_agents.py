# /// script
# dependencies = ["openai-agents==0.24.0"]
# ///
"""openai-agents: an agent with tools, by chats and by responses, whole and streamed, a typed output."""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(disabled=True)


class Ticket(BaseModel):
    topic: Literal["refund", "delivery"]
    urgent: bool


@function_tool
def weather(city: str) -> str:
    """Tells the weather."""
    return f"rain in {city}"


@function_tool
def wind(city: Literal["Oslo"]) -> str:
    """Tells the wind."""
    return f"calm in {city}"


async def main() -> None:
    client = AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="agent", openai_client=client)
        agent = Agent(
            name="a",
            instructions="Be brief.",
            model=model,
            tools=[weather, wind],
            handoff_description="x",
        )
        result = await Runner.run(agent, "Weather?")
        assert result.final_output == "You said: calm in Oslo", result.final_output
        more = [*result.to_input_list(), {"role": "user", "content": "And now?"}]
        again = await Runner.run(agent, more)
        assert again.final_output == "You said: calm in Oslo", again.final_output
        streamed = Runner.run_streamed(agent, more)
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == "You said: calm in Oslo"
        for name in ("tools", "agent"):
            demanding = Agent(
                name="b",
                instructions="Be brief.",
                model=kind(model=name, openai_client=client),
                tools=[wind],
                model_settings=ModelSettings(
                    tool_choice="required", parallel_tool_calls=False, max_tokens=200, store=False
                ),
                tool_use_behavior="stop_on_first_tool",
            )
            result = await Runner.run(demanding, "Wind?", max_turns=3)
            assert result.final_output == "calm in Oslo", result.final_output
        typed = Agent(
            name="c",
            model=kind(model="small", openai_client=client),
            output_type=Ticket,
            model_settings=ModelSettings(max_tokens=200),
        )
        result = await Runner.run(typed, "I never got my lamp.")
        assert isinstance(result.final_output, Ticket)
    await client.close()


asyncio.run(main())
