# /// script
# dependencies = ["openai==3.57.0"]
# ///
"""openai-python: tools in a loop, schemas, responses; the tests of the gateway use this client for the rest."""

import json
import sys
from typing import Any, Literal

from openai import OpenAI
from pydantic import BaseModel


class Ticket(BaseModel):
    topic: Literal["refund", "delivery"]
    urgent: bool


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": CITY}
ASKED: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}]


def tools(client: OpenAI) -> None:
    """The model's messages go back as they came, as objects and as what `model_dump` makes of them."""
    offered: list[Any] = [
        {"type": "function", "function": FUNCTION},
        {"type": "function", "function": {**FUNCTION, "name": "wind"}},
    ]
    for dump in (False, True):
        turns = list(ASKED)
        names = []
        while True:
            message = (
                client.chat.completions.create(model="agent", messages=turns, tools=offered)
                .choices[0]
                .message
            )
            turns.append(message.model_dump() if dump else message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                assert json.loads(call.function.arguments) == {"city": "Oslo"}
                names.append(call.function.name)
                turns.append(
                    {
                        "role": "tool",
                        "tool_call_id": call.id,
                        "name": call.function.name,
                        "content": f"rain {len(names)}",
                    }
                )
        assert names == ["weather", "wind"]
        assert message.content == "You said: rain 2"
    forced = client.chat.completions.create(
        model="tools", messages=ASKED, tools=offered, tool_choice="required"
    )
    assert forced.choices[0].finish_reason == "tool_calls", forced


def schemas(client: OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "Which label? I never got my lamp."}]
    parsed = client.chat.completions.parse(model="small", messages=asked, response_format=Ticket)
    assert isinstance(parsed.choices[0].message.parsed, Ticket)
    response = client.responses.parse(
        model="small", input=asked, text_format=Ticket, max_output_tokens=100
    )
    assert isinstance(response.output_parsed, Ticket)
    assert response.usage is not None
    assert response.usage.input_tokens_details.cache_write_tokens == 0


def responses(client: OpenAI) -> None:
    offered: Any = [{"type": "function", **FUNCTION, "strict": True}]
    for dump in (False, True):
        items = list(ASKED)
        while True:
            response = client.responses.create(
                model="agent", input=items, tools=offered, store=True
            )
            items += [item.model_dump() if dump else item for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            items += [
                {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
                for call in calls
            ]
        assert response.output_text == "You said: rain"
    with client.responses.stream(model="small", input="Sort ascending: 31, 7, 19") as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output_text == "7, 19, 31"
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds


with OpenAI(base_url=sys.argv[1], api_key="none") as one:
    for check in (tools, schemas, responses):
        check(one)
