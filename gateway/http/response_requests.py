"""A body of /v1/responses becomes one of /v1/chat/completions, or an error that names the field."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from sluice.openai.fields import BadField, check_entries, check_kind
from sluice.openai.requests import text_of

Json = dict[str, Any]

_SAME: Final = (
    *("model", "temperature", "top_p", "metadata", "user", "parallel_tool_calls", "stream"),
    *("seed", "stop", "logit_bias", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "regex"),
)
"""Fields of the same name; the second and third line are not OpenAI's."""
_NO_EFFECT: Final[Mapping[str, tuple[Any, ...]]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
}
"""Fields that may stand there with a value that changes nothing."""
_UNUSED: Final[Mapping[str, type]] = {
    "store": bool,
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "prompt_cache_options": dict,
    "safety_identifier": str,
    "max_tool_calls": int,
}
"""Fields that change no answer, whatever they say: what OpenAI stores, caches and asks about its users, and how often
its own tools are called."""
_INCLUDED: Final = "message.output_text.logprobs"
"""What ``include`` cannot ask for; all else is of items that answers here do not have."""
_INSTEAD: Final[Mapping[str, str]] = {
    "truncation": 'must be "disabled": a conversation that does not fit is refused',
    "service_tier": "is not served; the header x-sluice-priority says how urgent a request is",
    "background": "must be false; send a batch to /v1/batches",
    "prompt": "is not served; send instructions and input",
    "top_logprobs": "are not served; /v1/chat/completions has them",
}
_STATELESS: Final = "answers are not stored: send the whole conversation in input"
_TEXTS: Final = ("input_text", "output_text", "text")
_OF_ITEMS: Final = (
    *("id", "status", "type", "annotations", "logprobs", "phase", "name"),
    *("caller", "created_by", "namespace", "provider_data", "async", "async_"),
)
"""Fields of items of earlier answers that say nothing to a model. The name of a function is looked up apart."""


def chat_of(body: Mapping[str, Any]) -> Json:
    """The body of a chat that asks the same as ``body``.

    Raises:
        BadField: a field is not served.
    """
    said = {key: value for key, value in body.items() if value is not None}
    for name in ("previous_response_id", "conversation"):
        if name in said:
            raise BadField(f"{name}: is not served; {_STATELESS}")
    for name, kind in _UNUSED.items():
        if name in said:
            check_kind(name, said.pop(name), kind)
    _check_include(said.pop("include", []))
    _check_reasoning(said.pop("reasoning", {}))
    chat: Json = {"messages": _messages(said.pop("instructions", None), said.pop("input", None))}
    for name, value in said.items():
        if name in _SAME:
            chat[name] = value
        elif name in _OWN:
            own_name, change = _OWN[name]
            chat[own_name] = change(value)
        elif value not in _NO_EFFECT.get(name, ()):
            raise BadField(f"{name}: {_INSTEAD.get(name, 'is not served')}")
    return chat


def _check_include(wanted: Any) -> None:
    check_entries("include", wanted, list)
    if _INCLUDED in wanted:
        raise BadField(f"include: {_INCLUDED} is not served; /v1/chat/completions has them")


def _check_reasoning(wanted: Any) -> None:
    """How an answer tells of its reasoning changes nothing: there is one form. How much it reasons would."""
    check_kind("reasoning", wanted, dict)
    for name, value in wanted.items():
        if value is not None and name not in ("summary", "generate_summary"):
            raise BadField(f"reasoning.{name}: is not served; leave it out")


def _messages(instructions: Any, given: Any) -> list[Json]:
    if given is None:
        raise BadField("input: must be there")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    check_entries("input", items)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise BadField("input: is neither text nor a list of objects")
    messages: list[Json] = []
    for at, item in enumerate(items):
        _add(messages, item, f"input[{at}]")
    if instructions is None:
        return messages
    if not isinstance(instructions, str):
        raise BadField("instructions: is not text")
    return [{"role": "system", "content": instructions}, *messages]


def _add(messages: list[Json], item: Mapping[str, Any], path: str) -> None:
    """Adds an item of the input: a message, a call, or what a call returned."""
    kind = item.get("type") or "message"
    said = {name: value for name, value in item.items() if value is not None}
    fields = {name: value for name, value in said.items() if name not in _OF_ITEMS}
    match kind, fields:
        case "message", {"role": role, "content": content} if len(fields) == 2:
            messages.append({"role": role, "content": _text(content, f"{path}.content")})
        case "function_call", {"call_id": call_id, "arguments": arguments} if len(fields) == 2:
            function = {"name": said.get("name"), "arguments": arguments}
            call = {"id": call_id, "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output", {"call_id": call_id, "output": output} if len(fields) == 2:
            content = _text(output, f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        case "reasoning", _:
            pass  # of an answer before; models get it neither from their own templates
        case _:
            raise BadField(
                f"{path}: is none of a message with role and content, function_call, function_call_output"
            )


def _text(content: Any, path: str) -> str:
    text = text_of(content, path, _TEXTS)
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
