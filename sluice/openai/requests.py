"""Build a `GenerateRequest` from a body of OpenAI's API, from a line of a batch file, or from Sluice's own job format.

Sluice's format has the names of the proto: `{"id", "prompt" | "messages", "model", "max_tokens", ...}`. OpenAI's body
is translated into it first, so it may also have fields of `SamplingParams` that OpenAI lacks, such as top_k. An
unsupported field is an error that names it: an option without effect would spoil a job of a million items.
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
"""Fields of `SamplingParams` that hold a JSON object as text."""
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
"""Unsupported fields of OpenAI's body that are accepted with a value that changes nothing."""
_UNUSED: Final[Mapping[str, type]] = {
    "store": bool,
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "prompt_cache_options": dict,
    "safety_identifier": str,
    "prediction": dict,
}
"""Fields that never change an answer, with their types: OpenAI's storage, caching and user tracking."""
_REMEDIES: Final[Mapping[str, str]] = {
    "functions": "is not supported; send tools",
    "function_call": "is not supported; send tool_choice",
    "service_tier": "is not supported; the header x-sluice-priority sets the priority",
    "verbosity": "is not supported; ask for the length in the prompt",
    "guided_json": "is not supported; send response_format",
    "guided_regex": "is not supported; send regex",
    "structured_outputs": "is not supported; send response_format, or regex",
}
"""Errors that name a remedy, by unsupported field."""


def request_of_plain(line: Mapping[str, Any], defaults: pb.GenerateRequest) -> pb.GenerateRequest:
    """Return the request of an object in Sluice's format, without its id; fields that it lacks are as in `defaults`.

    Raises:
        BadField: A field is unknown, or its value is invalid.
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
            if (schema := schema_of(value)) is not None:
                request.sampling.json_schema = json_of(schema, name)
                request.sampling.response_format = json_of(value, name)
        elif name in _SAMPLING:
            _set_sampling(request.sampling, name, value)
        else:
            raise BadField(f"{name}: {_REMEDIES.get(name, 'is not supported; leave it out')}")
    return request


def request_of_openai(line: Mapping[str, Any], defaults: pb.GenerateRequest) -> pb.GenerateRequest:
    """Return the request of a line of OpenAI's batch format, without its custom_id.

    Raises:
        BadField: A field is unsupported, or its value is invalid.
    """
    url, body = line.get("url"), body_of_line(line)
    if url not in URLS:
        raise BadField(f"url: {url!r} is not supported; send {', '.join(URLS)} or /v1/embeddings")
    try:
        request = request_of_body(url, body, defaults)
        _check_one_answer(request)
        if request.tools:
            raise BadField("tools: are not supported in jobs, whose results are text")
        return request
    except BadField as error:
        raise BadField(f"body.{error}") from error


def body_of_line(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a line of OpenAI's batch format; raise as `request_of_openai`."""
    if unknown := line.keys() - {"custom_id", "method", "url", "body"}:
        raise BadField(f"{min(unknown)}: is not a field of a batch line; leave it out")
    if line.get("method", "POST") != "POST":
        raise BadField("method: must be POST")
    if not isinstance(body := line.get("body"), dict):
        raise BadField("body: must be an object")
    return body


