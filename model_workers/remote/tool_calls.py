"""Tools between a conversation of ours and OpenAI's API.

A server gives its calls in fields of their own; in the mesh an answer is text. So calls are written as Hermes does,
which the gateway reads again: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` for each.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"


class CallText:
    """The calls of one answer as text, while their pieces arrive."""

    def __init__(self) -> None:
        self._open: int | None = None
        self._has_arguments = False

    def push(self, pieces: Sequence[Mapping[str, Any]]) -> str:
        """The text of the next pieces."""
        return "".join(map(self._piece, pieces))

    def close(self) -> str:
        """The end of the call that is open, if one is."""
        if self._open is None:
            return ""
        self._open = None
        return ("}" if self._has_arguments else "{}}") + END

    def _piece(self, piece: Mapping[str, Any]) -> str:
        function, text = piece.get("function") or {}, ""
        index = piece.get("index") or 0
        if self._open != index:
            text = f'{self.close()}{BEGIN}{{"name": {json.dumps(function["name"])}, "arguments": '
            self._open, self._has_arguments = index, False
        arguments = function.get("arguments") or ""
        self._has_arguments |= bool(arguments)
        return text + arguments


def messages_for(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates take them in the form of the API: arguments are JSON, a tool's answer has no name."""
    return [_message(message) for message in messages]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = dict(message)
    if kept["role"] == "tool":
        kept.pop("name", None)
    if "tool_calls" in kept:
        kept["tool_calls"] = [_call(call) for call in kept["tool_calls"]]
    return kept


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}
