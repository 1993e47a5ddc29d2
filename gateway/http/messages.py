"""Translate a body of Anthropic's /v1/messages into one of /v1/chat/completions; errors name the fields of the former.

One message may become several, because each tool result is a message of its own. Consecutive texts of one role become
one text with an empty line between them; those of the assistant are joined unchanged.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from gateway.http.anthropic import THREAD
from gateway.http.names import BodyKind, FieldNames
from gateway.http.requests import EXTENSIONS, Json, generate_request, translate_fields
from sluice.openai.fields import BadField, check_entries, check_kind
from sluice.openai.requests import CHAT
from sluice.v1 import inference_pb2 as pb

_SAME: Final = ("model", "top_p", "top_k", "max_tokens", *EXTENSIONS)
"""Fields with the same name in chats; the last ones are Sluice's own."""
_NO_EFFECT: Final[Mapping[str, tuple[Any, ...]]] = {
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "mcp_servers": ([],),
}
"""Unsupported fields that are accepted with a value that changes nothing."""
_REMEDIES: Final[Mapping[str, str]] = {
    "service_tier": "is not supported; the header x-sluice-priority sets the priority",
    THREAD: "is not supported; send the whole conversation in messages",
    "n": "is not supported; send a request for each answer",
    "stop": "is not supported; send stop_sequences",
    "max_tokens_to_sample": "is not supported; send max_tokens",
}
"""Errors that name a remedy, by unsupported field."""
_IGNORED_IN_BLOCKS: Final = frozenset({"cache_control", "citations", "caller", "toolset_name"})
"""Fields of blocks that do not change the prompt."""
_TOOL_DEFAULTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "type": ("custom",),
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "eager_input_streaming": (True, False),  # tool calls are always sent whole
    "input_examples": ([],),
}
"""Unsupported fields of tools that are accepted with a value that changes nothing."""
_DROPPED: Final = ("thinking", "redacted_thinking")
"""Blocks of earlier answers that are left out of the prompt."""
_TEXTS: Final = ("text",)
_BLOCKS: Final[Mapping[str, tuple[str, ...]]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", *_DROPPED),
    "system": _TEXTS,
}
"""Types of blocks that messages may have, by role."""
_THINKING: Final = ("disabled", "adaptive")
"""Types of thinking that leave the decision to the model and its template."""
_EFFORT: Final = "high"
"""Anthropic's default effort."""
_CLEAR_THINKING: Final = "clear_thinking_"
"""Prefix of the types of context edits that drop thinking, which prompts never have."""
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_MESSAGE: Final = re.compile(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\])?(?:\.(\w+))?")
_PARTS: Final[Mapping[str, str]] = {"tool_call_id": "tool_use_id", "arguments": "input"}
"""Names that blocks have for fields of messages and tool calls."""


@dataclass
class _Turn:
    """A message of the chat, and its path in the body.

    Attributes:
        path: Path of the message, block or system prompt that it begins with.
        calls: Tool calls; `call_paths` are their paths.
        call_id: Id of the call that a turn of role tool answers.
    """

    role: str
    path: str
    texts: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    call_paths: list[str] = field(default_factory=list)
    call_id: Any = None

    def message(self) -> Json:
        """Return the turn as a message of a chat."""
        # The model must see its own text unchanged.
        is_own = self.role == "assistant"
        text = "".join(self.texts) if is_own else "\n\n".join(filter(None, self.texts))
        calls = {"tool_calls": self.calls} if self.calls else {}
        answers = {"tool_call_id": self.call_id} if self.role == "tool" else {}
        return {"role": self.role, "content": text, **calls, **answers}


