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
    inputs = {"city": {"type": "string", "description": "where"}}  # noqa: RUF012
    output_type = "string"

    def forward(self, city: str) -> str:
        return f"rain in {city}"


def served(name: str) -> Any:
    return OpenAIServerModel(model_id=name, api_base=sys.argv[1], api_key="none")


for name in ("agent", "tools"):
    agent = ToolCallingAgent(
        tools=[Weather()], model=served(name), max_steps=2, verbosity_level=LogLevel.OFF
    )
    answer = agent.run("Weather?")
    called = [call.name for step in agent.memory.steps[1:] for call in step.tool_calls or ()]
    assert called, name
    if name == "agent":
        assert called == ["weather", "final_answer"], called
        assert answer == "Oslo", answer

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
