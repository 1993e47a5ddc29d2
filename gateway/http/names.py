"""Name fields in errors as the client sent them: translate proto paths into fields and headers of the HTTP APIs.

Validation reports wrong fields by their path in the proto, such as `sampling.json_schema`. Each API has a table of
rules, which are applied one after the other; `FieldNames` adds what depends on the body of a call.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sluice.defaults import TENANT_METADATA

IDEMPOTENCY_KEY: Final = "idempotency-key"
LABEL: Final = "x-sluice-label-"
"""Prefix of headers that set labels; the rest of the name is the key."""

Rule = tuple[str, str]
"""A regular expression for a part of a path, and its replacement."""
_COMMON: Final[Sequence[Rule]] = (
    ("^idempotency_key$", IDEMPOTENCY_KEY),
    (f"^metadata\\.({TENANT_METADATA})$", r"\1"),
    ("^audio.data$", "file"),
    ("^sampling.json_schema$", "response_format"),
    (r"^(audio|sampling|chat)\.", ""),
    (r"^(tools\[\d+\])\.(?!function)", r"\1.function."),
    (r"(tool_calls\[\d+\])\.(name|arguments)$", r"\1.function.\2"),
    ("^tool_choice.function$", "tool_choice.function.name"),
)
CHAT_RULES: Final[Sequence[Rule]] = (
    ("^(input|chat)$", "messages"),
    ("^sampling.logprobs$", "top_logprobs"),
    *_COMMON,
)
COMPLETION_RULES: Final[Sequence[Rule]] = (
    ("^(input|raw_prompt)$", "prompt"),
    (r"^(tokens\.token_ids|answers\[0\]|token_answers\[0\]\.token_ids)$", "prompt"),
    ("^alternatives$", "logprobs"),
    *_COMMON,
)
TEXTS_RULES: Final[Sequence[Rule]] = (("^texts", "input"), *_COMMON)
"""Rules for embeddings and rerank."""
RESPONSE_RULES: Final[Sequence[Rule]] = (
    *_COMMON,
    (r"^response_format(\.json_schema)?$", "text.format"),
    ("^max_tokens$", "max_output_tokens"),
    ("^sampling.logprobs$", "top_logprobs"),
    ("^reasoning_effort$", "reasoning.effort"),
    (r"^(tools\[\d+\]|tool_choice)\.function\.", r"\1."),
    ("^(chat|messages)$", "input"),
)
MESSAGE_RULES: Final[Sequence[Rule]] = (
    *_COMMON,
    ("^(chat|input)$", "messages"),
    ("^response_format.*", "output_config.format"),
    ("^reasoning_effort$", "output_config.effort"),
    (r"^stop(?=$|\[)", "stop_sequences"),
    ("^parallel_tool_calls$", "tool_choice.disable_parallel_tool_use"),
    (r"^tool_choice\.function\.", "tool_choice."),
    (r"^(tools\[\d+\])\.function", r"\1"),
    (r"^(tools\[\d+\])\.parameters", r"\1.input_schema"),
    (r"(tool_calls\[\d+\])\.function\.", r"\1."),
)
"""Rules for Anthropic's API."""
BATCH_RULES: Final[Sequence[Rule]] = (
    ("^spec.labels", "labels"),
    ("^spec.input.upload_id$", "input_file_id"),
    ("^spec.limits.deadline_time$", "completion_window"),
    ("^spec.results_expire_after", "output_expires_after"),
    *_COMMON,
)
_NOTHING: Final[Mapping[str, Any]] = {}
_NO_PLACES: Final[Mapping[str, str]] = {}
_MESSAGE: Final = re.compile(r"(messages\[\d+\](?:\.tool_calls\[\d+\])?)(.*)", re.DOTALL)
_ITEM_FIELDS: Final[Mapping[str, str]] = {
    ".function.name": ".name",
    ".function.arguments": ".arguments",
    ".tool_call_id": ".call_id",
    ".id": ".call_id",
}
"""Names that items of the Responses API have for fields of messages and tool calls."""


class FieldNames:
    """The names of fields in one call.

    Args:
        rules: Rules of the API.
        body: Body of the call; decides between several names of the same field.
        places: Paths in the body of the messages and tool calls of a chat, by their path in the chat, for a body that
            was translated into a chat.
    """

    def __init__(
        self,
        rules: Sequence[Rule] = _COMMON,
        body: Mapping[str, Any] = _NOTHING,
        places: Mapping[str, str] = _NO_PLACES,
    ) -> None:
        self._rules = rules
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
        item = self._places.get(place, "input")
        if not item.startswith("input["):  # instructions, or an input that is one text
            return item
        if item.endswith(".output"):  # a tool result: its output became the content of a message
            item = item if field == ".content" else item.removesuffix(".output")
            field = field.removeprefix(".content")
        return item + _ITEM_FIELDS.get(field, field)

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
