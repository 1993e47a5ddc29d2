"""Serve OpenAI's Responses API on top of chats.

`chat_of` translates a body of /v1/responses into one of /v1/chat/completions; `ResponseEvents` builds the response, as
an object or as events. An unsupported field is an error that names it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from pydantic import Field
from typing_extensions import override

from gateway.http.events import REASONING, TEXT, EventAnswer, Json
from gateway.http.logprobs import TextLogprobs
from gateway.http.requests import Extensions
from sluice.openai.answers import chat_logprobs
from sluice.openai.bodies import Entries, Part, read
from sluice.openai.fields import BadField, check_entries
from sluice.openai.messages import text_of
from sluice.v1 import inference_pb2 as pb

_LOGPROBS: Final = "message.output_text.logprobs"
"""The value of `include` that has an effect; others are about items that responses never have."""
_STATELESS: Final = (
    "is not supported; responses are not stored: send the whole conversation in input"
)
_REMEDIES: Final[Mapping[str, str]] = {
    "truncation": 'must be "disabled": a conversation that does not fit is refused',
    "service_tier": "is not supported; the header x-sluice-priority sets the priority",
    "background": "must be false; send a batch to /v1/batches",
    "prompt": "is not supported; send instructions and input",
    "text.verbosity": "is not supported; ask for the length in the prompt",
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
}
"""Errors that name a remedy, by unsupported field."""
_IGNORED_IN_ITEMS: Final = (
    "id",
    "status",
    "type",
    "annotations",
    "logprobs",
    "phase",
    "name",
    "caller",
    "created_by",
    "namespace",
    "provider_data",
    "async",
    "async_",
)
"""Fields of items that do not change the prompt. The name of a function is read separately."""


class _ResponseOptions(Extensions):
    """Fields with the same name in chats; some are Sluice's own."""

    model: Any = None
    temperature: Any = None
    top_p: Any = None
    metadata: Any = None
    user: Any = None
    parallel_tool_calls: Any = None
    stream: Any = None
    stop: Any = None
    top_k: Any = None
    top_logprobs: Any = None
    store: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    safety_identifier: Any = None


class _Reasoning(Part):
    """Kinds of summary have no effect: reasoning is always sent whole."""

    effort: Any = None
    summary: Any = None
    generate_summary: Any = None


class _TextOptions(Part):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] = "medium"


class _FunctionTool(Part, extra="allow"):
    type: Literal["function"]


class _StreamOptions(Part):
    include_obfuscation: Literal[False] = False


class _ResponseFields(_ResponseOptions):
    """The body; fields behind `text` are accepted with values that change nothing."""

    instructions: str | None = None
    input: Any
    max_output_tokens: Any = None
    include: Entries[Any] = Field([])
    reasoning: _Reasoning = _Reasoning()
    tools: Entries[_FunctionTool] = Field([])
    tool_choice: Any = None
    text: _TextOptions = _TextOptions()
    stream_options: _StreamOptions | None = None
    max_tool_calls: int | None = None  # limits OpenAI's built-in tools
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    service_tier: Literal["auto", "default"] = "auto"


def chat_of(body: Mapping[str, Any], places: dict[str, str]) -> Json:
    """Return the body of a chat with the same meaning as `body`.

    Args:
        body: Body of /v1/responses.
        places: Filled with the path in `body` of each message and tool call, by its path in the chat.

    Raises:
        BadField: A field is unsupported, or its value is invalid.
    """
    fields = read(_ResponseFields, body, remedies=_REMEDIES)
    chat = fields.declared_in(_ResponseOptions)
    chat["messages"] = _messages(fields.instructions, fields.input, places)
    chat["logprobs"] = _LOGPROBS in fields.include or bool(fields.top_logprobs) or None
    chat["max_tokens"] = fields.max_output_tokens
    chat["reasoning_effort"] = fields.reasoning.effort
    chat["tools"] = [_function(tool.model_extra or {}) for tool in fields.tools]
    chat["tool_choice"] = choice = fields.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        chat["tool_choice"] = _function(choice)
    chat["response_format"] = shape = fields.text.format
    if shape is not None and shape.get("type") == "json_schema":
        chat["response_format"] = {"type": "json_schema", "json_schema": _without_type(shape)}
    return chat


