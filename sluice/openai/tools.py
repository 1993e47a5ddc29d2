"""Tools of a body of OpenAI's chats: what may be called, the calls that were made, and those of an answer."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sluice.openai.fields import BadField, check_entries, set_field
from sluice.v1 import inference_pb2 as pb
from sluice.wire.enums import value_of

Json = dict[str, Any]
FIELDS: Final[Sequence[str]] = ("tools", "tool_choice", "parallel_tool_calls")


def set_tools(request: pb.GenerateRequest, body: Mapping[str, Any]) -> None:
    """Puts the `FIELDS` of ``body`` into ``request``.

    Raises:
        BadField: one does not fit.
    """
    if (choice := body.get("tool_choice")) is not None:
        _set_choice(request.tool_choice, choice)
    if (parallel := body.get("parallel_tool_calls")) is not None:
        set_field(request, "parallel_tool_calls", parallel)
    tools = body.get("tools") or []
    check_entries("tools", tools, list)
    for at, tool in enumerate(tools):
        described = function_of(tool, f"tools[{at}]")
        _set_tool(request.tools.add(), described, f"tools[{at}].function")


_OF_CALLS: Final = frozenset(
    {"index", "cache_control", "provider_specific_fields", "extra_content"}
)
"""Fields of tools and calls that clients send back and that say nothing to a model."""


def function_of(value: Any, path: str) -> Mapping[str, Any]:
    """What is under "function" in an object of type function.

    Raises:
        BadField: it is of another type, or has other fields.
    """
    match _said(value):
        case {"type": "function", "function": dict(function)} as said if len(said) == 2:
            return dict(_said(function))
    raise BadField(
        f'{path}: must be {{"type": "function", "function": {{...}}}}; no other is served'
    )


def set_calls(message: pb.ChatMessage, calls: Any, path: str) -> None:
    """The calls that an assistant's turn made.

    Raises:
        BadField: one does not fit.
    """
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadField(f"{path}: is no list of objects")
    for at, call in enumerate(calls):
        where, rest = f"{path}[{at}]", _said(call)
        call_id, rest = rest.pop("id", None), {"type": "function", **rest}
        function, made = function_of(rest, where), message.tool_calls.add()
        set_field(made, "id", call_id, f"{where}.")
        for name in ("name", "arguments"):
            set_field(made, name, function.get(name), f"{where}.function.")


def calls_of(calls: Sequence[pb.ToolCall], first: int | None = None) -> list[Json]:
    """The calls of an answer; in a stream the number of the ``first`` of them."""
    return [
        {
            **({} if first is None else {"index": first + at}),
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for at, call in enumerate(calls)
    ]


def _said(value: Any) -> Any:
    """An object less what is null or says nothing; anything else as it is."""
    if not isinstance(value, dict):
        return value
    return {name: one for name, one in value.items() if one is not None and name not in _OF_CALLS}


def _set_choice(choice: pb.ToolChoice, given: Any) -> None:
    if given in ("none", "auto", "required"):
        choice.mode = value_of(pb.ToolChoiceMode, given)
        return
    name = function_of(given, "tool_choice").get("name")
    set_field(choice, "function", name, "tool_choice.")


def _set_tool(tool: pb.Tool, given: Mapping[str, Any], path: str) -> None:
    if unknown := given.keys() - {"name", "description", "parameters", "strict"}:
        raise BadField(f"{path}.{min(unknown)}: is not served")
    set_field(tool, "strict", given.get("strict", False), f"{path}.")
    for name in ("name", "description"):
        set_field(tool, name, given.get(name, "" if name == "description" else None), f"{path}.")
    parameters = given.get("parameters", {})
    if not isinstance(parameters, dict):
        raise BadField(f"{path}.parameters: is no object")
    set_field(tool, "parameters", json.dumps(parameters) if parameters else "", f"{path}.")
