# /// script
# dependencies = ["litellm==1.110.2"]
# ///
"""LiteLLM: `completion` with tools in a loop, streams, schemas, embeddings, rerank, its own error types."""

import json
import sys
from typing import Any, Literal

import litellm
from pydantic import BaseModel


class Label(BaseModel):
    label: Literal["refund", "delivery"]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Tells it.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "wind")
]
BASE = sys.argv[1]
ACCESS: dict[str, Any] = {"api_base": BASE, "api_key": "none", "num_retries": 0}
ASKED: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}]


def loop(provider: str, *, dump: bool, streams: bool) -> None:
    turns, names = list(ASKED), []
    while True:
        answer: Any = litellm.completion(
            model=f"{provider}/agent", messages=turns, tools=TOOLS, stream=streams, **ACCESS
        )
        if streams:
            answer = litellm.stream_chunk_builder(list(answer), messages=turns)
        message = answer.choices[0].message
        turns.append(message.model_dump() if dump else message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            json.loads(call.function.arguments)
            names.append(call.function.name)
            turns.append(
                {
                    "tool_call_id": call.id,
                    "role": "tool",
                    "name": call.function.name,
                    "content": f"rain {len(names)}",
                }
            )
    assert names == ["weather", "wind"], names
    assert message.content == "You said: rain 2", message


for provider in ("openai", "hosted_vllm", "litellm_proxy"):
    for dump in (False, True):
        for streams in (False, True):
            loop(provider, dump=dump, streams=streams)

text = "".join(
    chunk.choices[0].delta.content or ""
    for chunk in litellm.completion(
        model="openai/small",
        messages=[{"role": "user", "content": "Sort ascending: 31, 7, 19"}],
        stream=True,
        max_tokens=32,
        **ACCESS,
    )
)
assert text == "7, 19, 31", text
shaped = litellm.completion(
    model="openai/small", messages=ASKED, response_format=Label, max_tokens=60, **ACCESS
)
assert "label" in json.loads(shaped.choices[0].message.content)
response = litellm.responses(model="openai/agent", input="hi", **ACCESS)
assert response.output[0].content[0].text == "You said: hi"
found = litellm.embedding(model="openai/embed", input=["w1", "w2"], **ACCESS)
assert len(found.data) == 2
for provider, base in (("hosted_vllm", BASE), ("cohere", f"{BASE}/rerank"), ("jina_ai", BASE)):
    ranked = litellm.rerank(
        model=f"{provider}/rank", query="w1", documents=["w2", "w3"], api_base=base, api_key="none"
    )
    assert len(ranked.results) == 2, provider
for model, kind in (("none", litellm.NotFoundError), ("embed", litellm.BadRequestError)):
    try:
        litellm.completion(model=f"openai/{model}", messages=ASKED, **ACCESS)
    except kind:
        pass
    else:
        raise AssertionError(model)
try:
    litellm.completion(
        model="openai/small", messages=[{"role": "user", "content": "a b " * 3000}], **ACCESS
    )
except litellm.ContextWindowExceededError:
    pass
else:
    raise AssertionError("too long")