class MessagesBody:
    """A body of /v1/messages or /v1/messages/count_tokens.

    Attributes:
        streams: Whether the answer is streamed.
        caches: Whether any part of the body asks for prompt caching.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        """Read `body`; raise BadField for an unsupported field."""
        self._fields = {name: value for name, value in body.items() if value is not None}
        self.streams = self._fields.pop("stream", False)
        check_kind("stream", self.streams, bool)
        self._turns: list[_Turn] = []
        self._names = FieldNames(BodyKind.MESSAGE, body)
        self._add_system(self._fields.pop("system", []))
        messages = self._fields.pop("messages", None)
        self._last_role = self._add_messages(messages)
        self.caches = _asks_for_cache(body)
        self._fields.pop("cache_control", None)

    def request(self, max_answer_tokens: Callable[[str], int]) -> pb.GenerateRequest:
        """Return the request of the body.

        Clients must send `max_tokens` without knowing the model, so a value above the model's limit is clamped.

        Args:
            max_answer_tokens: Returns the limit of a model by name.

        Raises:
            BadField: A field is unsupported, or its value is invalid.
        """
        max_tokens = self._fields.get("max_tokens")
        if max_tokens is None:
            raise BadField("max_tokens: is required; send the length that the answer may have")
        check_kind("max_tokens", max_tokens, int)
        if self._last_role == "assistant":
            raise BadField(
                "messages: the last one is of the assistant, whose text no model continues; end with one of the user"
            )
        limit = max_answer_tokens(str(self._fields.get("model", "")))
        if max_tokens > limit > 0:  # 0: the model is unknown, which validation reports
            self._fields["max_tokens"] = limit
        return self._chat_request()

    def count_request(self) -> pb.CountTokensRequest:
        """Return a request to count the prompt that `request` would send; raise BadField as it does."""
        self._fields.pop("max_tokens", None)
        request = self._chat_request()
        has_no_tools = request.tool_choice.mode == pb.TOOL_CHOICE_MODE_NONE
        tools = () if has_no_tools else request.tools
        return pb.CountTokensRequest(chat=request.chat, model=request.model, tools=tools)

    def name_of(self, path: str) -> str:
        """Return the body's name of the field at a path of the chat, or of the proto."""
        if path == "labels.user" and isinstance(self._fields.get("metadata"), dict):
            return "metadata.user_id"
        name = self._names(path)
        match = _MESSAGE.match(name)
        if match is None or int(match[1]) >= len(self._turns):
            return name
        turn = self._turns[int(match[1])]
        place = turn.path if match[2] is None else turn.call_paths[int(match[2])]
        if match[3] is None or place == "system":
            return place
        return f"{place}.{_PARTS.get(match[3], match[3])}"

    def _chat_request(self) -> pb.GenerateRequest:
        messages = [turn.message() for turn in self._turns]
        fields = translate_fields(self._fields, _SAME, _TRANSLATED, _NO_EFFECT, _REMEDIES)
        chat = {"messages": messages, **fields}
        try:
            return generate_request(CHAT, chat)[0]
        except BadField as error:
            path, _, description = str(error).partition(": ")
            raise BadField(f"{self.name_of(path)}: {description}") from error

    def _add_system(self, system: Any) -> None:
        texts = [text for _, _, text in _blocks(system, "system", _TEXTS)]
        if any(texts):
            self._turns.append(_Turn("system", "system", texts))

    def _add_messages(self, messages: Any) -> str:
        """Add all messages, and return the role of the last one."""
        if messages is None:
            raise BadField("messages: is required; send a list of messages")
        check_entries("messages", messages, list)
        role = ""
        for index, message in enumerate(messages):
            role = self._add_message(message, f"messages[{index}]")
        return role

    def _add_message(self, message: Any, path: str) -> str:
        check_kind(path, message, dict)
        role = str(message.get("role"))
        if role not in _BLOCKS:
            raise BadField(f"{path}.role: must be one of {', '.join(_BLOCKS)}")
        _check_known(message, {"role", "content"}, path)
        if message.get("content") is None:
            raise BadField(f"{path}.content: is required; send text or a list of blocks")
        for block_path, kind, block in _blocks(
            message["content"], f"{path}.content", _BLOCKS[role]
        ):
            if kind == "text":
                self._turn(role, path).texts.append(block)
            elif kind == "tool_use":
                self._add_call(self._turn(role, path), block, block_path)
            elif kind == "tool_result":
                self._add_result(block, block_path)
        return role

    def _turn(self, role: str, path: str) -> _Turn:
        """Return the last turn if it has this role, else a new one."""
        if not self._turns or self._turns[-1].role != role:
            self._turns.append(_Turn(role, path))
        return self._turns[-1]

    def _add_call(self, turn: _Turn, block: Mapping[str, Any], path: str) -> None:
        _check_known(block, {"type", "id", "name", "input"}, path)
        check_kind(f"{path}.input", block.get("input"), dict)
        function = {"name": block.get("name"), "arguments": json.dumps(block["input"])}
        turn.calls.append({"id": block.get("id"), "type": "function", "function": function})
        turn.call_paths.append(path)

    def _add_result(self, block: Mapping[str, Any], path: str) -> None:
        _check_known(block, {"type", "tool_use_id", "content", "is_error"}, path)
        content, is_error = block.get("content"), block.get("is_error")
        blocks = _blocks([] if content is None else content, f"{path}.content", _TEXTS)
        text = "\n\n".join(text for _, _, text in blocks)
        check_kind(f"{path}.is_error", is_error or False, bool)
        # The role tool has no flag for errors, so the text has to say it.
        if is_error and not text.lower().startswith("error"):
            text = f"Error: {text}"
        self._turns.append(_Turn("tool", path, [text], call_id=block.get("tool_use_id")))


def _asks_for_cache(body: Mapping[str, Any]) -> bool:
    contents = [message.get("content") for message in body["messages"]]
    lists = [*contents, body.get("system"), body.get("tools")]
    parts = chain([body], *(parts for parts in lists if isinstance(parts, list)))
    return any(isinstance(part, dict) and part.get("cache_control") for part in parts)


