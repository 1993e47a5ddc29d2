"""A body of OpenAI's API becomes a `GenerateRequest`; so does a line of a batch file, and one in the plain form.

The plain form has the names of the proto: ``{"id", "prompt" | "messages", "model", "max_tokens", ...}``. OpenAI's body
is turned into it first, so it may have fields of `SamplingParams` that OpenAI has not, such as top_k. A field that is
not served is an error that names it: an option that silently does nothing would spoil a job of a million items.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

from sluice.openai.fields import BadField, add_value, check_entries, check_kind, set_field
from sluice.openai.messages import function_of, json_of, set_messages
from sluice.openai.prompts import prompts_of
from sluice.v1 import inference_pb2 as pb
from sluice.wire.enums import value_of

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
COMPLETION_TOKENS: Final = 16
URLS: Final = (CHAT, COMPLETIONS)

_INPUTS: Final = ("prompt", "messages")
_SAMPLING: Final[Mapping[str, FieldDescriptor]] = pb.SamplingParams.DESCRIPTOR.fields_by_name
_OBJECTS: Final = ("json_schema", "chat_template_kwargs")
"""Fields of `SamplingParams` with a JSON object as text."""
_NO_EFFECT: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "stop": ([], ""),
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
    "guided_json": "is not served; send response_format",
    "guided_regex": "is not served; send regex",
    "structured_outputs": "is not served; send response_format, or regex",
}


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
        elif name == "response_format":
            _set_shape(request.sampling, value)
        elif name in _SAMPLING:
            _set_sampling(request.sampling, name, value)
        else:
            raise BadField(f"{name}: {_INSTEAD.get(name, 'is not served; leave it out')}")
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
    token_ids: Sequence[int] = ()
    if url == COMPLETIONS:
        plain |= {"raw_prompt": True, "prompt": _one_prompt(body["prompt"])}
        if isinstance(plain["prompt"], list):
            token_ids, plain["prompt"] = plain["prompt"], " "  # which the tokens replace
    tools = {name: plain.pop(name) for name in _TOOL_FIELDS if name in plain}
    if tools and url == COMPLETIONS:
        raise BadField(f"{min(tools)}: is no field of {url}")
    if not tools.get("tools"):
        tools.pop("parallel_tool_calls", None)  # says nothing
    request = _request_of(plain, defaults)
    if url == COMPLETIONS and not request.sampling.HasField("max_tokens"):
        request.sampling.max_tokens = max(COMPLETION_TOKENS, request.sampling.min_tokens)
    set_tools(request, tools)
    if token_ids:
        request.tokens.token_ids.extend(token_ids)
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
    if isinstance(stop := plain.get("stop"), str):
        plain["stop"] = [stop]
    elif isinstance(stop, list) and not any(one != "" for one in stop):
        del plain["stop"]
    elif stop is not None and not isinstance(stop, list):
        raise BadField("stop: is neither text nor a list of texts")
    if "logprobs" in plain or "top_logprobs" in plain:
        plain["logprobs"] = _logprobs_of(plain)
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
    """Return the labels that ``metadata``, ``labels`` and ``user`` make; take these out of ``plain``."""
    labels = plain.pop("labels", {})
    check_entries("labels", labels, dict)
    made = {**labels_of_metadata(plain.pop("metadata", {})), **labels}
    if "user" in plain:
        check_kind("user", plain["user"], str)
        made["user"] = plain.pop("user")
    return made


def labels_of_metadata(metadata: Any) -> dict[str, str]:
    """Return the labels that OpenAI's ``metadata`` are, without those that are null.

    Numbers and truth values become text as JSON has them.

    Raises:
        BadField: it is no object, or has a value of another kind.
    """
    check_entries("metadata", metadata, dict)
    labels = {}
    for key, value in metadata.items():
        if isinstance(value, bool | int | float):
            labels[key] = json.dumps(value)
        elif value is not None:
            check_kind(f"metadata.{key}", value, str)
            labels[key] = value
    return labels


def _set_shape(sampling: pb.SamplingParams, shape: Any) -> None:
    """Set the schema that ``shape`` asks for, and beside it the shape as it came."""
    schema = schema_of(shape)
    if schema is not None:
        sampling.json_schema = json_of(schema, "response_format")
        sampling.response_format = json_of(shape, "response_format")


def schema_of(shape: Any) -> dict[str, Any] | None:
    """Return the JSON schema that a ``response_format`` asks for; None where it asks for text.

    Raises:
        BadField: it is none of the known kinds.
    """
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
    prompts = prompts_of(given)
    if len(prompts) > 1:
        raise BadField(f"prompt: has {len(prompts)} entries; send a line for each of them")
    return prompts[0]


def _set_input(request: pb.GenerateRequest, line: Mapping[str, Any]) -> None:
    prompt, turns = line.get("prompt"), line.get("messages")
    if (prompt is None) == (turns is None):
        raise BadField("prompt: one of prompt and messages must be there")
    system = list(request.chat.messages)  # of the defaults
    request.ClearField("input")
    if turns is not None:
        set_messages(request.chat, turns, system)
    elif system and not line.get("raw_prompt"):
        set_messages(request.chat, [{"role": "user", "content": prompt}], system)
    else:
        set_field(request, "prompt", prompt)


def _set_labels(request: pb.GenerateRequest, labels: Any) -> None:
    check_entries("labels", labels, dict)
    for key, value in labels.items():
        check_kind(f"labels.{key}", value, str)
    try:
        request.labels.update(labels)
    except ValueError as error:
        raise BadField("labels: are no valid UTF-8") from error


def _set_sampling(sampling: pb.SamplingParams, name: str, value: Any) -> None:
    if name == "chat_template_kwargs":
        check_kind(name, value, dict)
    if name in _OBJECTS and isinstance(value, dict):
        value = json_of(value, name)
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
    for at, one in enumerate(value):
        add_value(getattr(sampling, name), one, field, f"{name}[{at}]")


def _set_biases(sampling: pb.SamplingParams, biases: Any) -> None:
    check_entries("logit_bias", biases, dict)
    sampling.ClearField("logit_bias")
    for token_id, bias in biases.items():
        check_kind(f"logit_bias.{token_id}", bias, float)
        try:
            sampling.logit_bias[int(token_id)] = bias
        except (ValueError, OverflowError):
            raise BadField(
                f"logit_bias.{token_id}: is no token id with a bias from -100 to 100"
            ) from None


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


def _set_choice(choice: pb.ToolChoice, given: Any) -> None:
    mode = given["type"] if isinstance(given, dict) and given.keys() == {"type"} else given
    if mode in ("none", "auto", "required"):
        choice.mode = value_of(pb.ToolChoiceMode, mode)
        return
    name = function_of(given, "tool_choice").get("name")
    set_field(choice, "function", name, "tool_choice.")


def _set_tool(tool: pb.Tool, given: Mapping[str, Any], path: str) -> None:
    if unknown := given.keys() - {"name", "description", "parameters", "strict"}:
        raise BadField(f"{path}.{min(unknown)}: is not served")
    set_field(tool, "strict", given.get("strict", False), f"{path}.")
    for name in ("name", "description"):
        set_field(tool, name, given.get(name, "" if name == "description" else None), f"{path}.")
    parameters = json_of(given.get("parameters", {}), f"{path}.parameters")
    set_field(tool, "parameters", "" if parameters == "{}" else parameters, f"{path}.")
