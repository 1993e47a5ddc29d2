"""A conversation with tools as chat templates take it: the convention of transformers.

https://huggingface.co/docs/transformers/chat_extras
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gateway.tools.formats import ToolFormat
from gateway.tools.tool import Tool, ToolCall


class Turn(Protocol):
    """One message of a conversation."""

    @property
    def role(self) -> str:
        """The speaker."""

    @property
    def content(self) -> str:
        """The text."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """By the assistant."""

    @property
    def call_id(self) -> str:
        """The call that the turn of a tool answers; empty for other turns."""


def function_of(tool: Tool) -> Mapping[str, Any]:
    """A tool."""
    parameters = tool.parameters or {"type": "object", "properties": {}}
    described = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": described}


def messages_of(turns: Sequence[Turn], form: ToolFormat | None) -> list[Mapping[str, Any]]:
    """The messages, for a model of format ``form``."""
    names = {call.id: call.name for turn in turns for call in turn.calls}
    return [_message(turn, names, form) for turn in turns]


def _message(turn: Turn, names: Mapping[str, str], form: ToolFormat | None) -> Mapping[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.calls:
        message["tool_calls"] = [_call(call, form) for call in turn.calls]
    if turn.call_id:
        message |= {"tool_call_id": _id(turn.call_id, form), "name": names[turn.call_id]}
    return message


def _call(call: ToolCall, form: ToolFormat | None) -> Mapping[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": _id(call.id, form), "type": "function", "function": function}


def _id(call_id: str, form: ToolFormat | None) -> str:
    """``call_id`` as the template takes it: that of Mistral takes ids of its own length alone."""
    if form is None or form.id_prefix or (len(call_id) == form.id_chars and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[: form.id_chars]