def _blocks(content: Any, path: str, kinds: Collection[str]) -> Sequence[tuple[str, str, Any]]:
    """Return path, type and value of each block of `content`; the value is the text of a text block, else the block."""
    if isinstance(content, str):
        return [(path, "text", content)]
    check_entries(path, content)
    if not isinstance(content, list):
        raise BadField(f"{path}: is neither text nor a list of blocks")
    return [_block(block, f"{path}[{index}]", kinds) for index, block in enumerate(content)]


def _block(block: Any, path: str, kinds: Collection[str]) -> tuple[str, str, Any]:
    check_kind(path, block, dict)
    kind = block.get("type")
    if kind not in kinds:
        served = " and ".join(served for served in kinds if served not in _DROPPED)
        raise BadField(f"{path}: blocks of type {kind!r:.40} are not supported here; send {served}")
    if kind != "text":
        return path, kind, block
    _check_known(block, {"type", "text"}, path)
    check_kind(f"{path}.text", block.get("text"), str)
    return path, kind, block["text"]


def _check_known(value: Mapping[str, Any], known: Collection[str], path: str) -> None:
    unknown = {name for name, value in value.items() if value is not None}
    unknown -= _IGNORED_IN_BLOCKS | set(known)
    if unknown:
        raise BadField(f"{path}.{min(unknown)}: is not supported; leave it out")


def _temperature(value: Any) -> Json:
    check_kind("temperature", value, float)
    if not 0 <= value <= 1:
        raise BadField("temperature: must be from 0 to 1")
    return {"temperature": value}


def _stops(value: Any) -> Json:
    check_entries("stop_sequences", value, list)
    return {"stop": value}


def _metadata(value: Any) -> Json:
    check_kind("metadata", value, dict)
    _check_known(value, {"user_id"}, "metadata")
    user = value.get("user_id")
    if user is None:
        return {}
    check_kind("metadata.user_id", user, str)
    return {"user": user}


def _thinking(value: Any) -> Json:
    check_kind("thinking", value, dict)
    if value.get("type") not in _THINKING:
        raise BadField(f"thinking: type must be one of {', '.join(_THINKING)}")
    return {}


def _output_config(value: Any) -> Json:
    check_kind("output_config", value, dict)
    _check_known(value, {"format", "effort"}, "output_config")
    effort, shape = value.get("effort"), value.get("format")
    chat = {} if effort in (None, _EFFORT) else {"reasoning_effort": effort}
    return chat if shape is None else {**chat, **_output_format(shape)}


def _output_format(value: Any) -> Json:
    match value:
        case {"type": "json_schema", "schema": dict(schema)}:
            shape = {"name": "answer", "schema": schema}
            return {"response_format": {"type": "json_schema", "json_schema": shape}}
    raise BadField("output_config.format: must be of type json_schema with a schema")


def _context_management(value: Any) -> Json:
    check_kind("context_management", value, dict)
    edits = value.get("edits") or []
    check_entries("context_management.edits", edits, list)
    for index, edit in enumerate(edits):
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not str(kind).startswith(_CLEAR_THINKING):
            raise BadField(
                f"context_management.edits[{index}]: is not supported; send the messages as the model should read them"
            )
    return {}


def _tools(tools: Any) -> Json:
    check_entries("tools", tools, list)
    return {"tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]}


def _tool(tool: Any, path: str) -> Json:
    check_kind(path, tool, dict)
    function: Json = {}
    for name, value in tool.items():
        if name in ("name", "description", "strict") and value is not None:
            function[name] = value
        elif name == "input_schema":
            function["parameters"] = value
        elif name != "cache_control" and value not in (None, *_TOOL_DEFAULTS.get(name, ())):
            raise BadField(
                f"{path}.{name}: {value!r:.40} is not supported; send name, description and input_schema"
            )
    if function.get("parameters") is None:
        raise BadField(f"{path}.input_schema: is required; send a JSON Schema of an object")
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Json:
    check_kind("tool_choice", choice, dict)
    _check_known(choice, {"type", "name", "disable_parallel_tool_use"}, "tool_choice")
    kind, single = str(choice.get("type")), choice.get("disable_parallel_tool_use") or False
    check_kind("tool_choice.disable_parallel_tool_use", single, bool)
    chosen: Json = {"parallel_tool_calls": False} if single else {}
    if kind == "tool":
        function = {"name": choice.get("name")}
        return {"tool_choice": {"type": "function", "function": function}, **chosen}
    if kind not in _CHOICES:
        raise BadField(f"tool_choice.type: must be one of {', '.join(_CHOICES)}, tool")
    return {"tool_choice": _CHOICES[kind], **chosen}


_TRANSLATED: Final[Mapping[str, Callable[[Any], Json]]] = {
    "temperature": _temperature,
    "stop_sequences": _stops,
    "metadata": _metadata,
    "thinking": _thinking,
    "output_config": _output_config,
    "output_format": _output_format,
    "context_management": _context_management,
    "tools": _tools,
    "tool_choice": _tool_choice,
}
"""Fields that have another name or form in chats."""
