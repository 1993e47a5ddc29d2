"""Translate a body of Anthropic's /v1/messages into one of /v1/chat/completions; errors name the fields of the former.

One message may become several, because each tool result is a message of its own. Consecutive texts of one role become
one text with an empty line between them; those of the assistant are joined unchanged.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any, Final, Literal

from pydantic import Field

from gateway.http.api import THREAD
from gateway.http.names import BodyKind, FieldNames
from gateway.http.requests import Extensions, Json, generate_request
from gateway.models.catalog import Catalog
from sluice.openai.bodies import Entries, Part, read
from sluice.openai.fields import BadField, check_entries, check_kind
from sluice.openai.requests import CHAT
from sluice.v1 import inference_pb2 as pb

_REMEDIES: Final[Mapping[str, str]] = {
    "service_tier": "is not supported; the header x-sluice-priority sets the priority",
    THREAD: "is not supported; send the whole conversation in messages",
    "n": "is not supported; send a request for each answer",
    "stop": "is not supported; send stop_sequences",
    "max_tokens_to_sample": "is not supported; send max_tokens",
}
"""Errors that name a remedy, by unsupported field."""
_DROPPED: Final = ("thinking", "redacted_thinking")
"""Blocks of earlier answers that are left out of the prompt."""
_TEXTS: Final = ("text",)
_KINDS_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", *_DROPPED),
    "system": _TEXTS,
}
"""Types of blocks that messages may have, by role."""
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


class _Block(Part):
    """A block of a message. Its fields do not change the prompt; kinds of blocks add those that do."""

    type: str
    cache_control: Any = None
    citations: Any = None
    caller: Any = None
    toolset_name: Any = None


class _TextBlock(_Block):
    text: str


class _ToolUse(_Block):
    id: Any = None
    name: Any = None
    input: dict[str, Any]


class _ToolResult(_Block):
    tool_use_id: Any = None
    content: Any = ()
    is_error: bool = False


class _Thought(_Block, extra="ignore"):
    pass


_BLOCKS: Final[Mapping[str, type[_Block]]] = {
    "text": _TextBlock,
    "tool_use": _ToolUse,
    "tool_result": _ToolResult,
    **dict.fromkeys(_DROPPED, _Thought),
}


class _Message(Part):
    role: Literal["user", "assistant", "system"]
    content: Any


class _Metadata(Part):
    user_id: str | None = None


class _Thinking(Part, extra="ignore"):
    type: Literal["disabled", "adaptive"]
    """Others would take the decision from the model and its template."""


class _Format(Part):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class _OutputConfig(Part):
    effort: str = "high"
    format: _Format | None = None


class _Edit(Part, extra="ignore"):
    type: str = Field(pattern="^clear_thinking_")
    """Prompts never have thinking; other edits would change them."""


class _ContextManagement(Part, extra="ignore"):
    edits: Entries[_Edit] = Field([])


class _CustomTool(Part):
    """A tool; its type and the fields behind the schema are accepted with values that change nothing."""

    type: Literal["custom"] = "custom"
    name: Any = None
    description: Any = None
    strict: Any = None
    input_schema: Any
    cache_control: Any = None
    allowed_callers: list[Literal["direct"]] = Field([], min_length=1, max_length=1)
    defer_loading: Literal[False] = False
    eager_input_streaming: bool = False  # tool calls are always sent whole
    input_examples: list[Any] = Field([], max_length=0)

    def function(self) -> Json:
        """Return the tool as chats have it."""
        function = self.model_dump(include={"name", "description", "strict"}, exclude_none=True)
        return {"type": "function", "function": {**function, "parameters": self.input_schema}}


class _ToolChoice(Part):
    type: Literal["auto", "any", "none", "tool"]
    name: Any = None
    disable_parallel_tool_use: bool = False

    def choice(self) -> Any:
        """Return the choice as chats have it."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return _CHOICES[self.type]


class _MessagesOptions(Extensions):
    """Fields with the same name in chats; some are Sluice's own."""

    model: Any = None
    max_tokens: int | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: Any = None
    top_k: Any = None