def request_of_body(
    url: str, body: Mapping[str, Any], defaults: pb.GenerateRequest
) -> pb.GenerateRequest:
    """Return the request of a body sent to `url`, one of `URLS`.

    As with OpenAI, `COMPLETION_TOKENS` is the default of max_tokens for `COMPLETIONS`.

    Raises:
        BadField: A field is unsupported, or its value is invalid.
    """
    field, other = _INPUTS if url == COMPLETIONS else reversed(_INPUTS)
    if body.get(other) is not None:
        raise BadField(f"{other}: is not a field of {url}; send {field}")
    if body.get(field) is None:
        raise BadField(f"{field}: is required")
    plain = _plain_of(body)
    token_ids: Sequence[int] = ()
    if url == COMPLETIONS:
        prompts = prompts_of(body["prompt"])
        if len(prompts) > 1:
            raise BadField(f"prompt: has {len(prompts)} entries; send a line for each of them")
        prompt = prompts[0]
        if isinstance(prompt, list):
            token_ids, prompt = prompt, " "  # replaced by the tokens below
        plain |= {"raw_prompt": True, "prompt": prompt}
    tools = {name: plain.pop(name) for name in _TOOL_FIELDS if name in plain}
    if tools and url == COMPLETIONS:
        raise BadField(f"{min(tools)}: is not a field of {url}; leave it out")
    if not tools.get("tools"):
        tools.pop("parallel_tool_calls", None)  # has no effect without tools
    request = _request_of(plain, defaults)
    if url == COMPLETIONS and not request.sampling.HasField("max_tokens"):
        request.sampling.max_tokens = max(COMPLETION_TOKENS, request.sampling.min_tokens)
    set_tools(request, tools)
    if token_ids:
        request.tokens.token_ids.extend(token_ids)
    return request


def _check_one_answer(request: pb.GenerateRequest) -> None:
    if request.sampling.n > 1:
        raise BadField("n: is not supported in jobs; write a line for each answer")


def _plain_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Translate OpenAI's body into Sluice's format."""
    plain = {
        key: value
        for key, value in body.items()
        if value is not None and value not in _NO_EFFECT.get(key, ())
    }
    for name, kind in _UNUSED.items():
        if name in plain:
            check_kind(name, plain.pop(name), kind)
    max_tokens = plain.pop("max_completion_tokens", None)
    if max_tokens is not None and plain.setdefault("max_tokens", max_tokens) != max_tokens:
        raise BadField("max_completion_tokens: differs from max_tokens; send one of them")
    if plain.pop("ignore_eos", None) is not None:
        plain["min_tokens"] = _whole_length(body, plain)
    if isinstance(stop := plain.get("stop"), str):
        plain["stop"] = [stop]
    # Some clients send empty stop strings for none.
    elif isinstance(stop, list) and all(text == "" for text in stop):
        del plain["stop"]
    elif stop is not None and not isinstance(stop, list):
        raise BadField("stop: must be text or a list of texts")
    if "logprobs" in plain or "top_logprobs" in plain:
        plain["logprobs"] = _logprobs_of(plain)
    plain["labels"] = _labels_of(plain)
    return plain


def _whole_length(body: Mapping[str, Any], plain: Mapping[str, Any]) -> Any:
    """Return the exact length of an answer with `ignore_eos`, which load generators of vLLM send."""
    if body["ignore_eos"] is not True:
        raise BadField("ignore_eos: must be true or false")
    if "max_tokens" not in plain or "min_tokens" in plain:
        raise BadField("ignore_eos: needs max_tokens, and no min_tokens")
    return plain["max_tokens"]


def _logprobs_of(plain: dict[str, Any]) -> Any:
    """Return the number of alternatives for each token: `logprobs` is a flag in chats, that number in completions."""
    logprobs, top = plain.pop("logprobs", False), plain.pop("top_logprobs", None)
    if logprobs is True:
        return top or 0
    if top:
        raise BadField("top_logprobs: needs logprobs: true")
    return None if logprobs is False else logprobs


def _labels_of(plain: dict[str, Any]) -> Any:
    """Return the labels in `metadata`, `labels` and `user`, and remove these from `plain`."""
    labels = plain.pop("labels", {})
    check_entries("labels", labels, dict)
    merged = {**labels_of_metadata(plain.pop("metadata", {})), **labels}
    if "user" in plain:
        check_kind("user", plain["user"], str)
        merged["user"] = plain.pop("user")
    return merged


def labels_of_metadata(metadata: Any) -> dict[str, str]:
    """Return OpenAI's `metadata` as labels, without nulls; numbers and booleans become JSON text.

    Raises:
        BadField: It is not an object, or has a value of another type.
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


