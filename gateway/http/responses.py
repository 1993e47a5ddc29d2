"""/v1/responses over chats: a body becomes one of /v1/chat/completions; the events of its answer an object, or events.

What is not served is an error that names the field.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from typing_extensions import override

from gateway.http.events import REASONING, TEXT, EventAnswer, Json
from gateway.http.logprobs import TextLogprobs
from gateway.http.requests import EXTENSIONS, generate_request
from sluice.openai.answers import chat_logprobs
from sluice.openai.fields import BadField, check_entries, check_kind
from sluice.openai.messages import text_of
from sluice.openai.requests import CHAT
from sluice.v1 import inference_pb2 as pb

_SAME: Final = (
    *("model", "temperature", "top_p", "metadata", "user", "parallel_tool_calls", "stream"),
    *("stop", "top_k", "top_logprobs", *EXTENSIONS),
    *(
        "store",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "safety_identifier",
    ),
)
"""Fields of the same name; some are not OpenAI's."""
_NO_EFFECT: Final[Mapping[str, tuple[Any, ...]]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
}
"""Fields that may stand there with a value that changes nothing."""
_LOGPROBS: Final = "message.output_text.logprobs"
"""What ``include`` may ask for; all else is of items that answers here do not have."""
_INSTEAD: Final[Mapping[str, str]] = {
    "truncation": 'must be "disabled": a conversation that does not fit is refused',
    "service_tier": "is not served; the header x-sluice-priority says how urgent a request is",
    "background": "must be false; send a batch to /v1/batches",
    "prompt": "is not served; send instructions and input",
}
_STATELESS: Final = "answers are not stored: send the whole conversation in input"
_OF_ITEMS: Final = (
    *("id", "status", "type", "annotations", "logprobs", "phase", "name"),
    *("caller", "created_by", "namespace", "provider_data", "async", "async_"),
)
"""Fields of items of earlier answers that say nothing to a model. The name of a function is looked up apart."""


def response_request(
    body: Mapping[str, Any], places: dict[str, str]
) -> tuple[pb.GenerateRequest, bool | None]:
    """Return what a body of /v1/responses asks for; as `generate_request`. ``places``: see `chat_of`."""
    asked = dict(body)
    if (asked.pop("stream_options", None) or {}) not in ({}, {"include_obfuscation": False}):
        raise BadField("stream_options: only include_obfuscation: false is served")
    return generate_request(CHAT, chat_of(asked, places))


def chat_of(body: Mapping[str, Any], places: dict[str, str]) -> Json:
    """Return the body of a chat that asks the same as ``body``.

    Put into ``places`` what each message and call of it is in ``body``, by its path in the chat.

    Raises:
        BadField: a field is not served.
    """
    said = {key: value for key, value in body.items() if value is not None}
    for name in ("previous_response_id", "conversation"):
        if name in said:
            raise BadField(f"{name}: is not served; {_STATELESS}")
    if "max_tool_calls" in said:  # of OpenAI's own tools
        check_kind("max_tool_calls", said.pop("max_tool_calls"), int)
    included = said.pop("include", [])
    check_entries("include", included, list)
    effort = _effort_of(said.pop("reasoning", {}))
    instructions, given = said.pop("instructions", None), said.pop("input", None)
    chat: Json = {"messages": _messages(instructions, given, places)}
    if _LOGPROBS in included or said.get("top_logprobs"):
        chat["logprobs"] = True
    for name, value in said.items():
        if name in _SAME:
            chat[name] = value
        elif name in _OWN:
            own_name, change = _OWN[name]
            chat[own_name] = change(value)
        elif value not in _NO_EFFECT.get(name, ()):
            raise BadField(f"{name}: {_INSTEAD.get(name, 'is not served; leave it out')}")
    if effort is not None:
        chat["reasoning_effort"] = effort
    return chat


def _effort_of(wanted: Any) -> Any:
    """Return how much the model is to reason. How an answer tells of it changes nothing: there is one form."""
    check_kind("reasoning", wanted, dict)
    for name, value in wanted.items():
        if value is not None and name not in ("effort", "summary", "generate_summary"):
            raise BadField(f"reasoning.{name}: is not served; leave it out")
    return wanted.get("effort")