class _MessagesFields(_MessagesOptions):
    """The body; fields behind `tool_choice` are accepted with values that change nothing."""

    messages: Entries[Any]
    system: Any = ()
    stream: bool = False
    stop_sequences: Entries[Any] = Field([])
    metadata: _Metadata = _Metadata()
    output_config: _OutputConfig = _OutputConfig()
    output_format: _Format | None = None
    tools: Entries[_CustomTool] = Field([])
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    context_management: _ContextManagement | None = None
    cache_control: Any = None
    service_tier: Literal["auto", "standard_only"] = "auto"
    speed: Literal["standard"] = "standard"
    mcp_servers: list[Any] = Field([], max_length=0)

    def chat(self) -> Json:
        """Return the fields of a chat, without its messages."""
        config, choice = self.output_config, self.tool_choice
        chat = self.declared_in(_MessagesOptions)
        chat["stop"] = self.stop_sequences
        chat["user"] = self.metadata.user_id
        # The default effort of Anthropic's API leaves the decision to the model.
        chat["reasoning_effort"] = None if config.effort == "high" else config.effort
        if shape := config.format or self.output_format:
            schema = {"name": "answer", "schema": shape.schema_}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        chat["tools"] = [tool.function() for tool in self.tools]
        if choice is not None:
            chat["tool_choice"] = choice.choice()
            chat["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
        return chat


class MessagesBody:
    """A body of /v1/messages or /v1/messages/count_tokens.

    Attributes:
        streams: Whether the answer is streamed.
        caches: Whether any part of the body asks for prompt caching.
        named: Returns the body's name of the field at a path of the chat, or of the proto.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        """Read `body`; raise BadField for an unsupported field."""
        fields = read(_MessagesFields, body, remedies=_REMEDIES)
        self.streams = fields.stream
        self._chat = fields.chat()
        self._messages: list[Json] = []
        self._places: dict[str, str] = {}
        self.named = FieldNames(BodyKind.MESSAGE, body, self._places)
        for path, block in _blocks(fields.system, "system", _TEXTS):
            if block.text:
                self._add_block("system", block, "system", path)
        self._last_role = ""
        for index, entry in enumerate(fields.messages):
            path = f"messages[{index}]"
            message = read(_Message, entry, path)
            self._last_role = role = message.role
            for block_path, block in _blocks(message.content, f"{path}.content", _KINDS_OF[role]):
                self._add_block(role, block, path, block_path)
        self.caches = _asks_for_cache(body)

    def request(self, catalog: Catalog) -> pb.GenerateRequest:
        """Return the request of the body.

        Clients must send `max_tokens` without knowing the model, so a value above the model's limit is clamped.

        Raises:
            BadField: A field is unsupported, or its value is invalid.
        """
        max_tokens = self._chat["max_tokens"]
        if max_tokens is None:
            raise BadField("max_tokens: is required; send the length that the answer may have")
        if self._last_role == "assistant":
            raise BadField(
                "messages: the last one is of the assistant, whose text no model continues; end with one of the user"
            )
        limit = catalog.answer_limits.get(str(self._chat["model"]), catalog.answer_limit)
        if max_tokens > limit > 0:  # 0: the model is unknown, which validation reports
            self._chat["max_tokens"] = limit
        return self._chat_request()

    def count_request(self) -> pb.CountTokensRequest:
        """Return a request to count the prompt of the body; it needs no `max_tokens`.

        Raises:
            BadField: A field of the conversation or of the tools is unsupported, or its value is invalid.
        """
        request = self._chat_request()
        has_no_tools = request.tool_choice.mode == pb.TOOL_CHOICE_MODE_NONE
        tools = () if has_no_tools else request.tools
        return pb.CountTokensRequest(chat=request.chat, model=request.model, tools=tools)

    def _chat_request(self) -> pb.GenerateRequest:
        """Return the request of the translated body; errors name the fields of the caller's body."""
        try:
            return generate_request(CHAT, {**self._chat, "messages": self._messages})[0]
        except BadField as error:
            # The message is "FIELD: problem", with a field of the translated body.
            path, _, description = str(error).partition(": ")
            raise BadField(f"{self.named(path)}: {description}") from error

    def _add_block(self, role: str, block: _Block, path: str, block_path: str) -> None:
        """Add a block of the message at `path` to the chat."""
        match block:
            case _TextBlock():
                message = self._message(role, path)
                # The model must see its own text unchanged.
                gap = "" if role == "assistant" else "\n\n"
                message["content"] = gap.join(filter(None, (message["content"], block.text)))
            case _ToolUse():
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                calls = self._message(role, path).setdefault("tool_calls", [])
                place = f"messages[{len(self._messages) - 1}].tool_calls[{len(calls)}]"
                self._places[place] = block_path
                calls.append({"id": block.id, "type": "function", "function": function})
            case _ToolResult():
                message = self._message("tool", block_path)
                message |= {
                    "tool_call_id": block.tool_use_id,
                    "content": _result(block, block_path),
                }

    def _message(self, role: str, path: str) -> Json:
        """Return the last message if it has this role, which is not "tool", else a new one that begins at `path`."""
        is_last = bool(self._messages) and self._messages[-1]["role"] == role
        if not is_last or role == "tool":
            self._places[f"messages[{len(self._messages)}]"] = path
            self._messages.append({"role": role, "content": ""})
        return self._messages[-1]


def _result(block: _ToolResult, path: str) -> str:
    """Return the text of a tool result."""
    texts = _blocks(block.content, f"{path}.content", _TEXTS)
    text = "\n\n".join(text.text for _, text in texts)
    # The role tool has no flag for errors, so the text has to say it.
    if block.is_error and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return text


def _asks_for_cache(body: Mapping[str, Any]) -> bool:
    contents = [message.get("content") for message in body["messages"]]
    lists = [*contents, body.get("system"), body.get("tools")]
    parts = chain([body], *(parts for parts in lists if isinstance(parts, list)))
    return any(isinstance(part, dict) and part.get("cache_control") for part in parts)


def _blocks(content: Any, path: str, kinds: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield each block of `content`, of one of these `kinds`, with its path; a text is one block."""
    if isinstance(content, str):
        yield path, _TextBlock(type="text", text=content)
        return
    check_entries(path, content)
    if not isinstance(content, list | tuple):
        raise BadField(f"{path}: is neither text nor a list of blocks")
    for index, block in enumerate(content):
        block_path = f"{path}[{index}]"
        check_kind(block_path, block, dict)
        kind = block.get("type")
        if kind not in kinds:
            served = " and ".join(served for served in kinds if served not in _DROPPED)
            raise BadField(
                f"{block_path}: blocks of type {kind!r:.40} are not supported here; send {served}"
            )
        yield block_path, read(_BLOCKS[kind], block, block_path)
