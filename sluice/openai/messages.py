"""Translate messages of a chat from OpenAI's format into protobuf.

Clients send messages that they wrote, and answers of other servers. Fields that would not change the prompt are
ignored, other unsupported fields are refused by name.
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
"""Types of text parts, in chats and in the Responses API."""
_REASONING_PARTS: Final = ("thinking", "redacted_thinking", "reasoning")
"""Types of parts with reasoning, which chat templates leave out."""
_IGNORED: Final = frozenset(
    {
        "name",
        "id",
        "type",
        "status",
        "phase",
        "metadata",
        "created_at",
        "timestamp",
        "cache_control",
        "provider_specific_fields",
        "annotations",
    }
)
"""Fields of messages that do not change the prompt."""
_REFUSED: Final[Mapping[str, str]] = {
    "audio": "is not supported; send the text of the answer as content",
    "function_call": "is not supported; send tool_calls",
    "images": "is not supported; send text",
    "prefix": "is not supported; leave it out, or send the prompt to /v1/completions",
    "partial": "is not supported; leave it out, or send the prompt to /v1/completions",
}
"""Fields of an assistant's message that would change the prompt, with what to do instead; others are ignored."""
_MAY_BE_NULL: Final = (pb.ROLE_ASSISTANT, pb.ROLE_TOOL)
"""Roles whose messages may have null as their content."""
_TYPE_CHARS_MAX: Final = 64
"""Most characters of an unknown type that an error quotes."""


def set_messages(chat: pb.ChatInput, messages: Any, system: Collection[pb.ChatMessage]) -> None:
    """Add `messages` to `chat`, after the `system` messages unless they begin with one of their own.

    Raises:
        BadField: A message is invalid or unsupported.
    """
    check_entries("messages", messages, list)
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadField(f"messages[{index}]: is not an object")
    has_system = messages and ROLES.get(str(messages[0].get("role"))) == pb.ROLE_SYSTEM
    if not has_system:
        chat.messages.extend(system)
    for index, message in enumerate(messages):
        _set_message(chat.messages.add(), message, f"messages[{index}]")


def _set_message(message: pb.ChatMessage, fields: Mapping[str, Any], path: str) -> None:
    role = fields.get("role")
    if not isinstance(role, str) or role not in ROLES:
        quoted = repr(role)[:_TYPE_CHARS_MAX]
        raise BadField(f"{path}.role: {quoted} is not one of {', '.join(ROLES)}")
    message.role = ROLES[role]
    names = {key for key, value in fields.items() if value not in (None, [])}
    _check_fields(names, message.role, path)
    if "tool_calls" in names:
        _set_calls(message, fields["tool_calls"], f"{path}.tool_calls")
    if message.role == pb.ROLE_TOOL:
        set_field(message, "tool_call_id", fields.get("tool_call_id"), f"{path}.")
    content = fields["content"] if "content" in names else fields.get("refusal")
    if content is None and (message.role in _MAY_BE_NULL or fields.get("content") == []):
        content = ""
    set_field(message, "content", text_of(content, f"{path}.content"), f"{path}.")


def _check_fields(names: Collection[str], role: "pb.Role.ValueType", path: str) -> None:
    """Raise BadField for a field that a message of this role cannot have."""
    if role == pb.ROLE_ASSISTANT:
        wrong = min(_REFUSED.keys() & names, default=None)
    else:
        allowed = {"role", "content"} | _IGNORED
        if role == pb.ROLE_TOOL:
            allowed |= {"tool_call_id"}
        wrong = min(set(names) - allowed, default=None)
    if wrong is not None:
        raise BadField(f"{path}.{wrong}: {_REFUSED.get(wrong, 'is not supported; leave it out')}")


def text_of(content: Any, path: str) -> Any:
    """Return the joined text of a content that is a list of parts; return any other content unchanged.

    Raises:
        BadField: A part is not text.
    """
    if not isinstance(content, list):
        return content
    check_entries(path, content)
    return "".join(_part(part, index, path) for index, part in enumerate(content))


def _part(part: Any, index: int, path: str) -> str:
    match part:
        case str(text) | {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": kind, "text": str(text)} if kind in TEXT_PARTS:
            return text
        case {"type": kind} if kind in _REASONING_PARTS:
            return ""
        case {"type": str(kind)} if kind not in TEXT_PARTS:
            raise BadField(
                f"{path}: part {index} is of type {kind[:_TYPE_CHARS_MAX]!r}; send parts of type text"
            )
    raise BadField(f'{path}: part {index} is not text; send {{"type": "text", "text": "..."}}')


def _set_calls(message: pb.ChatMessage, calls: Any, path: str) -> None:
    """Add the tool calls of an assistant's message to `message`; raise BadField if one is invalid."""
    check_entries(path, calls, list)
    for index, call in enumerate(calls):
        where, fields = f"{path}[{index}]", without_nulls(call)
        if not isinstance(fields, dict):
            raise BadField(f"{where}: is not an object")
        call_id = fields.pop("id", "")
        function, message_call = (
            function_of({"type": "function", **fields}, where),
            message.tool_calls.add(),
        )
        set_field(message_call, "id", call_id, f"{where}.")
        set_field(message_call, "name", function.get("name"), f"{where}.function.")
        arguments = function.get("arguments", "")
        if isinstance(arguments, dict):  # some servers do not encode arguments as JSON in a string
            arguments = json_of(arguments, f"{where}.function.arguments")
        set_field(message_call, "arguments", arguments, f"{where}.function.")


_IGNORED_IN_CALLS: Final = frozenset(
    {"index", "cache_control", "provider_specific_fields", "extra_content"}
)
"""Fields of tools and tool calls that do not change the prompt."""


def function_of(value: Any, path: str) -> Mapping[str, Any]:
    """Return the function in an object of type function.

    Raises:
        BadField: The object is of another type, or has other fields.
    """
    match without_nulls(value):
        case {"type": "function", "function": dict(function)} as names if len(names) == 2:
            return dict(without_nulls(function))
    raise BadField(f'{path}: must be {{"type": "function", "function": {{...}}}}')


def without_nulls(value: Any) -> Any:
    """Return an object without null and ignored fields; return any other value unchanged."""
    if not isinstance(value, dict):
        return value
    return {
        name: field
        for name, field in value.items()
        if field is not None and name not in _IGNORED_IN_CALLS
    }


def json_of(value: Any, path: str) -> str:
    """Return the object `value` as JSON.

    Raises:
        BadField: It is not an object, or is nested too deeply.
    """
    check_kind(path, value, dict)
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise BadField(f"{path}: is nested too deeply; send fewer levels") from None