def _function(described: Mapping[str, Any]) -> Json:
    return {"type": "function", "function": _without_type(described)}


def _messages(instructions: str | None, user_input: Any, places: dict[str, str]) -> list[Json]:
    items = [{"role": "user", "content": user_input}] if isinstance(user_input, str) else user_input
    check_entries("input", items)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise BadField("input: must be text or a list of objects")
    messages: list[Json] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
        places["messages[0]"] = "instructions"
    for index, item in enumerate(items):
        path = f"input[{index}]"
        if place := _add(messages, item, path):
            output = ".output" if item.get("type") == "function_call_output" else ""
            places[place] = "input" if isinstance(user_input, str) else path + output
    return messages


def _add(messages: list[Json], item: Mapping[str, Any], path: str) -> str:
    """Add an item of the input; return the path of what it became in the chat, empty if it is left out."""
    fields = {name: value for name, value in item.items() if value is not None}
    relevant = {name: value for name, value in fields.items() if name not in _IGNORED_IN_ITEMS}
    match fields.get("type", "message"), relevant:
        case "message", {"role": role, "content": content, **more} if not more:
            messages.append({"role": role, "content": _text(content, f"{path}.content")})
        case "function_call", {"call_id": call_id, "arguments": arguments, **more} if not more:
            function = {"name": fields.get("name"), "arguments": arguments}
            # A tool call belongs to the assistant's message before it, if there is one.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": call_id, "type": "function", "function": function})
            return f"messages[{len(messages) - 1}].tool_calls[{len(calls) - 1}]"
        case "function_call_output", {"call_id": call_id, "output": output, **more} if not more:
            content = _text(output, f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        case "reasoning", _:  # chat templates leave the reasoning of earlier answers out as well
            return ""
        case _:
            raise BadField(
                f"{path}: must be a message with role and content, a function_call or a function_call_output"
            )
    return f"messages[{len(messages) - 1}]"


def _text(content: Any, path: str) -> str:
    text = text_of(content, path)
    if not isinstance(text, str):
        raise BadField(f"{path}: must be text or a list of parts")
    return text


def _without_type(value: Mapping[str, Any]) -> Json:
    """Return an object without its type and without nulls."""
    return {name: field for name, field in value.items() if name != "type" and field is not None}


_INCOMPLETE: Final = {
    pb.FINISH_REASON_LENGTH: "max_output_tokens",
    pb.FINISH_REASON_CONTENT_FILTER: "content_filter",
}
_ECHOED: Final[Mapping[str, Any]] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": 0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1,
    "user": None,
}
"""Fields of the request that the response repeats, with their defaults."""


