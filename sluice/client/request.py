"""Build request messages from arguments.

The gateway validates values. Here they only have to fit the types of their fields; `InvalidRequest` names the field.
"""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, TypedDict, TypeVar, get_args

from google.protobuf.message import Message as ProtoMessage

from sluice.defaults import AUTO
from sluice.errors import InvalidRequest
from sluice.v1 import inference_pb2 as pb
from sluice.v1 import safety_pb2
from sluice.v1.inference_pb2 import ToolCall
from sluice.wire.enums import value_of

M = TypeVar("M", bound=ProtoMessage)
PriorityName = Literal["interactive", "standard", "bulk"]
PRIORITIES: Final[tuple[PriorityName, ...]] = get_args(PriorityName)
RoleName = Literal["system", "user", "assistant", "tool"]
ROLES: Final[tuple[RoleName, ...]] = get_args(RoleName)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: Who speaks: "system", "user", "assistant", or "tool" for the result of a tool call.
        content: Text of the message.
        tool_calls: Tool calls of the model, in a message of role "assistant".
        tool_call_id: Id of the tool call that a message of role "tool" answers.
    """

    role: RoleName
    content: str
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may ask the caller to run.

    Attributes:
        name: Name of the function.
        description: What it does, for the model.
        parameters: JSON Schema of its arguments, as JSON text or as an object; empty for a function without arguments.
        strict: Whether the arguments of every call must match the schema; see docs/use/tools.md.
    """

    name: str
    description: str = ""
    parameters: str | Mapping[str, Any] = ""
    strict: bool = False


AudioTaskName = Literal["transcribe", "translate"]


@dataclass(frozen=True, slots=True)
class Audio:
    """Speech for a model that takes audio; the answer is its text.

    Attributes:
        data: A WAV file with 16 kHz, one channel and 16 bits.
        language: Spoken language, such as "en"; empty to let the model detect it.
        prompt: Text before the speech, as an example of style and spelling.
        task: "transcribe", or "translate" into English.
        pcm: Whether `data` has samples only, without a header: signed, 16 bits, little-endian.
    """

    data: bytes
    language: str = ""
    prompt: str = ""
    task: AudioTaskName = "transcribe"
    pcm: bool = False


Prompt = str | Sequence[Message] | Audio
"""Text of a single user message, a conversation, or speech."""


