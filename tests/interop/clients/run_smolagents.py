# /// script
# dependencies = ["smolagents[openai]==1.26.0"]
# ///
"""smolagents: agents that call tools, agents that write code, structured code, streams."""

import sys
from typing import Any

from smolagents import CodeAgent, OpenAIServerModel, Tool, ToolCallingAgent
from smolagents.monitoring import LogLevel


class Weather(Tool):
    name = "weather"
    description = "Tells the weather."
    inputs = {"city": {"type": "string", "description": "where", "enum": ["Oslo"]}}  # noqa: RUF012
    output_type = "string"

    def forward(self, city: str) -> str:
        return f"rain in {city}"


def served(name: str) -> Any:
    return OpenAIServerModel(model_id=name, api_base=sys.argv[1], api_key="none")


agent = ToolCallingAgent(
    tools=[Weather()], model=served("agent"), max_steps=2, verbosity_level=LogLevel.OFF
)
agent.run("Weather?")
# It tells the model of its earlier calls in words, so that the server sees each turn as the first.
called = [call.name for step in agent.memory.steps[1:] for call in step.tool_calls or ()]
assert called == ["weather", "weather"], called
message = served("tools").generate(
    [{"role": "user", "content": "Weather?"}], tools_to_call_from=[Weather()], max_tokens=500
)
assert message.tool_calls[0].function.name == "weather", message

said = served("small")([{"role": "user", "content": "Sort ascending: 31, 7, 19"}])
assert said.content == "7, 19, 31", said.content
parts = served("small").generate_stream(
    [{"role": "user", "content": [{"type": "text", "text": "Sort ascending: 31, 7, 19"}]}]
)
assert "".join(part.content or "" for part in parts) == "7, 19, 31"

for structured in (False, True):
    coder = CodeAgent(
        tools=[Weather()],
        model=served("agent"),
        max_steps=1,
        use_structured_outputs_internally=structured,
        verbosity_level=LogLevel.OFF,
    )
    coder.run("Weather?")
    first = coder.memory.steps[1].model_output_message
    assert first is not None
    assert first.content
