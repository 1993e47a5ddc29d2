# /// script
# dependencies = ["llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0"]
# ///
"""LlamaIndex: OpenAILike chats, completions, an agent, typed predictions, embeddings."""

import asyncio
import sys
from typing import Any, Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

BASE = sys.argv[1]


class Ticket(BaseModel):
    """A ticket."""

    topic: Literal["refund", "delivery"]
    urgent: bool


def model(name: str, **more: Any) -> OpenAILike:
    return OpenAILike(
        model=name,
        api_base=BASE,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
        context_window=1024,
        **more,
    )


def weather(city: str) -> str:
    """Tells the weather."""
    return f"rain in {city}"


def wind(city: str) -> str:
    """Tells the wind."""
    return f"calm in {city}"


async def main() -> None:
    asked = [ChatMessage(role="system", content="s"), ChatMessage(role="user", content="hi")]
    said = model("agent").chat(asked)
    assert said.message.content == "You said: hi"
    further = [*asked, said.message, ChatMessage(role="user", content="more")]
    assert model("agent").chat(further).message.content == "You said: more"
    parts = list(
        model("small").stream_chat([ChatMessage(role="user", content="Sort ascending: 31, 7, 19")])
    )
    assert parts[-1].message.content == "7, 19, 31"
    assert model("small").complete("Sort ascending: 31, 7, 19").text == "7, 19, 31"
    bare = model("small")
    bare.is_chat_model = False
    assert bare.complete("Sort ascending: 31, 7, 19") is not None
    tools = [FunctionTool.from_defaults(weather), FunctionTool.from_defaults(wind)]
    agent = FunctionAgent(tools=tools, llm=model("agent"), system_prompt="Be brief.")
    for _ in range(2):
        answer = await agent.run("Weather?")
        assert str(answer) == "You said: calm in Oslo", str(answer)
    for name in ("tools", "agent"):
        typed = model(name, max_tokens=200).as_structured_llm(Ticket)
        assert isinstance(typed.chat(asked).raw, Ticket)
    shaped = model("small", max_tokens=200, should_use_structured_outputs=True).as_structured_llm(
        Ticket
    )
    assert isinstance(shaped.chat(asked).raw, Ticket)
    vectors = OpenAILikeEmbedding(model_name="embed", api_base=BASE, api_key="none")
    assert len(vectors.get_text_embedding_batch(["w1", "w2"])) == 2
    assert len(vectors.get_query_embedding("w1")) == 32


asyncio.run(main())
