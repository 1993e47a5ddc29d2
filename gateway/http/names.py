"""Name fields in errors as the client sent them: translate proto paths into fields and headers of the HTTP APIs.

Validation reports wrong fields by their path in the proto, such as `sampling.json_schema`. `_TABLE` has the names
by kind of body; `FieldNames` adds what depends on the body of a call.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Final

from sluice.defaults import TENANT_METADATA

IDEMPOTENCY_KEY: Final = "idempotency-key"
LABEL: Final = "x-sluice-label-"
"""Prefix of headers that set labels; the rest of the name is the key."""


class BodyKind(Enum):
    """Kinds of bodies; each has names of its own for some fields."""

    CHAT = auto()
    COMPLETION = auto()
    TEXTS = auto()
    """Embeddings and rerank."""
    RESPONSE = auto()
    MESSAGE = auto()
    """Anthropic's messages."""
    BATCH = auto()
    NONE = auto()
    """A call whose body is not read."""


_ALL: Final = frozenset(BodyKind)
_TABLE: Final[Sequence[tuple[str, str, Collection[BodyKind]]]] = (
    ("^(input|chat)$", "messages", {BodyKind.CHAT, BodyKind.MESSAGE}),
    ("^sampling.logprobs$", "top_logprobs", {BodyKind.CHAT, BodyKind.RESPONSE}),
    ("^(input|raw_prompt)$", "prompt", {BodyKind.COMPLETION}),
    (r"^(token_answers\[0\]|tokens)\.token_ids$", "prompt", {BodyKind.COMPLETION}),
    (r"^answers\[0\]$", "prompt", {BodyKind.COMPLETION}),
    ("^alternatives$", "logprobs", {BodyKind.COMPLETION}),
    ("^texts", "input", {BodyKind.TEXTS}),
    ("^spec.labels", "labels", {BodyKind.BATCH}),
    ("^spec.input.upload_id$", "input_file_id", {BodyKind.BATCH}),
    ("^spec.limits.deadline_time$", "completion_window", {BodyKind.BATCH}),
    ("^spec.results_expire_after", "output_expires_after", {BodyKind.BATCH}),
    # The names of OpenAI's chats.
    ("^idempotency_key$", IDEMPOTENCY_KEY, _ALL),
    (f"^metadata\\.({TENANT_METADATA})$", r"\1", _ALL),
    ("^audio.data$", "file", _ALL),
    ("^sampling.json_schema$", "response_format", _ALL),
    (r"^(audio|sampling|chat)\.", "", _ALL),
    (r"^(tools\[\d+\])\.(?!function)", r"\1.function.", _ALL),
    (r"(tool_calls\[\d+\])\.(name|arguments)$", r"\1.function.\2", _ALL),
    ("^tool_choice.function$", "tool_choice.function.name", _ALL),
    # Bodies that were translated into chats.
    (r"^response_format(\.json_schema)?$", "text.format", {BodyKind.RESPONSE}),
    ("^max_tokens$", "max_output_tokens", {BodyKind.RESPONSE}),
    ("^reasoning_effort$", "reasoning.effort", {BodyKind.RESPONSE}),
    (r"^(tools\[\d+\]|tool_choice)\.function\.", r"\1.", {BodyKind.RESPONSE}),
    ("^(chat|messages)$", "input", {BodyKind.RESPONSE}),
    ("^response_format.*", "output_config.format", {BodyKind.MESSAGE}),
    ("^reasoning_effort$", "output_config.effort", {BodyKind.MESSAGE}),
    (r"^stop(?=$|\[)", "stop_sequences", {BodyKind.MESSAGE}),
    ("^labels.user$", "metadata.user_id", {BodyKind.MESSAGE}),
    ("^parallel_tool_calls$", "tool_choice.disable_parallel_tool_use", {BodyKind.MESSAGE}),
    (r"^tool_choice\.function\.", "tool_choice.", {BodyKind.MESSAGE}),
    (r"^(tools\[\d+\])\.function", r"\1", {BodyKind.MESSAGE}),
    (r"^(tools\[\d+\])\.parameters", r"\1.input_schema", {BodyKind.MESSAGE}),
)
"""Pattern in a path, replacement, and the kinds of bodies that it is for; applied from the first row to the last."""
_RULES: Final = {
    kind: [(pattern, name) for pattern, name, kinds in _TABLE if kind in kinds] for kind in BodyKind
}
_MESSAGE: Final = re.compile(r"(messages\[\d+\](?:\.tool_calls\[\d+\])?)(.*)", re.DOTALL)
_ITEM_FIELDS: Final[Mapping[BodyKind, Mapping[str, str]]] = {
    BodyKind.RESPONSE: {
        ".function.name": ".name",
        ".function.arguments": ".arguments",
        ".tool_call_id": ".call_id",
        ".id": ".call_id",
    },
    BodyKind.MESSAGE: {
        ".function.name": ".name",
        ".function.arguments": ".input",
        ".tool_call_id": ".tool_use_id",
    },
}
"""Names that items and blocks have for fields of messages and tool calls."""


class FieldNames:
    """The names of fields in one call.

    Args:
        kind: Kind of the body.
        body: Body of the call; decides between several names of the same field.
        places: Paths in the body of the messages and tool calls of a chat, by their path in the chat, for a body that
            was translated into a chat.
    """

    def __init__(
        self,
        kind: BodyKind = BodyKind.NONE,
        body: Mapping[str, Any] = {},
        places: Mapping[str, str] = {},
    ) -> None:
        self._rules = _RULES[kind]
        self._item_fields = _ITEM_FIELDS.get(kind, {})
        self._body = body
        self._places = places

    def __call__(self, path: str) -> str:
        """Return the name of the field at the proto path `path`."""
        for pattern, name in self._rules:
            path = re.sub(pattern, name, path)
        if path == "labels" or path.startswith("labels."):
            return self._label(path.removeprefix("labels").removeprefix("."))
        if self._places and (message := _MESSAGE.fullmatch(path)):
            return self._item_field(*message.groups())
        return self._as_sent(path)

    def _label(self, key: str) -> str:
        """Return the field or header that set the label `key`, or labels in general for an empty key."""
        body = self._body
        fields = [name for name in ("metadata", "labels") if isinstance(body.get(name), dict)]
        if not key:
            return fields[0] if fields else LABEL + "NAME"
        if key == "user" and "user" in body:
            return key
        field = next((name for name in fields if key in body[name]), None)
        return f"{LABEL}{key}" if field is None else f"{field}.{key}"

    def _item_field(self, place: str, field: str) -> str:
        item = self._places.get(place, place)
        if "[" not in item:  # instructions, or an input that is one text
            return item
        if item.endswith(".output"):  # a tool result: its output became the content of a message
            item = item if field == ".content" else item.removesuffix(".output")
            field = field.removeprefix(".content")
        return item + self._item_fields.get(field, field)

    def _as_sent(self, path: str) -> str:
        body, alias = self._body, "max_completion_tokens"
        if path == "max_tokens" and alias in body and body.get("max_tokens") is None:
            return alias
        if path == "stop[0]" and isinstance(body.get("stop"), str):
            return "stop"
        if path == "input[0]" and isinstance(body.get("input"), str):
            return "input"
        return path


plain_names: Final = FieldNames()
"""Names for calls whose body is not read."""
