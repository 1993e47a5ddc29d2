# /// script
# dependencies = ["langchain==1.5.2", "langchain-openai==1.7.4"]
# ///
"""LangChain: chats, streams, bound tools with the history as it keeps it, an agent, schemas, embeddings."""

import sys
from typing import Any, Literal

import openai
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, SecretStr

BASE = sys.argv[1]
KEY = SecretStr("none")


class Label(BaseModel):
    """The label of a ticket."""

    label: Literal["refund", "delivery"]


@tool
def weather(city: str) -> str:
    """Tells the weather."""
    return f"rain in {city}"


@tool
def wind(city: str) -> str:
    """Tells the wind."""
    return f"calm in {city}"


def chat(model: str, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=BASE, api_key=KEY, max_retries=0, **more)


def loop(model: ChatOpenAI, *, streams: bool) -> None:
    bound = model.bind_tools([weather, wind])
    turns: list[Any] = [SystemMessage("Be brief."), HumanMessage("Weather?", name="me")]
    for name in ("weather", "wind"):
        if streams:
            chunks = list(bound.stream(turns))
            message: Any = sum(chunks[1:], chunks[0])
        else:
            message = bound.invoke(turns)
        (call,) = message.tool_calls
        assert (call["name"], call["args"]) == (name, {"city": "Oslo"})
        done = {"weather": weather, "wind": wind}[name].invoke(call)
        turns += [message, done]
    assert "calm in Oslo" in str(bound.invoke(turns).text)


sort = chat("small", max_completion_tokens=32, temperature=0, stream_usage=True)
assert sort.invoke("Sort ascending: 31, 7, 19").content == "7, 19, 31"
assert "".join(str(one.content) for one in sort.stream("Sort ascending: 31, 7, 19")) == "7, 19, 31"
for answer in sort.batch(["Sort ascending: 31, 7, 19"] * 3):
    assert answer.content == "7, 19, 31"
for responses in (False, True):
    for streams in (False, True):
        loop(chat("agent", use_responses_api=responses), streams=streams)
for model, method in (
    ("small", "json_schema"),
    ("tools", "function_calling"),
    ("agent", "json_schema"),
    ("agent", "function_calling"),
):
    shaped = chat(model).with_structured_output(Label, method=method)
    assert isinstance(shaped.invoke("Which label? I never got my lamp."), Label)
for choice in ("any", "weather"):
    (call,) = chat("agent").bind_tools([weather], tool_choice=choice).invoke("a").tool_calls
    assert call["name"] == "weather"
agent = create_agent(chat("agent"), [weather, wind], system_prompt="Be brief.")
said = agent.invoke({"messages": [("user", "Weather?")]})["messages"]
assert said[-1].content == "You said: calm in Oslo", said
again = agent.invoke({"messages": [*said, ("user", "And now?")]})["messages"]
assert again[-1].content == "You said: calm in Oslo", again

vectors = OpenAIEmbeddings(
    model="embed", base_url=BASE, api_key=KEY, check_embedding_ctx_length=False
).embed_documents(["w1", "w2"])
assert [len(one) for one in vectors] == [32, 32]
code = None
try:
    chat("none").invoke("a")
except openai.NotFoundError as error:
    code = error.code
assert code == "model_not_found"
