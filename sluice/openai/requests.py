"""A body of OpenAI's API becomes a `GenerateRequest`; so does a line of a batch file, and one in the plain form.

The plain form has the names of the proto: ``{"id", "prompt" | "messages", "model", "max_tokens", ...}``. OpenAI's body
is turned into it first, so it may have fields of `SamplingParams` that OpenAI has not, such as top_k. A field that is
not served is an error that names it: an option that silently does nothing would spoil a job of a million items.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

from sluice.openai.fields import BadField, check_entries, check_kind, set_field
from sluice.v1 import inference_pb2 as pb
from sluice.wire.enums import value_of

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
COMPLETION_TOKENS: Final = 16
URLS: Final = (CHAT, COMPLETIONS)

_INPUTS: Final = ("prompt", "messages")
_ROLES: Final = {
    "system": pb.ROLE_SYSTEM,
    "developer": pb.ROLE_SYSTEM,
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
    "tool": pb.ROLE_TOOL,
}
_SAMPLING: Final[Mapping[str, FieldDescriptor]] = pb.SamplingParams.DESCRIPTOR.fields_by_name
_NO_EFFECT: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "logit_bias": ({},),
    "tools": ([],),
    "stop": ([],),
    "suffix": ("",),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "ignore_eos": (False,),
    "verbosity": ("medium",),
}
"""Fields of OpenAI's body that may stand there with a value that changes nothing."""
_UNUSED: Final[Mapping[str, type]] = {
    "store": bool,
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "prompt_cache_options": dict,
    "safety_identifier": str,
    "prediction": dict,
}
"""Fields that change no answer, whatever they say: what OpenAI stores, caches, expects, and asks about its users."""
_INSTEAD: Final[Mapping[str, str]] = {
    "functions": "is not served; send tools",
    "function_call": "is not served; send tool_choice",
    "service_tier": "is not served; the header x-sluice-priority says how urgent a request is",
    "verbosity": "is not served; say in the prompt how long the answer is to be",
    "reasoning_effort": "is not served; leave it out",
    "chat_template_kwargs": "is not served; leave it out",
    "guided_json": "is not served; send response_format",
    "guided_regex": "is not served; send regex",
    "structured_outputs": "is not served; send response_format, or regex",
}
_OF_MESSAGES: Final = frozenset({"name", "cache_control", "provider_specific_fields"})
"""Fields of messages that clients send back and that chat templates have no place for."""
_OF_ANSWERS: Final = _OF_MESSAGES | {
    "annotations",
    "reasoning",
    "reasoning_content",
    "reasoning_details",
    "reasoning_items",
    "thinking_blocks",
}
"""The same of the assistant: what an answer had beside its text. Templates leave its reasoning out too."""
_MAY_BE_NULL: Final = (pb.ROLE_ASSISTANT, pb.ROLE_TOOL)
"""Whose messages may have null for a content."""


def request_of_plain(line: Mapping[str, Any], defaults: pb.GenerateRequest) -> pb.GenerateRequest:
    """The request of an object in the plain form, less its id; what it does not say is as in ``defaults``.

    Raises:
        BadField: a field is unknown, or its value does not fit.
    """
    request = _request_of(line, defaults)
    _check_one_answer(request)
    return request


def _request_of(line: Mapping[str, Any], defaults: pb.GenerateRequest) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    request.CopyFrom(defaults)
    _set_input(request, line)
    for name, value in line.items():
        if value is None or name in _INPUTS:
            continue
        if name in ("model", "raw_prompt", "allow_degraded"):
            set_field(request, name, value)
        elif name == "labels":
            _set_labels(request, value)
        elif name in _SAMPLING:
            _set_sampling(request.sampling, name, value)
        else:
            raise BadField(f"{name}: {_INSTEAD.get(name, 'is not served')}")
    return request


def request_of_openai(line: Mapping[str, Any], defaults: pb.GenerateRequest) -> pb.GenerateRequest:
    """The request of a line of OpenAI's batch format, less its custom_id.

    Raises:
        BadField: a field is not served, or its value does not fit.
    """
    url, body = line.get("url"), body_of_line(line)
    if url not in URLS:
        raise BadField(f"url: {url!r} is not served, only {', '.join(URLS)} and /v1/embeddings")
    try:
        request = request_of_body(url, body, defaults)
        _check_one_answer(request)
        if request.tools:
            raise BadField("tools: are not served in jobs, whose results are text")
        return request
    except BadField as error:
        raise BadField(f"body.{error}") from error