def _messages(instructions: Any, given: Any, places: dict[str, str]) -> list[Json]:
    if given is None:
        raise BadField("input: must be there")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    check_entries("input", items)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise BadField("input: is neither text nor a list of objects")
    messages: list[Json] = []
    if instructions is not None:
        check_kind("instructions", instructions, str)
        messages.append({"role": "system", "content": instructions})
        places["messages[0]"] = "instructions"
    for at, item in enumerate(items):
        path = f"input[{at}]"
        if place := _add(messages, item, path):
            output = ".output" if item.get("type") == "function_call_output" else ""
            places[place] = "input" if isinstance(given, str) else path + output
    return messages


def _add(messages: list[Json], item: Mapping[str, Any], path: str) -> str:
    """Add an item of the input: a message, a call, or what a call returned. Return what it became; empty: nothing."""
    said = {name: value for name, value in item.items() if value is not None}
    match said.get("type", "message"), {name: said[name] for name in said if name not in _OF_ITEMS}:
        case "message", {"role": role, "content": content, **more} if not more:
            messages.append({"role": role, "content": _text(content, f"{path}.content")})
        case "function_call", {"call_id": call_id, "arguments": arguments, **more} if not more:
            function = {"name": said.get("name"), "arguments": arguments}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": call_id, "type": "function", "function": function})
            return f"messages[{len(messages) - 1}].tool_calls[{len(calls) - 1}]"
        case "function_call_output", {"call_id": call_id, "output": output, **more} if not more:
            content = _text(output, f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        case "reasoning", _:  # of an answer before; models get it neither from their own templates
            return ""
        case _:
            raise BadField(
                f"{path}: is none of a message with role and content, function_call, function_call_output"
            )
    return f"messages[{len(messages) - 1}]"


def _text(content: Any, path: str) -> str:
    text = text_of(content, path)
    if not isinstance(text, str):
        raise BadField(f"{path}: is neither text nor a list of parts")
    return text


def _tools(tools: Any) -> list[Json]:
    check_entries("tools", tools, list)
    for at, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise BadField(f"tools[{at}]: is no function; no other tool is served")
    return [{"type": "function", "function": _without_type(tool)} for tool in tools]


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": _without_type(choice)}
    return choice


def _format(text: Any) -> Any:
    check_kind("text", text, dict)
    said = {name: value for name, value in text.items() if value is not None}
    if said.pop("verbosity", "medium") != "medium":
        raise BadField("text.verbosity: is not served; say in the prompt how long the answer is")
    shape = said.pop("format", {"type": "text"})
    if said or not isinstance(shape, dict):
        raise BadField("text: must be an object with format and verbosity")
    if shape.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": _without_type(shape)}
    return shape


def _without_type(value: Mapping[str, Any]) -> Json:
    """Less what is null, too."""
    return {name: one for name, one in value.items() if name != "type" and one is not None}


def _same(value: Any) -> Any:
    return value


_OWN: Final[Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    "max_output_tokens": ("max_tokens", _same),
    "tools": ("tools", _tools),
    "tool_choice": ("tool_choice", _tool_choice),
    "text": ("response_format", _format),
}
"""Fields that chats name otherwise, or have in another shape."""

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
"""Fields of the request that its answer repeats, with what they are by default."""


class ResponseEvents(EventAnswer):
    """Build one response."""

    def __init__(self, body: Mapping[str, Any], created: int) -> None:
        """``body``: of the request; ``created``: in seconds since 1970."""
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
        """Of the last item of the output, in events."""
        self._logprobs = TextLogprobs()
        self._new_logged: list[Json] = []
        """Log-probabilities of the text that is being added."""
        self._logged: list[Json] = []
        """Of the last item of the output."""
        self._number = 0
        self._text_status = "completed"

    @override
    def add(self, index: int, delta: pb.Delta) -> bytes:
        self._new_logged = _logged(self._logprobs.push(delta.logprobs, delta.text))
        return super().add(index, delta)

    def fail(self, body: Mapping[str, Any]) -> bytes:
        """Return the event that ends the stream with the error of ``body``."""
        error = body["error"]
        # OpenAI's reference has the error's fields in the event, its service, and so its clients, under "error".
        said = {name: error[name] for name in ("code", "message", "param")}
        self._say("error", **said, error=error)
        return self._take_events()

    def _say(self, kind: str, **fields: Any) -> None:
        self._send(kind, {"type": kind, "sequence_number": self._number, **fields})
        self._number += 1

    def _begin(self) -> None:
        if not self._number:
            self._whole |= {"id": f"resp_{self.request_id}", "model": self.model, **self.facts()}
            self._say("response.created", response=self._whole)
            self._say("response.in_progress", response=self._whole)

    def _add_item(self, prefix: str, item: Json) -> None:
        """Begin an item of the output, whose id begins with ``prefix``."""
        self._begin()
        index = len(self._output)
        item_id = f"{prefix}_{self.request_id}_{index}"
        self._place = {"item_id": item_id, "output_index": index}
        self._output.append({"id": item_id, **item, "status": "in_progress"})
        self._say("response.output_item.added", output_index=index, item=self._output[-1])

    def _end_item(self, status: str = "completed", **fields: Any) -> None:
        """End the last item, which has ``fields`` now."""
        item = self._output[-1]
        item |= {**fields, "status": status}
        index = self._place["output_index"]
        self._say("response.output_item.done", output_index=index, item=item)

    @override
    def _begin_text(self, kind: str) -> None:
        item = _ITEMS[kind]
        self._add_item(item.prefix, {**item.item, "content": []})
        self._place["content_index"] = 0
        self._say("response.content_part.added", **self._place, part=item.part(""))

    @override
    def _send_text(self, kind: str, text: str) -> None:
        item, logged = _ITEMS[kind], self._new_logged
        if item.has_logprobs:
            self._logged += logged
        self._say(f"response.{item.text}.delta", **self._place, delta=text, **item.extra(logged))

    @override
    def _close_text(self, kind: str, text: str) -> None:
        item, logged = _ITEMS[kind], self._logged
        self._logged = []
        part = item.part(text, logged)
        self._say(f"response.{item.text}.done", **self._place, text=text, **item.extra(logged))
        self._say("response.content_part.done", **self._place, part=part)
        self._end_item(self._text_status, content=[part])

    @override
    def _add_call(self, call: pb.ToolCall) -> None:
        named = {"type": "function_call", "call_id": call.id, "name": call.name}
        self._add_item("fc", {**named, "arguments": ""})
        said, place = {"arguments": call.arguments}, self._place
        self._say("response.function_call_arguments.delta", **place, delta=call.arguments)
        self._say("response.function_call_arguments.done", **place, name=call.name, **said)
        self._end_item(**said)

    @override
    def finish(self, index: int, finished: pb.Finished) -> bytes:
        reason = _INCOMPLETE.get(finished.reason)
        status = self._text_status = "completed" if reason is None else "incomplete"
        self._begin()
        self._logged += _logged(self._logprobs.flush())
        self._end_text()
        self.model = finished.model or self.model
        self._whole |= {
            "model": self.model,
            "status": status,
            "incomplete_details": None if reason is None else {"reason": reason},
            "usage": _usage(finished.usage),
        }
        self._say(f"response.{status}", response=self._whole)
        return self._take_events()


@dataclass(frozen=True)
class _TextItem:
    """An item of the output that is text.

    Attributes:
        prefix: of its id.
        item: its fields, beside those that all have.
        text: the type of its part.
        of_part: the part's fields beside type, text and log-probabilities.
        has_logprobs: whether its part and the events of its text have them.
    """

    prefix: str
    item: Mapping[str, Any]
    text: str
    of_part: Mapping[str, Any]
    has_logprobs: bool

    def part(self, text: str, logged: Sequence[Json] = ()) -> Json:
        return {"type": self.text, "text": text, **self.of_part, **self.extra(logged)}

    def extra(self, logged: Sequence[Json]) -> Json:
        """Return the fields of the events of its text beside that."""
        return {"logprobs": list(logged)} if self.has_logprobs else {}


_ITEMS: Final[Mapping[str, _TextItem]] = {
    TEXT: _TextItem(
        "msg",
        {"type": "message", "role": "assistant"},
        "output_text",
        of_part={"annotations": []},
        has_logprobs=True,
    ),
    REASONING: _TextItem(
        "rs", {"type": "reasoning", "summary": []}, "reasoning_text", {}, has_logprobs=False
    ),
}
"""By kind of text."""


def _logged(entries: Sequence[pb.TokenLogprobs]) -> list[Json]:
    """Return log-probabilities as they stand in the parts of a message."""
    logprobs = chat_logprobs(entries)
    return [] if logprobs is None else list(logprobs["content"])


def _usage(usage: pb.Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_prompt_tokens,
            "cache_write_tokens": 0,  # nothing is charged for what is kept
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
