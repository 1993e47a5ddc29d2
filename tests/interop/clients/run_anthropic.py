# /// script
# dependencies = ["anthropic==2.14.0", "langchain==1.5.2", "langchain-anthropic==1.7.10", "litellm==1.110.2"]
# ///
"""Anthropic's API: its client's tool runner, LangChain and LiteLLM, each with tools in a loop, streams and schemas."""

import os
import sys
from typing import Any, Literal

import anthropic
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

BASE = sys.argv[1].removesuffix("/v1")
SORT = "Sort ascending: 31, 7, 19"


class Label(BaseModel):
    """The label of a ticket."""

    label: Literal["refund", "delivery"]


@anthropic.beta_tool
def forecast(city: str) -> str:
    """Tells the weather.

    Args:
        city: Where.
    """
    return f"rain in {city}"


@tool
def weather(city: str) -> str:
    """Tells the weather."""
    return f"rain in {city}"


@tool
def wind(city: str) -> str:
    """Tells the wind."""
    return f"calm in {city}"


def with_anthropic() -> None:
    asked: Any = {"model": "agent", "max_tokens": 4096}
    turn: Any = {"role": "user", "content": "Weather?"}
    with anthropic.Anthropic(base_url=BASE, api_key="none", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(**asked, messages=[turn], tools=[forecast])
        assert runner.until_done().content[0].text == "You said: rain in Oslo"
        turn = {"role": "user", "content": "Which label? I never got my lamp."}
        parsed = client.messages.parse(
            model="small", max_tokens=64, messages=[turn], output_format=Label
        )
        assert isinstance(parsed.parsed_output, Label)


def chat(model: str, **more: Any) -> ChatAnthropic:
    return ChatAnthropic(model=model, base_url=BASE, api_key="none", max_retries=0, **more)


def with_langchain() -> None:
    assert chat("small").invoke(SORT).content == "7, 19, 31"
    chunks = list(chat("small").stream(SORT))
    whole: Any = sum(chunks[1:], chunks[0])
    assert whole.text == "7, 19, 31"
    count = chat("small").get_num_tokens_from_messages([HumanMessage(SORT)])
    assert whole.usage_metadata["input_tokens"] == count
    for streams in (False, True):
        loop(streams=streams)
    calls = [{"name": "weather", "args": {"city": "Oslo"}, "id": "toolu_1"}]
    failed = ToolMessage("no such city", tool_call_id="toolu_1", status="error")
    turns = [HumanMessage("a"), AIMessage("", tool_calls=calls), failed]
    assert chat("agent").invoke(turns).content == "You said: Error: no such city"
    for method, model in (("json_schema", "small"), ("function_calling", "tools")):
        shaped = chat(model, max_tokens=256).with_structured_output(Label, method=method)
        assert isinstance(shaped.invoke("Which label? I never got my lamp."), Label)
    agent = create_agent(chat("agent"), [weather, wind], system_prompt="Be brief.")
    said = agent.invoke({"messages": [("user", "Weather?")]})["messages"]
    again = agent.invoke({"messages": [*said, ("user", "And now?")]})["messages"]
    assert again[-1].content == "You said: calm in Oslo", again


def loop(*, streams: bool) -> None:
    bound = chat("agent").bind_tools([weather, wind])
    turns: list[Any] = [SystemMessage("Be brief."), HumanMessage("Weather?")]
    for used in (weather, wind):
        chunks = list(bound.stream(turns)) if streams else [bound.invoke(turns)]
        message: Any = sum(chunks[1:], chunks[0])
        (call,) = message.tool_calls
        assert (call["name"], call["args"]) == (used.name, {"city": "Oslo"})
        turns += [message, used.invoke(call)]
    assert "calm in Oslo" in str(bound.invoke(turns).text)


def with_litellm() -> None:
    reached: Any = {"api_base": BASE, "api_key": "none", "num_retries": 0}
    turn = {"role": "user", "content": SORT}
    answer = litellm.completion(model="anthropic/small", messages=[turn], **reached)
    assert answer.choices[0].message.content == "7, 19, 31"
    for model, content, error in (
        ("none", "a", litellm.NotFoundError),
        ("small", "a " * 20_000, litellm.ContextWindowExceededError),
    ):
        try:
            turn = {"role": "user", "content": content}
            litellm.completion(model=f"anthropic/{model}", messages=[turn], **reached)
        except error:
            continue
        raise AssertionError(f"no {error.__name__}")


with_anthropic()
with_langchain()
with_litellm()