def body_of_line(line: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a line of OpenAI's batch format; raises as `request_of_openai`."""
    if unknown := line.keys() - {"custom_id", "method", "url", "body"}:
        raise BadField(f"{min(unknown)}: is no field of a batch line")
    if line.get("method", "POST") != "POST":
        raise BadField("method: is not POST")
    if not isinstance(body := line.get("body"), dict):
        raise BadField("body: is no object")
    return body


def request_of_body(
    url: str, body: Mapping[str, Any], defaults: pb.GenerateRequest
) -> pb.GenerateRequest:
    """The request of a body that was sent to ``url``, one of `URLS`.

    An answer of `COMPLETIONS` whose length nobody says has `COMPLETION_TOKENS` at most, as OpenAI has it.

    Raises:
        BadField: a field is not served, or its value does not fit.
    """
    wanted, other = _INPUTS if url == COMPLETIONS else reversed(_INPUTS)
    if body.get(other) is not None:
        raise BadField(f"{other}: is no field of {url}")
    if body.get(wanted) is None:
        raise BadField(f"{wanted}: must be there")
    plain = _plain_of(body)
    if url == COMPLETIONS:
        plain |= {"raw_prompt": True, "prompt": _one_prompt(body["prompt"])}
    tools = {name: plain.pop(name) for name in _TOOL_FIELDS if name in plain}
    if tools and url == COMPLETIONS:
        raise BadField(f"{min(tools)}: is no field of {url}")
    if not tools.get("tools"):
        tools.pop("parallel_tool_calls", None)  # says nothing
    request = _request_of(plain, defaults)
    if url == COMPLETIONS and not request.sampling.HasField("max_tokens"):
        request.sampling.max_tokens = max(COMPLETION_TOKENS, request.sampling.min_tokens)
    set_tools(request, tools)
    return request


def _check_one_answer(request: pb.GenerateRequest) -> None:
    if request.sampling.n > 1:
        raise BadField("n: is not served in jobs; write a line for each answer")


def _plain_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's body with the names of the plain form."""
    plain = {
        key: value
        for key, value in body.items()
        if value is not None and value not in _NO_EFFECT.get(key, ())
    }
    for name, kind in _UNUSED.items():
        if name in plain:
            check_kind(name, plain.pop(name), kind)
    most = plain.pop("max_completion_tokens", None)
    if most is not None and plain.setdefault("max_tokens", most) != most:
        raise BadField("max_completion_tokens: differs from max_tokens; leave that out")
    if plain.pop("ignore_eos", None) is not None:
        plain["min_tokens"] = _whole_length(body, plain)
    if isinstance(plain.get("stop"), str):
        plain["stop"] = [plain["stop"]]
    if "logprobs" in plain or "top_logprobs" in plain:
        plain["logprobs"] = _logprobs_of(plain)
    if (shape := plain.pop("response_format", None)) is not None:
        plain["json_schema"] = _schema_of(shape)
    plain["labels"] = _labels_of(plain)
    return plain


def _whole_length(body: Mapping[str, Any], plain: Mapping[str, Any]) -> Any:
    """The length of an answer with ``ignore_eos``, which vLLM has for load generators."""
    if body["ignore_eos"] is not True:
        raise BadField("ignore_eos: is not true or false")
    if "max_tokens" not in plain or "min_tokens" in plain:
        raise BadField("ignore_eos: needs max_tokens, and no min_tokens")
    return plain["max_tokens"]


def _logprobs_of(plain: dict[str, Any]) -> Any:
    """How many alternatives a token has. In chats ``logprobs`` says whether, in completions how many."""
    asked, top = plain.pop("logprobs", False), plain.pop("top_logprobs", None)
    if asked is True:
        return top or 0
    if top:
        raise BadField("top_logprobs: needs logprobs: true")
    return None if asked is False else asked


def _labels_of(plain: dict[str, Any]) -> Any:
    labels = plain.pop("labels", {})
    metadata = plain.pop("metadata", {})
    if not isinstance(metadata, dict) or not isinstance(labels, dict):
        raise BadField("metadata: is no object")
    user = {"user": plain.pop("user")} if "user" in plain else {}
    return {**metadata, **labels, **user}


def _schema_of(shape: Any) -> Any:
    match shape:
        case {"type": "text"}:
            return None
        case {"type": "json_object", "schema": dict(schema)}:
            return schema
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
    raise BadField("response_format: is none of text, json_object, json_schema with a schema")


def _one_prompt(given: Any) -> Any:
    if isinstance(given, list) and len(given) == 1:
        return given[0]
    if isinstance(given, list):
        raise BadField("prompt: is a list; send a request for each prompt")
    return given


def _set_input(request: pb.GenerateRequest, line: Mapping[str, Any]) -> None:
    prompt, turns = line.get("prompt"), line.get("messages")
    if (prompt is None) == (turns is None):
        raise BadField("prompt: one of prompt and messages must be there")
    system = list(request.chat.messages)  # of the defaults
    request.ClearField("input")
    if turns is not None:
        _set_turns(request.chat, turns, system)
    elif system and not line.get("raw_prompt"):
        _set_turns(request.chat, [{"role": "user", "content": prompt}], system)
    else:
        set_field(request, "prompt", prompt)


def _set_turns(chat: pb.ChatInput, turns: Any, system: list[pb.ChatMessage]) -> None:
    check_entries("messages", turns)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise BadField("messages: is no list of objects")
    if not (turns and _ROLES.get(str(turns[0].get("role"))) == pb.ROLE_SYSTEM):
        chat.messages.extend(system)
    for at, turn in enumerate(turns):
        _set_turn(chat.messages.add(), turn, f"messages[{at}]")


def _set_turn(message: pb.ChatMessage, turn: Mapping[str, Any], path: str) -> None:
    role = turn.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadField(f"{path}.role: {role!r} is none of {', '.join(_ROLES)}")
    message.role = _ROLES[role]
    said = {key for key, value in turn.items() if value not in (None, [])}
    said -= _OF_ANSWERS if message.role == pb.ROLE_ASSISTANT else _OF_MESSAGES
    own = {
        pb.ROLE_ASSISTANT: {"tool_calls", "refusal"},
        pb.ROLE_TOOL: {"tool_call_id"},
    }.get(message.role, set())
    if unknown := said - {"role", "content"} - own:
        raise BadField(f"{path}.{min(unknown)}: is not served")
    if "tool_calls" in said:
        set_calls(message, turn["tool_calls"], f"{path}.tool_calls")
    if message.role == pb.ROLE_TOOL:
        set_field(message, "tool_call_id", turn.get("tool_call_id"), f"{path}.")
    content = turn["content"] if "content" in said else turn.get("refusal")
    if content is None and (message.role in _MAY_BE_NULL or turn.get("content") == []):
        content = ""
    set_field(message, "content", text_of(content, f"{path}.content"), f"{path}.")


def text_of(content: Any, path: str, kinds: Collection[str] = ("text",)) -> Any:
    """A content as text: OpenAI has lists of parts too, of ``kinds``. What is no list is returned as it is.

    Raises:
        BadField: a part is something else.
    """
    if not isinstance(content, list):
        return content
    check_entries(path, content)
    return "".join(_part(part, path, kinds) for part in content)


def _part(part: Any, path: str, kinds: Collection[str]) -> str:
    match part:
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": kind, "text": str(text)} if kind in kinds:
            return text
    raise BadField(f"{path}: has a part that is no text")


def _set_labels(request: pb.GenerateRequest, labels: Any) -> None:
    check_entries("labels", labels, dict)
    for key, value in labels.items():
        check_kind(f"labels.{key}", value, str)
    try:
        request.labels.update(labels)
    except ValueError as error:
        raise BadField("labels: are no valid UTF-8") from error


def _set_sampling(sampling: pb.SamplingParams, name: str, value: Any) -> None:
    if name == "json_schema" and isinstance(value, dict):
        value = json.dumps(value)
    if name == "seed" and type(value) is int and -(1 << 63) <= value < 0:
        value += 1 << 64  # OpenAI's seeds have a sign, ours have none
    if name == "top_k" and value == -1:
        value = 0  # vLLM's word for no limit
    field = _SAMPLING[name]
    if name == "logit_bias":
        _set_biases(sampling, value)
        return
    if not field.is_repeated:
        set_field(sampling, name, value)
        return
    check_entries(name, value, list)
    sampling.ClearField(name)  # type: ignore[arg-type]
    try:
        getattr(sampling, name).extend(value)
    except (TypeError, ValueError) as error:
        raise BadField(f"{name}: {error}") from error


def _set_biases(sampling: pb.SamplingParams, biases: Any) -> None:
    check_entries("logit_bias", biases, dict)
    sampling.ClearField("logit_bias")
    for token_id, bias in biases.items():
        try:
            sampling.logit_bias[int(token_id)] = bias
        except (TypeError, ValueError) as error:
            raise BadField(f"logit_bias.{token_id}: {error}") from error


_TOOL_FIELDS: Final[Sequence[str]] = ("tools", "tool_choice", "parallel_tool_calls")


def set_tools(request: pb.GenerateRequest, body: Mapping[str, Any]) -> None:
    """Puts the `_TOOL_FIELDS` of ``body`` into ``request``.

    Raises:
        BadField: one does not fit.
    """
    if (choice := body.get("tool_choice")) is not None:
        _set_choice(request.tool_choice, choice)
    if (parallel := body.get("parallel_tool_calls")) is not None:
        set_field(request, "parallel_tool_calls", parallel)
    tools = body.get("tools") or []
    check_entries("tools", tools, list)
    for at, tool in enumerate(tools):
        described = function_of(tool, f"tools[{at}]")
        _set_tool(request.tools.add(), described, f"tools[{at}].function")


_OF_CALLS: Final = frozenset(
    {"index", "cache_control", "provider_specific_fields", "extra_content"}
)
"""Fields of tools and calls that clients send back and that say nothing to a model."""


def function_of(value: Any, path: str) -> Mapping[str, Any]:
    """What is under "function" in an object of type function.

    Raises:
        BadField: it is of another type, or has other fields.
    """
    match _said(value):
        case {"type": "function", "function": dict(function)} as said if len(said) == 2:
            return dict(_said(function))
    raise BadField(
        f'{path}: must be {{"type": "function", "function": {{...}}}}; no other is served'
    )


def set_calls(message: pb.ChatMessage, calls: Any, path: str) -> None:
    """The calls that an assistant's turn made.

    Raises:
        BadField: one does not fit.
    """
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadField(f"{path}: is no list of objects")
    for at, call in enumerate(calls):
        where, rest = f"{path}[{at}]", _said(call)
        call_id, rest = rest.pop("id", None), {"type": "function", **rest}
        function, made = function_of(rest, where), message.tool_calls.add()
        set_field(made, "id", call_id, f"{where}.")
        for name in ("name", "arguments"):
            set_field(made, name, function.get(name), f"{where}.function.")


def _said(value: Any) -> Any:
    """An object less what is null or says nothing; anything else as it is."""
    if not isinstance(value, dict):
        return value
    return {name: one for name, one in value.items() if one is not None and name not in _OF_CALLS}


def _set_choice(choice: pb.ToolChoice, given: Any) -> None:
    if given in ("none", "auto", "required"):
        choice.mode = value_of(pb.ToolChoiceMode, given)
        return
    name = function_of(given, "tool_choice").get("name")
    set_field(choice, "function", name, "tool_choice.")


def _set_tool(tool: pb.Tool, given: Mapping[str, Any], path: str) -> None:
    if unknown := given.keys() - {"name", "description", "parameters", "strict"}:
        raise BadField(f"{path}.{min(unknown)}: is not served")
    set_field(tool, "strict", given.get("strict", False), f"{path}.")
    for name in ("name", "description"):
        set_field(tool, name, given.get(name, "" if name == "description" else None), f"{path}.")
    parameters = given.get("parameters", {})
    if not isinstance(parameters, dict):
        raise BadField(f"{path}.parameters: is no object")
    set_field(tool, "parameters", json.dumps(parameters) if parameters else "", f"{path}.")
