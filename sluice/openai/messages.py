"""Messages of a chat in OpenAI's format, as clients write them and as they send the answers of servers back.

A field that changes nothing for the model is ignored; one that would is refused under the name that the client sent.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from sluice.openai.fields import BadField, check_entries, check_kind, set_field
from sluice.v1 import inference_pb2 as pb

ROLES: Final[Mapping[str, "pb.Role.ValueType"]] = {
    "system": pb.ROLE_SYSTEM,
    "developer": pb.ROLE_SYSTEM,
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
    "tool": pb.ROLE_TOOL,
}
TEXT_PARTS: Final = ("text", "input_text", "output_text")
"""Types of parts that are text, in chats and in the Responses API."""
_REASONING_PARTS: Final = ("thinking", "redacted_thinking", "reasoning")
"""Types of parts of an answer that templates leave out, like its reasoning apart from the text."""
_OF_MESSAGES: Final = frozenset(
    {
        *("name", "id", "type", "status", "phase", "metadata", "created_at", "timestamp"),
        *("cache_control", "provider_specific_fields", "annotations"),
    }
)
"""Fields that clients and servers put into messages and that chat templates have no place for."""
_REFUSED: Final[Mapping[str, str]] = {
    "audio": "is not served; send the text of the answer as content",
    "function_call": "is not served; send tool_calls",
    "images": "is not served; send text",
    "prefix": "is not served; leave it out, or send the prompt to /v1/completions",
    "partial": "is not served; leave it out, or send the prompt to /v1/completions",
}
"""Fields of an assistant's message that would change the prompt; any other came with an answer and is ignored."""
_MAY_BE_NULL: Final = (pb.ROLE_ASSISTANT, pb.ROLE_TOOL)
"""Whose messages may have null for a content."""
_TYPE_CHARS_MAX: Final = 64
"""Characters of an unknown type that an error quotes."""


def set_messages(chat: pb.ChatInput, messages: Any, system: Collection[pb.ChatMessage]) -> None:
    """Put ``messages`` into ``chat``, behind those of ``system`` unless they begin with a system message.

    Raises:
        BadField: one cannot be served.
    """
    check_entries("messages", messages, list)
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadField(f"messages[{at}]: is not an object")
    if not (messages and ROLES.get(str(messages[0].get("role"))) == pb.ROLE_SYSTEM):
        chat.messages.extend(system)
    for at, message in enumerate(messages):
        _set_message(chat.messages.add(), message, f"messages[{at}]")


def _set_message(message: pb.ChatMessage, given: Mapping[str, Any], path: str) -> None:
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        shown = repr(role)[:_TYPE_CHARS_MAX]
        raise BadField(f"{path}.role: {shown} is none of {', '.join(ROLES)}")
    message.role = ROLES[role]
    said = {key for key, value in given.items() if value not in (None, [])}
    _check_fields(said, message.role, path)
    if "tool_calls" in said:
        _set_calls(message, given["tool_calls"], f"{path}.tool_calls")
    if message.role == pb.ROLE_TOOL:
        set_field(message, "tool_call_id", given.get("tool_call_id"), f"{path}.")
    content = given["content"] if "content" in said else given.get("refusal")
    if content is None and (message.role in _MAY_BE_NULL or given.get("content") == []):
        content = ""
    set_field(message, "content", text_of(content, f"{path}.content"), f"{path}.")


def _check_fields(said: Collection[str], role: "pb.Role.ValueType", path: str) -> None:
    """Raise BadField for a field that the message of ``role`` at ``path`` cannot have."""
    if role == pb.ROLE_ASSISTANT:
        wrong = min(_REFUSED.keys() & said, default=None)
    else:
        own = {"tool_call_id"} if role == pb.ROLE_TOOL else set[str]()
        wrong = min(set(said) - {"role", "content"} - own - _OF_MESSAGES, default=None)
    if wrong is not None:
        raise BadField(f"{path}.{wrong}: {_REFUSED.get(wrong, 'is not served; leave it out')}")


def text_of(content: Any, path: str) -> Any:
    """Return a content as text: it may be a list of parts. What is no list is returned as it is.

    Raises:
        BadField: a part is something else.
    """
    if not isinstance(content, list):
        return content
    check_entries(path, content)
    return "".join(_part(part, at, path) for at, part in enumerate(content))


def _part(part: Any, at: int, path: str) -> str:
    match part:
        case str(text) | {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": kind, "text": str(text)} if kind in TEXT_PARTS:
            return text
        case {"type": kind} if kind in _REASONING_PARTS:
            return ""
        case {"type": str(kind)} if kind not in TEXT_PARTS:
            raise BadField(
                f"{path}: part {at} is of type {kind[:_TYPE_CHARS_MAX]!r}, which is no text; send parts of type text"
            )
    raise BadField(f'{path}: part {at} is no text; send {{"type": "text", "text": "..."}}')


def _set_calls(message: pb.ChatMessage, calls: Any, path: str) -> None:
    """Put the calls that an assistant's message made into ``message``; raise BadField where one does not fit."""
    check_entries(path, calls, list)
    for at, call in enumerate(calls):
        where, given = f"{path}[{at}]", without_nulls(call)
        if not isinstance(given, dict):
            raise BadField(f"{where}: is not an object")
        call_id = given.pop("id", "")
        function, made = function_of({"type": "function", **given}, where), message.tool_calls.add()
        set_field(made, "id", call_id, f"{where}.")
        set_field(made, "name", function.get("name"), f"{where}.function.")
        arguments = function.get("arguments", "")
        if isinstance(arguments, dict):  # of servers that do not write JSON into JSON
            arguments = json_of(arguments, f"{where}.function.arguments")
        set_field(made, "arguments", arguments, f"{where}.function.")


_OF_CALLS: Final = frozenset(
    {"index", "cache_control", "provider_specific_fields", "extra_content"}
)
"""Fields of tools and calls that clients send back and that say nothing to a model."""


def function_of(value: Any, path: str) -> Mapping[str, Any]:
    """Return what is under "function" in an object of type function.

    Raises:
        BadField: it is of another type, or has other fields.
    """
    match without_nulls(value):
        case {"type": "function", "function": dict(function)} as said if len(said) == 2:
            return dict(without_nulls(function))
    raise BadField(
        f'{path}: must be {{"type": "function", "function": {{...}}}}; no other is served'
    )


def without_nulls(value: Any) -> Any:
    """Return an object without what is null or says nothing; anything else as it is."""
    if not isinstance(value, dict):
        return value
    return {name: one for name, one in value.items() if one is not None and name not in _OF_CALLS}


def json_of(value: Any, path: str) -> str:
    """Return ``value`` as JSON.

    Raises:
        BadField: it is nested too deeply.
    """
    check_kind(path, value, dict)
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise BadField(f"{path}: is nested too deeply; send fewer levels") from None
