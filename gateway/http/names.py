"""What the HTTP API calls the field at a path of the proto: an error names what its client sent."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sluice.defaults import TENANT_METADATA

IDEMPOTENCY_KEY: Final = "idempotency-key"
LABEL: Final = "x-sluice-label-"
"""Begins the name of a header; the rest is the key of a label."""

Rule = tuple[str, str]
"""A pattern in a path, and what stands in its place."""
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
"""Of embeddings and rerank."""
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
"""Of Anthropic's API."""
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
_OF_ITEMS: Final[Mapping[str, str]] = {
    ".function.name": ".name",
    ".function.arguments": ".arguments",
    ".tool_call_id": ".call_id",
    ".id": ".call_id",
}
"""What items of the Responses API call the fields of messages and calls."""


class FieldNames:
    """The names of one API's fields, for the client of one call.

    Args:
        rules: Of the API; the first that fits is applied first.
        body: What the client sent, where that decides what a field is called.
        places: Of messages and calls of a chat that was made from another body, what they were there.
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
        """Return the name of the field at ``path``."""
        for pattern, name in self._rules:
            path = re.sub(pattern, name, path)
        if path == "labels" or path.startswith("labels."):
            return self._label(path.removeprefix("labels").removeprefix("."))
        if self._places and (found := _MESSAGE.fullmatch(path)):
            return self._placed(*found.groups())
        return self._as_sent(path)

    def _label(self, key: str) -> str:
        """Return where the label ``key`` came from, or where all labels did."""
        body = self._body
        sent = [name for name in ("metadata", "labels") if isinstance(body.get(name), dict)]
        if not key:
            return sent[0] if sent else LABEL + "NAME"
        if key == "user" and "user" in body:
            return key
        field = next((name for name in sent if key in body[name]), None)
        return f"{LABEL}{key}" if field is None else f"{field}.{key}"

    def _placed(self, place: str, field: str) -> str:
        item = self._places.get(place, "input")
        if not item.startswith("input["):  # a text
            return item
        if item.endswith(".output"):  # of a tool, whose result is its content
            item = item if field == ".content" else item.removesuffix(".output")
            field = field.removeprefix(".content")
        return item + _OF_ITEMS.get(field, field)

    def _as_sent(self, path: str) -> str:
        body = self._body
        longest = "max_completion_tokens"
        if path == "max_tokens" and longest in body and body.get("max_tokens") is None:
            return longest
        if path == "stop[0]" and isinstance(body.get("stop"), str):
            return "stop"
        if path == "input[0]" and isinstance(body.get("input"), str):
            return "input"
        return path


plain_names: Final = FieldNames()
"""Of calls whose body is not read."""