class SamplingOptions(TypedDict, total=False):
    """How tokens are sampled. Omitted options have the model's defaults; docs/use/sampling.md describes each.

    Keys:
        json_schema: JSON Schema that the answer must match, as JSON text or as an object.
        regex: Regular expression that the answer must match; not together with `json_schema`.
        logprobs: Number of alternatives to return for each token; 0 returns the log-probability of the token alone.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: Sequence[str]
    repetition_penalty: float
    logprobs: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    min_tokens: int
    stop_token_ids: Sequence[int]
    logit_bias: Mapping[int, float]
    json_schema: str | Mapping[str, Any]
    regex: str


class TextOptions(TypedDict, total=False):
    """Options of `embed`, `rerank` and `score`.

    Keys:
        model: Name of the model; may be omitted if the mesh has one model of the kind.
        priority: "interactive" (the default), "standard" or "bulk".
        labels: Labels for policies and accounting.
    """

    model: str
    priority: PriorityName
    labels: Mapping[str, str]


class GenerateOptions(SamplingOptions, total=False):
    """Options of `generate` beside the prompt.

    Keys:
        model: Name of the model, or "auto" (the default) to let the gateway choose.
        priority: "interactive" (the default), "standard" or "bulk".
        timeout_s: Time from the start of the stream until the answer must be complete, in seconds: the gRPC deadline.
        labels: Labels for routing rules, policies and accounting.
        idempotency_key: Key of the answer, by which it can be resumed or replayed; generated if omitted.
        raw_prompt: Whether to tokenize the prompt without the chat template.
        allow_degraded: Whether a fallback may answer if the chosen model fails or cannot answer in time. By default
            only if no model is named.
        gather_s: How long the gateway may coalesce tokens into one message, in seconds. 0 sends each token at once, an
            hour the whole answer. The default is the operator's setting for the class.
        tools: Functions that the model may call; the answer has `tool_calls`.
        tool_choice: "none", "auto" (the default with tools), "required", or the name of the tool to call.
        parallel_tool_calls: Whether an answer may have several tool calls (the default).
        accept_replace: Whether a cascade may stream an answer that `NoticeKind.ESCALATED` voids later.
    """

    model: str
    priority: PriorityName
    timeout_s: float
    labels: Mapping[str, str]
    idempotency_key: str
    raw_prompt: bool
    allow_degraded: bool
    gather_s: float
    accept_replace: bool
    tools: Sequence[Tool]
    tool_choice: str
    parallel_tool_calls: bool


def generate_request(prompt: Prompt, options: GenerateOptions, n: int = 1) -> pb.GenerateRequest:
    """Return the message for `generate`, or for `n` answers.

    Raises:
        InvalidRequest: A value does not fit its field, such as text that is not UTF-8 or a number out of range.
    """
    request = pb.GenerateRequest()
    set_prompt(request, prompt)
    set_options(request, options, AUTO)
    set_fields(request, **{name: options.get(name) for name in _SWITCHES})
    if (gather_s := options.get("gather_s")) is not None:
        with _naming("gather"):
            request.gather.FromNanoseconds(round(1e9 * gather_s))
    _set_tools(request, options)
    key = options.get("idempotency_key")
    set_fields(request, idempotency_key=key or uuid.uuid4().hex)
    request.idempotency_key_generated = not key
    sampling = {name: options.get(name) for name in SamplingOptions.__annotations__}
    schema, regex = sampling["json_schema"], sampling["regex"]
    if schema is not None and regex is not None:
        raise InvalidRequest.of(
            "sampling.regex", "an answer can have one constraint; leave out json_schema or regex"
        )
    if isinstance(schema, Mapping):
        with _naming("sampling.json_schema"):
            sampling["json_schema"] = json.dumps(schema)
    set_fields(request.sampling, "sampling.", **sampling, n=None if n == 1 else n)
    return request


_SWITCHES: Final = ("raw_prompt", "allow_degraded", "accept_replace", "parallel_tool_calls")
"""Options that are fields of the message with the same name."""


def count_request(prompt: Prompt, model: str, raw_prompt: bool) -> pb.CountTokensRequest:
    """Return the message for `count_tokens`; raise as `generate_request`."""
    request = pb.CountTokensRequest()
    set_prompt(request, prompt)
    return set_fields(request, model=model, raw_prompt=raw_prompt)


def check_request(text: str, labels: Mapping[str, str]) -> safety_pb2.CheckTextRequest:
    """Return the message for `check_safety`; raise as `generate_request`."""
    request = set_fields(safety_pb2.CheckTextRequest(), text=text)
    _set_labels(request, labels)
    return request


def set_options(request: Any, options: GenerateOptions | TextOptions, model: str) -> None:
    """Set priority, labels and model; `model` is the default. Raise as `generate_request`."""
    priority = options.get("priority", "interactive")
    if priority not in PRIORITIES:
        raise InvalidRequest.of("priority", f"{priority!r} is not one of {', '.join(PRIORITIES)}")
    set_fields(request, priority=value_of(pb.Priority, priority), model=options.get("model", model))
    _set_labels(request, options.get("labels", {}))


def _set_labels(request: Any, labels: Mapping[str, str]) -> None:
    for key, value in labels.items():
        with _naming(f"labels.{key}"):
            request.labels[key] = value


def set_prompt(
    request: pb.GenerateRequest | pb.CountTokensRequest | pb.ScoreRequest, prompt: Prompt
) -> None:
    """Set the prompt, the conversation or the audio of `request`; raise as `generate_request`."""
    if isinstance(prompt, str):
        set_fields(request, prompt=prompt)
        return
    if isinstance(prompt, Audio):
        if not isinstance(request, pb.GenerateRequest):
            raise InvalidRequest.of("input", "must be text, not audio; only `generate` takes audio")
        _set_audio(request.audio, prompt)
        return
    request.chat.SetInParent()
    for i, turn in enumerate(prompt):
        path, message = f"chat.messages[{i}].", request.chat.messages.add()
        if turn.role not in ROLES:
            problem = f"{turn.role!r} is not one of {', '.join(ROLES)}"
            raise InvalidRequest.of(f"{path}role", problem)
        message.role = value_of(pb.Role, turn.role)
        set_fields(message, path, content=turn.content, tool_call_id=turn.tool_call_id)
        message.tool_calls.extend(turn.tool_calls)


def _set_audio(message: pb.AudioInput, audio: Audio) -> None:
    if audio.task not in get_args(AudioTaskName):
        raise InvalidRequest.of(
            "audio.task", f"{audio.task!r} is not one of {', '.join(get_args(AudioTaskName))}"
        )
    message.format = pb.AUDIO_FORMAT_PCM if audio.pcm else pb.AUDIO_FORMAT_WAV
    message.task = value_of(pb.AudioTask, audio.task)
    set_fields(message, "audio.", data=audio.data, language=audio.language, prompt=audio.prompt)


def _set_tools(request: pb.GenerateRequest, options: GenerateOptions) -> None:
    for tool in options.get("tools", ()):
        with _naming("tools"):
            parameters = tool.parameters
            text = parameters if isinstance(parameters, str) else json.dumps(parameters)
            request.tools.add(
                name=tool.name, description=tool.description, parameters=text, strict=tool.strict
            )
    choice = options.get("tool_choice")
    if choice in ("none", "auto", "required"):
        request.tool_choice.mode = value_of(pb.ToolChoiceMode, choice)
    elif choice is not None:
        set_fields(request.tool_choice, "tool_choice.", function=choice)


def set_fields(message: M, path: str = "", /, **values: Any) -> M:
    """Set the fields of `message` whose values are not None, and return it; `path` precedes their names in errors.

    Raises:
        InvalidRequest: A value does not fit its field.
    """
    for name, value in values.items():
        if value is None:
            continue
        with _naming(path + name):
            if isinstance(value, str | bytes | int | float):
                setattr(message, name, value)
            elif isinstance(value, Mapping):
                getattr(message, name).update(value)
            else:
                getattr(message, name).extend(value)
    return message


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Name the field in the error if protobuf rejects a value."""
    try:
        yield
    except UnicodeError as error:
        raise InvalidRequest.of(field, "is not valid UTF-8") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest.of(field, str(error)) from error