def schema_of(shape: Any) -> dict[str, Any] | None:
    """Return the JSON schema of a `response_format`; None for text.

    Raises:
        BadField: It is not of a known type.
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
    raise BadField("response_format: must be text, json_object, or json_schema with a schema")


def _set_input(request: pb.GenerateRequest, line: Mapping[str, Any]) -> None:
    prompt, messages = line.get("prompt"), line.get("messages")
    if (prompt is None) == (messages is None):
        raise BadField("prompt: send either prompt or messages")
    system = list(request.chat.messages)  # from the defaults
    request.ClearField("input")  # set anew below, after the system messages of the defaults
    if messages is not None:
        set_messages(request.chat, messages, system)
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
        raise BadField("labels: must be valid UTF-8") from error


def _set_sampling(sampling: pb.SamplingParams, name: str, value: Any) -> None:
    if name == "chat_template_kwargs":
        check_kind(name, value, dict)
    if name in _OBJECTS and isinstance(value, dict):
        value = json_of(value, name)
    if name == "seed" and type(value) is int and -(1 << 63) <= value < 0:
        value += 1 << 64  # OpenAI's seeds are signed, those of the proto are not
    if name == "top_k" and value == -1:
        value = 0  # vLLM sends -1 for no limit
    field = _SAMPLING[name]
    if name == "logit_bias":
        _set_biases(sampling, value)
        return
    if not field.is_repeated:
        set_field(sampling, name, value)
        return
    check_entries(name, value, list)
    sampling.ClearField(name)  # type: ignore[arg-type]
    for index, entry in enumerate(value):
        add_value(getattr(sampling, name), entry, field, f"{name}[{index}]")


def _set_biases(sampling: pb.SamplingParams, biases: Any) -> None:
    check_entries("logit_bias", biases, dict)
    sampling.ClearField("logit_bias")
    for token_id, bias in biases.items():
        check_kind(f"logit_bias.{token_id}", bias, float)
        try:
            sampling.logit_bias[int(token_id)] = bias
        except (ValueError, OverflowError):
            raise BadField(
                f"logit_bias.{token_id}: must be a token id with a bias from -100 to 100"
            ) from None


_TOOL_FIELDS: Final[Sequence[str]] = ("tools", "tool_choice", "parallel_tool_calls")


def set_tools(request: pb.GenerateRequest, body: Mapping[str, Any]) -> None:
    """Set the `_TOOL_FIELDS` of `body` in `request`.

    Raises:
        BadField: One is invalid.
    """
    if (choice := body.get("tool_choice")) is not None:
        _set_choice(request.tool_choice, choice)
    if (parallel := body.get("parallel_tool_calls")) is not None:
        set_field(request, "parallel_tool_calls", parallel)
    tools = body.get("tools") or []
    check_entries("tools", tools, list)
    for index, tool in enumerate(tools):
        described = function_of(tool, f"tools[{index}]")
        _set_tool(request.tools.add(), described, f"tools[{index}].function")


def _set_choice(choice: pb.ToolChoice, value: Any) -> None:
    mode = value["type"] if isinstance(value, dict) and value.keys() == {"type"} else value
    if mode in ("none", "auto", "required"):
        choice.mode = value_of(pb.ToolChoiceMode, mode)
        return
    name = function_of(value, "tool_choice").get("name")
    set_field(choice, "function", name, "tool_choice.")


def _set_tool(tool: pb.Tool, function: Mapping[str, Any], path: str) -> None:
    if unknown := function.keys() - {"name", "description", "parameters", "strict"}:
        raise BadField(f"{path}.{min(unknown)}: is not supported; leave it out")
    set_field(tool, "strict", function.get("strict", False), f"{path}.")
    set_field(tool, "name", function.get("name"), f"{path}.")
    set_field(tool, "description", function.get("description", ""), f"{path}.")
    parameters = json_of(function.get("parameters", {}), f"{path}.parameters")
    set_field(tool, "parameters", "" if parameters == "{}" else parameters, f"{path}.")