class ResponseEvents(EventAnswer):
    """The response of one answer."""

    def __init__(self, body: Mapping[str, Any], created: int) -> None:
        """Create the response to `body`; `created` is in seconds since the Unix epoch."""
        super().__init__(streams=bool(body.get("stream")))
        self._output: list[Json] = []
        self._whole = {
            "object": "response",
            "created_at": created,
            "error": None,
            "output": self._output,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "status": "in_progress",
            "incomplete_details": None,
            "usage": None,
            **{
                name: default if body.get(name) is None else body[name]
                for name, default in _ECHOED.items()
            },
        }
        self._place: Json = {}
        """Fields of events that locate the last item of the output."""
        self._logprobs = TextLogprobs()
        self._new_logprobs: list[Json] = []
        """Log-probabilities of the piece that is being added."""
        self._item_logprobs: list[Json] = []
        """Log-probabilities of the last item of the output."""
        self._number = 0
        self._text_status = "completed"

    @override
    def add(self, index: int, delta: pb.Delta) -> bytes:
        self._new_logprobs = _part_logprobs(self._logprobs.push(delta.logprobs, delta.text))
        return super().add(index, delta)

    def fail(self, body: Mapping[str, Any]) -> bytes:
        """Return the event that ends the stream with the error in `body`."""
        error = body["error"]
        # OpenAI's reference puts the fields of the error into the event, its clients read them under "error".
        fields = {name: error[name] for name in ("code", "message", "param")}
        self._send_event("error", **fields, error=error)
        return self._take_events()

    def _send_event(self, kind: str, **fields: Any) -> None:
        self._send(kind, {"type": kind, "sequence_number": self._number, **fields})
        self._number += 1

    def _begin(self) -> None:
        # No event has a number yet, so the response has not begun.
        if not self._number:
            self._whole |= {"id": f"resp_{self.request_id}", "model": self.model, **self.facts()}
            self._send_event("response.created", response=self._whole)
            self._send_event("response.in_progress", response=self._whole)

    def _add_item(self, prefix: str, item: Json) -> None:
        """Start an item of the output, whose id begins with `prefix`."""
        self._begin()
        index = len(self._output)
        item_id = f"{prefix}_{self.request_id}_{index}"
        self._place = {"item_id": item_id, "output_index": index}
        self._output.append({"id": item_id, **item, "status": "in_progress"})
        self._send_event("response.output_item.added", output_index=index, item=self._output[-1])

    def _end_item(self, status: str = "completed", **fields: Any) -> None:
        """End the last item, and set its `fields`."""
        item = self._output[-1]
        item |= {**fields, "status": status}
        index = self._place["output_index"]
        self._send_event("response.output_item.done", output_index=index, item=item)

    @override
    def _begin_text(self, kind: str) -> None:
        prefix, _, item = _ITEMS[kind]
        self._add_item(prefix, {**item, "content": []})
        self._place["content_index"] = 0
        self._send_event("response.content_part.added", **self._place, part=_part(kind, ""))

    @override
    def _send_text(self, kind: str, text: str) -> None:
        logged = _logged(kind, self._new_logprobs)
        self._item_logprobs += logged.get("logprobs", [])
        name = f"response.{_ITEMS[kind][1]}.delta"
        self._send_event(name, **self._place, delta=text, **logged)

    @override
    def _close_text(self, kind: str, text: str) -> None:
        logged, part = _logged(kind, self._item_logprobs), _part(kind, text, self._item_logprobs)
        self._item_logprobs = []
        self._send_event(f"response.{part['type']}.done", **self._place, text=text, **logged)
        self._send_event("response.content_part.done", **self._place, part=part)
        self._end_item(self._text_status, content=[part])

    @override
    def _add_call(self, call: pb.ToolCall) -> None:
        item = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""}
        self._add_item("fc", item)
        arguments, place = {"arguments": call.arguments}, self._place
        self._send_event("response.function_call_arguments.delta", **place, delta=call.arguments)
        self._send_event(
            "response.function_call_arguments.done", **place, name=call.name, **arguments
        )
        self._end_item(**arguments)

    @override
    def finish(self, index: int, finished: pb.Finished) -> bytes:
        reason = _INCOMPLETE.get(finished.reason)
        status = self._text_status = "completed" if reason is None else "incomplete"
        self._begin()
        # What is pending belongs to the text that ends here.
        self._item_logprobs += _part_logprobs(self._logprobs.flush())
        self._end_text()
        self.model = finished.model or self.model
        self._whole |= {
            "model": self.model,
            "status": status,
            "incomplete_details": None if reason is None else {"reason": reason},
            "usage": _usage(finished.usage),
        }
        self._send_event(f"response.{status}", response=self._whole)
        return self._take_events()


_ITEMS: Final[Mapping[str, tuple[str, str, Json]]] = {
    TEXT: ("msg", "output_text", {"type": "message", "role": "assistant"}),
    REASONING: ("rs", "reasoning_text", {"type": "reasoning", "summary": []}),
}
"""Prefix of the id, type of the only part, and fields of an item of the output, by kind of text."""


def _logged(kind: str, logprobs: Sequence[Json]) -> Json:
    """Return the log-probabilities as a field of an event or a part; reasoning has none."""
    return {"logprobs": list(logprobs)} if kind == TEXT else {}


def _part(kind: str, text: str, logprobs: Sequence[Json] = ()) -> Json:
    annotations: Json = {"annotations": []} if kind == TEXT else {}
    return {"type": _ITEMS[kind][1], "text": text, **annotations, **_logged(kind, logprobs)}


def _part_logprobs(entries: Sequence[pb.TokenLogprobs]) -> list[Json]:
    """Return log-probabilities in the form that parts of a message have."""
    logprobs = chat_logprobs(entries)
    return [] if logprobs is None else list(logprobs["content"])


def _usage(usage: pb.Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_prompt_tokens,
            "cache_write_tokens": 0,  # caching is not charged for
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
