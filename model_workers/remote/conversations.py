"""Conversations in the form of OpenAI's API; in the mesh they are the JSON text of a prompt."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from model_workers.remote.faults import Retry, ServerFault
from sluice.errors import InvalidRequest
from sluice.wire.text_tokens import TextTokens


def conversation_of(prompt: Sequence[int], tokens: TextTokens) -> dict[str, Any]:
    """Return messages and tools of a conversation; any other prompt is a message of the user.

    Raises:
        ServerFault: It was cut, or not made by the gateway.
    """
    text = tokens.decode(prompt)
    if prompt[0] != tokens.conversation:
        return {"messages": [{"role": "user", "content": text}]}
    try:
        messages, *tools = json.loads(text)
        conversation = {"messages": [_message_for(message) for message in messages]}
        return conversation | ({"tools": tools[0]} if tools else {})
    except (ValueError, LookupError, TypeError) as error:
        raise ServerFault("the prompt is no conversation", InvalidRequest, Retry.NEVER) from error


def _message_for(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as the API has it: arguments are JSON, a tool's answer has no name."""
    result = dict(message)
    if result["role"] == "tool":
        result.pop("name", None)
    if "tool_calls" in result:
        result["tool_calls"] = [_call_for(call) for call in result["tool_calls"]]
    return result


def _call_for(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, str):  # a text stands for one that is no JSON object
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}
