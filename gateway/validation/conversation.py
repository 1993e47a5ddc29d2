"""Validate the input of a request: a prompt, a conversation with tool calls, or speech; and the tools it offers.

`messages_of` and `function_of` turn it into what chat templates take, by the convention of transformers
(https://huggingface.co/docs/transformers/chat_extras).
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from gateway.models.catalog import Catalog
from gateway.models.speech import (
    BYTES_A_SECOND,
    SAMPLE_BYTES,
    BadAudio,
    SpeechTokens,
    pcm_of_wav,
)
from gateway.models.tools import FunctionTool, ToolCall, ToolFormat, ToolUse, map_texts, texts_in
from sluice.constraints import JSON_SCHEMA_MAX_BYTES
from sluice.defaults import AUTO
from sluice.errors import FieldViolation, InvalidRequest, UnknownModel
from sluice.openai.fields import BadJson, load_json, values_in
from sluice.v1 import inference_pb2 as pb
from sluice.wire.enums import word_of
from sluice.wire.subjects import is_token

NAMED_MAX: Final = 16
"""Most wrong fields that an error names: it is sent in the trailers of a call, which hold a few kilobytes."""
MESSAGES_MAX: Final = 2048
"""Most messages of a conversation; each costs inspection and tokenization, however short it is."""
SYSTEM: Final = "system"
USER: Final = "user"
ASSISTANT: Final = "assistant"
TOOL: Final = "tool"
TOOLS_MAX: Final = 128
"""Most tools of a request."""
TOOLS_BYTES_MAX: Final = 256 << 10
"""Most characters of descriptions and parameters of all tools together."""
CALLS_MAX: Final = 2048
"""Most tool calls of a conversation. They are counted before any is read."""
VALUES_MAX: Final = 16_384
"""Most values in the JSON of all tools, or of all tool calls, of a request: each string is inspected like a message."""
DEPTH_MAX: Final = 64
"""Deepest nesting of JSON in tools and tool calls."""
_NAME_EDITED: Final = (
    "the safety policy redacts a part of the name of a tool or tool call; "
    "choose a name without such a value"
)
CALL_ID_CHARS_MAX: Final = 512
"""Most characters of the id of a tool call; some servers put a signature of their reasoning into it."""
CALL_NAME_CHARS_MAX: Final = 256
"""Most characters of the name in an earlier tool call: models sometimes call tools that do not exist."""
_PLAIN_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{0,64}")
"""Ids that a model sees unchanged. Others are replaced by a hash, which the safety policy does not redact and which
keeps their text out of the prompt."""


class FieldViolations:
    """The wrong fields of a request; an error names the first `NAMED_MAX`."""

    def __init__(self) -> None:
        self._violations: list[FieldViolation] = []

    def __bool__(self) -> bool:
        return bool(self._violations)

    def add(self, field: str, description: str) -> None:
        """Add a wrong field; `description` says what would be valid, and must not quote a prompt."""
        self._violations.append(FieldViolation(field, description))

    def check(self, holds: bool, field: str, description: str) -> None:
        """Add a wrong field unless `holds`."""
        if not holds:
            self.add(field, description)

    def raise_if_any(self) -> None:
        """Raise one `InvalidRequest` with all violations, if there are any."""
        if self._violations:
            named, more = self._violations[:NAMED_MAX], len(self._violations) - NAMED_MAX
            message = "; ".join(f"{wrong.field}: {wrong.description}" for wrong in named)
            message += f"; and {more} more" if more > 0 else ""
            raise InvalidRequest(message, violations=named)


def named(model: str) -> str:
    """Return the model that a request names; empty for none and for "auto"."""
    return "" if model == AUTO else model


def model_among(
    known: Sequence[str],
    name: str,
    catalog: Catalog,
    violations: FieldViolations,
    none: str,
    wrong: str,
    *,
    routed: bool = False,
) -> str | None:
    """Return the requested model if it is one of the `known` ones; without a name the only one.

    Args:
        known: Models that can do what the request asks for.
        name: Model of the request.
        catalog: All models.
        violations: Receives what is wrong.
        none: Error for no known model.
        wrong: Error for a model that exists, but is not one of the known.
        routed: Whether the router chooses for a request without a name; the result is then None.

    Raises:
        UnknownModel: There is no known model, or the name is unknown and nothing else is wrong.
    """
    wanted = named(name)
    if wanted in known:
        return wanted
    names = ", ".join(known)
    if wanted in catalog.callable:
        violations.add("model", wrong)
    elif not known:
        raise UnknownModel(none, metadata={"models": ""})
    elif wanted:
        message = f"no model {wanted[:64]!r}; there are {names}" + f', or "{AUTO}"' * routed
        if not violations:
            raise UnknownModel(message, metadata={"models": names})
        violations.add("model", message)
    elif not routed and len(known) == 1:
        return known[0]
    elif not routed:
        violations.add("model", f"name one of {names}")
    return None


@dataclass
class Turn:
    """One message of a conversation.

    Attributes:
        calls: Tool calls by the assistant.
        call_id: Id of the tool call that a turn of role tool answers.
    """

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""


@dataclass
class Conversation:
    """The input of a model: a chat, or a prompt as one user turn; and the texts of Embed, Rerank and Score.

    Attributes:
        turns: Messages of the chat.
        raw: Whether the only turn is tokenized without the chat template.
        tools: Tools that the model sees.
        query: Query that documents are ranked for.
        documents: Texts to embed or to rank.
        answers: Answers to the turns, to be scored.
        variables: Variables of the chat template.
        token_ids: Tokens of the only turn, if the caller sent these instead of text; decoding sets the text.
        answer_token_ids: Tokens of each answer, if the caller sent these instead of text.
        vocabulary: Model whose tokens these are.
    """

    turns: tuple[Turn, ...]
    raw: bool
    tools: tuple[FunctionTool, ...] = ()
    query: str = ""
    documents: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    token_ids: tuple[int, ...] = ()
    answer_token_ids: tuple[tuple[int, ...], ...] = ()
    vocabulary: str = ""

    @cached_property
    def texts(self) -> list[str]:
        """All text of the caller: turns in order, then inside tool calls and tools, then the rest.

        All names form one text, a line each, and so do all ids.
        """
        texts = [turn.content for turn in self.turns]
        if self.tools or any(turn.calls for turn in self.turns):
            texts += self._tool_texts()
        if self.query:
            texts.append(self.query)
        return [*texts, *self.documents, *self.answers]

    def _tool_texts(self) -> Iterator[str]:
        for call in self._calls:
            yield from texts_in(call.arguments)
        for tool in self.tools:
            yield tool.description
            yield from texts_in(tool.parameters)
        yield from filter(None, (self._names, self._ids))

    @property
    def _calls(self) -> Iterator[ToolCall]:
        return (call for turn in self.turns for call in turn.calls)

    @cached_property
    def _names(self) -> str:
        """Names of tools and tool calls without repetition, a line each."""
        names = [*(tool.name for tool in self.tools), *(call.name for call in self._calls)]
        return "\n".join(dict.fromkeys(names))

    @cached_property
    def _ids(self) -> str:
        """Ids of tool calls without repetition, a line each."""
        return "\n".join(dict.fromkeys(call.id for call in self._calls))

    def with_texts(self, texts: Sequence[str]) -> "Conversation":
        """Return a copy with other `texts`. If one of the ids changes, opaque ids replace all of them.

        Raises:
            InvalidRequest: A name would change, by which tools and tool calls refer to one another.
        """
        left = iter(texts)
        contents = [next(left) for _ in self.turns]
        turns = tuple(
            replace(turn, content=content, calls=tuple(_changed(call, left) for call in turn.calls))
            for turn, content in zip(self.turns, contents, strict=True)
        )
        tools = tuple(
            replace(
                tool,
                description=next(left),
                parameters=map_texts(tool.parameters, lambda _: next(left)),
            )
            for tool in self.tools
        )
        if self._names and next(left) != self._names:
            raise InvalidRequest.of("tools" if self.tools else "chat.messages", _NAME_EDITED)
        # One changed id may have merged with another, so all are replaced.
        if self._ids and next(left) != self._ids:
            turns = tuple(map(_with_opaque_ids, turns))
        return replace(
            self,
            turns=turns,
            tools=tools,
            query=next(left) if self.query else "",
            documents=tuple([next(left) for _ in self.documents]),
            answers=(answers := tuple(left)),
            # Tokens that the caller sent are only valid for unchanged text.
            token_ids=self.token_ids if turns == self.turns else (),
            answer_token_ids=tuple(
                token_ids if new == old else ()
                for token_ids, new, old in zip(
                    self.answer_token_ids, answers, self.answers, strict=False
                )
            ),
        )

    @property
    def sent_tokens(self) -> int:
        """Number of tokens that the caller sent instead of text."""
        return len(self.token_ids) + sum(map(len, self.answer_token_ids))

    @property
    def system_text(self) -> str:
        """The text of all system turns."""
        return "\n\n".join([turn.content for turn in self.turns if turn.role == SYSTEM])

    @property
    def user_text(self) -> str:
        """The text of all user turns, of the query and of the documents."""
        contents = [turn.content for turn in self.turns if turn.role == USER]
        return "\n".join([*contents, *filter(None, [self.query]), *self.documents])

    @property
    def last_user_text(self) -> str | None:
        """The text of the last user turn; None if there is none."""
        return next((turn.content for turn in reversed(self.turns) if turn.role == USER), None)


def conversation_of(
    request: pb.GenerateRequest | pb.CountTokensRequest | pb.ScoreRequest,
    violations: FieldViolations,
) -> Conversation:
    """Return the input of `request` without its tools; add what is wrong to `violations`."""
    kind = request.WhichOneof("input")
    if kind == "chat":
        violations.check(not request.raw_prompt, "raw_prompt", "needs prompt, not chat")
        return _chat(request.chat.messages, violations)
    if isinstance(request, pb.GenerateRequest) and kind == "audio":
        return Conversation((Turn(USER, request.audio.prompt),), raw=True)
    if isinstance(request, pb.GenerateRequest) and kind == "tokens":
        token_ids = tuple(request.tokens.token_ids)
        violations.check(bool(token_ids), "tokens.token_ids", "is empty; send at least one token")
        check_vocabulary(request.model, violations)
        turn = Turn(USER, "")
        return Conversation((turn,), raw=True, token_ids=token_ids, vocabulary=request.model)
    if kind is None:
        violations.add("input", "set prompt, tokens, chat or audio")
    else:
        violations.check(bool(request.prompt.strip()), "prompt", "must not be empty")
    return Conversation((Turn(USER, request.prompt),), raw=request.raw_prompt)


def check_vocabulary(model: str, violations: FieldViolations) -> None:
    """Add a violation unless the request names the model of its tokens."""
    violations.check(bool(named(model)), "model", "is required with token ids; name their model")


def _chat(messages: Sequence[pb.ChatMessage], violations: FieldViolations) -> Conversation:
    values = (values_in(call.arguments) for message in messages for call in message.tool_calls)
    if not 1 <= len(messages) <= MESSAGES_MAX:
        violations.add("chat.messages", f"must have 1 to {MESSAGES_MAX} messages")
    elif sum(len(message.tool_calls) for message in messages) > CALLS_MAX:
        violations.add("chat.messages", f"must have at most {CALLS_MAX} tool_calls in all")
    elif sum(values) > VALUES_MAX:
        violations.add("chat.messages", f"their calls must have at most {VALUES_MAX} values in all")
    else:
        turns, call_ids = list[Turn](), set[str]()
        for index, message in enumerate(messages):
            turns.append(_turn(message, f"chat.messages[{index}]", call_ids, violations))
            call_ids.update(call.id for call in turns[-1].calls)
        says = any(turn.content.strip() or turn.calls for turn in turns)
        violations.check(says, "chat.messages", "have no text")
        return Conversation(_with_one_system(turns), raw=False)
    return Conversation((), raw=False)


def _with_one_system(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Join consecutive system turns, because most chat templates allow only one."""
    joined: list[Turn] = []
    for turn in turns:
        if turn.role == SYSTEM and joined and joined[-1].role == SYSTEM:
            texts = filter(None, (joined.pop().content, turn.content))
            joined.append(Turn(SYSTEM, "\n\n".join(texts)))
        else:
            joined.append(turn)
    return tuple(joined)


def _turn(
    message: pb.ChatMessage, path: str, call_ids: set[str], violations: FieldViolations
) -> Turn:
    """Return a turn; `call_ids` has the ids of earlier tool calls."""
    calls = [
        _call(call, f"{path}.tool_calls[{i}]", violations)
        for i, call in enumerate(message.tool_calls)
    ]
    role, call_id = word_of(pb.Role, message.role), _call_id(message.tool_call_id)
    known_role = role in (SYSTEM, USER, ASSISTANT, TOOL)
    violations.check(known_role, f"{path}.role", "must be system, user, assistant or tool")
    violations.check(
        role == ASSISTANT or not calls, f"{path}.tool_calls", "only the assistant has calls"
    )
    violations.check(
        call_id in call_ids if role == TOOL else not call_id,
        f"{path}.tool_call_id",
        "must be the id of an earlier call where the role is tool, else empty",
    )
    return Turn(role, message.content, tuple(calls), call_id)


def _with_opaque_ids(turn: Turn) -> Turn:
    calls = tuple(replace(call, id=opaque_id(call.id)) for call in turn.calls)
    return replace(turn, calls=calls, call_id=turn.call_id and opaque_id(turn.call_id))


def _changed(call: ToolCall, texts: Iterator[str]) -> ToolCall:
    return replace(call, arguments=map_texts(call.arguments, lambda _: next(texts)))


def _call(call: pb.ToolCall, path: str, violations: FieldViolations) -> ToolCall:
    violations.check(
        len(call.id) <= CALL_ID_CHARS_MAX and call.id.isprintable(),
        f"{path}.id",
        f"must have at most {CALL_ID_CHARS_MAX} printable characters",
    )
    violations.check(
        1 <= len(call.name) <= CALL_NAME_CHARS_MAX and call.name.isprintable(),
        f"{path}.name",
        f"must have 1 to {CALL_NAME_CHARS_MAX} printable characters",
    )
    return ToolCall(_call_id(call.id), call.name, _arguments(call.arguments))


def _call_id(call_id: str) -> str:
    """Return the id of a tool call as a model sees it."""
    return call_id if _PLAIN_ID.fullmatch(call_id) else opaque_id(call_id)


def opaque_id(call_id: str) -> str:
    """Return an id that stands for `call_id` and holds nothing of its text."""
    return "call_" + hashlib.sha256(call_id.encode()).hexdigest()[:24]


def _arguments(text: str) -> Mapping[str, Any] | str:
    """Return the JSON object in `text`, or `text` itself if it is not an object, or deeper than `DEPTH_MAX`."""
    try:
        value = load_json(text or "null", strict=False)
    except BadJson:
        return text
    if value is None:  # a tool call without arguments
        return {}
    return value if isinstance(value, dict) and _fits(value, DEPTH_MAX) else text


def tools_of(tools: Sequence[pb.Tool], violations: FieldViolations) -> tuple[FunctionTool, ...]:
    """Return the tools; add what is wrong with them to `violations`."""
    sizes = (len(tool.description) + len(tool.parameters) for tool in tools)
    if len(tools) > TOOLS_MAX or sum(sizes) > TOOLS_BYTES_MAX:
        violations.add(
            "tools", f"must be at most {TOOLS_MAX} tools with {TOOLS_BYTES_MAX} characters"
        )
        return ()
    values = [values_in(tool.parameters) for tool in tools]
    if sum(values) > VALUES_MAX:
        field = f"tools[{values.index(max(values))}].parameters"
        violations.add(field, f"all parameters together must have at most {VALUES_MAX} values")
        return ()
    names = [tool.name for tool in tools]
    violations.check(len(set(names)) == len(names), "tools", "have the same name twice")
    return tuple(_tool(tool, f"tools[{i}]", violations) for i, tool in enumerate(tools))


def tool_use_of(request: pb.GenerateRequest, violations: FieldViolations) -> ToolUse | None:
    """Return which tools the answer may call, or None without tools; add what is wrong to `violations`."""
    choice = request.tool_choice
    if not request.tools:
        wants = choice.function or choice.mode == pb.TOOL_CHOICE_MODE_REQUIRED
        violations.check(not wants, "tool_choice", "needs tools")
        violations.check(
            not request.HasField("parallel_tool_calls"), "parallel_tool_calls", "needs tools"
        )
        return None
    tools = tools_of(request.tools, violations)
    violations.check(
        choice.mode in pb.ToolChoiceMode.values(),
        "tool_choice.mode",
        "must be auto, none or required",
    )
    violations.check(
        choice.function in ("", *(tool.name for tool in tools)),
        "tool_choice.function",
        "must be the name of one of the tools",
    )
    if choice.mode == pb.TOOL_CHOICE_MODE_NONE:
        return None
    use = ToolUse(
        tools,
        only=choice.function,
        required=choice.mode == pb.TOOL_CHOICE_MODE_REQUIRED,
        parallel=request.parallel_tool_calls or not request.HasField("parallel_tool_calls"),
        schema=request.sampling.json_schema,
    )
    _check_together(request, use, violations)
    return use


def _check_together(request: pb.GenerateRequest, use: ToolUse, violations: FieldViolations) -> None:
    sampling = request.sampling
    raw = request.raw_prompt or request.WhichOneof("input") == "tokens"
    violations.check(not raw, "tools", "need the chat template, and no raw prompt")
    constraint = sampling.WhichOneof("constraint")
    violations.check(constraint != "regex", "sampling.regex", "cannot be combined with tools")
    for name in ("min_tokens", "stop_token_ids"):
        violations.check(
            not (use.constrained and getattr(sampling, name)),
            f"sampling.{name}",
            "cannot be combined with strict tools or a required call, which determine where the answer ends",
        )


def _tool(tool: pb.Tool, path: str, violations: FieldViolations) -> FunctionTool:
    violations.check(
        is_token(tool.name),
        f"{path}.name",
        "must be 1 to 64 letters, digits, '_' and '-'",
    )
    field, parameters = f"{path}.parameters", {}
    if len(tool.parameters.encode()) > JSON_SCHEMA_MAX_BYTES:
        violations.add(field, f"must have at most {JSON_SCHEMA_MAX_BYTES} bytes")
    elif tool.parameters:
        parameters = _object(tool.parameters, field, violations)
        violations.check(
            parameters.get("type", "object") == "object",
            field,
            'must be a schema of "type": "object"',
        )
    return FunctionTool(tool.name, tool.description, parameters, tool.strict)


def _object(text: str, field: str, violations: FieldViolations) -> dict[str, Any]:
    """Return the JSON object in `text`; add a violation and return an empty one if it is not an object."""
    try:
        value = load_json(text)
    except BadJson:
        value = None
    if not isinstance(value, dict):
        violations.add(field, "must be a JSON object")
        return {}
    if not _fits(value, DEPTH_MAX):
        violations.add(field, f"must be at most {DEPTH_MAX} levels deep")
        return {}
    return value


def _fits(value: Any, levels: int) -> bool:
    """Return whether the JSON `value` is at most `levels` deep."""
    if isinstance(value, dict):
        value = list(value.values())
    inner = value if isinstance(value, list) else ()
    return levels > 0 and all(_fits(entry, levels - 1) for entry in inner)


def function_of(tool: FunctionTool, *, says_strict: bool = False) -> Mapping[str, Any]:
    """Return a tool as chat templates take it; `says_strict` adds `strict`, for a remote server."""
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": parameters,
    }
    if says_strict and tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def messages_of(
    turns: Sequence[Turn], form: ToolFormat | None, *, wrapped: bool = False
) -> list[Mapping[str, Any]]:
    """Return the turns as a chat template takes them; `form` is the model's format of tool calls.

    With `wrapped`, arguments that are not an object are put into one, for templates that take nothing else.
    """
    messages, names = list[Mapping[str, Any]](), dict[str, str]()
    for turn in turns:
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        for call in turn.calls:
            names[call.id] = call.name
            arguments = call.arguments
            if wrapped and isinstance(arguments, str):
                arguments = {"arguments": arguments}
            function = {"name": call.name, "arguments": arguments}
            entry = {"id": _id(call.id, form), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(entry)
        if turn.role == TOOL and turn.call_id in names:
            message |= {"tool_call_id": _id(turn.call_id, form), "name": names[turn.call_id]}
        messages.append(message)
    return messages


def _id(call_id: str, form: ToolFormat | None) -> str:
    """Return `call_id` as the template takes it: Mistral's template takes only ids of its own length."""
    if form is None or form.id_prefix or (len(call_id) == form.id_chars and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[: form.id_chars]


# Speech.


@dataclass(frozen=True)
class ValidAudio:
    """Speech, and what to do with it.

    Attributes:
        pcm: Samples, as a task has them.
        language: Language of the speech; empty if the model detects it.
        translate: Whether to translate into English.
    """

    pcm: bytes
    language: str
    translate: bool


def audio_of(
    request: pb.GenerateRequest, catalog: Catalog, audio_max_s: float, violations: FieldViolations
) -> tuple[ValidAudio, str | None]:
    """Return the audio of `request` and its model, as `model_among` does; add what is wrong to `violations`."""
    audio, known = request.audio, ", ".join(catalog.hearing)
    pcm = _pcm(audio, violations)
    seconds = len(pcm) / BYTES_A_SECOND
    violations.check(
        seconds <= audio_max_s,
        "audio.data",
        f"has {seconds:.1f} s, the limit is {audio_max_s:g} s (gateway.audio_max_s): cut it",
    )
    violations.check(not request.raw_prompt, "raw_prompt", "needs prompt, not audio")
    violations.check(not request.tools, "tools", "need a prompt or a chat, not audio")
    constraint = request.sampling.WhichOneof("constraint")
    violations.check(
        constraint is None, f"sampling.{constraint}", "needs a prompt or a chat, not audio"
    )
    violations.check(
        audio.task in pb.AudioTask.values(), "audio.task", "must be transcribe or translate"
    )
    valid = ValidAudio(pcm, audio.language.lower(), audio.task == pb.AUDIO_TASK_TRANSLATE)
    remedy = f"name one that does: {known}" if known else "no model of this mesh does"
    wrong, none = f"{request.model} takes no audio; {remedy}", "no model of this mesh takes audio"
    model = model_among(catalog.hearing, request.model, catalog, violations, none, wrong)
    if model is not None:
        _check_speech(request, valid, model, catalog[model].speech, violations)
    return valid, model


def _pcm(audio: pb.AudioInput, violations: FieldViolations) -> bytes:
    pcm = audio.data
    if audio.format not in pb.AudioFormat.values():
        violations.add("audio.format", "must be wav or pcm")
        return b""
    if audio.format != pb.AUDIO_FORMAT_PCM:
        try:
            pcm = pcm_of_wav(pcm)
        except BadAudio as error:
            violations.add("audio.data", str(error))
            return b""
    elif len(pcm) % SAMPLE_BYTES:  # WAV files are cut to whole samples below
        violations.add("audio.data", "ends with half a sample; send 2 bytes for each")
    pcm = pcm[: len(pcm) // SAMPLE_BYTES * SAMPLE_BYTES]
    violations.check(bool(pcm), "audio.data", "has no samples")
    return pcm


def _check_speech(
    request: pb.GenerateRequest,
    audio: ValidAudio,
    model: str,
    speech: SpeechTokens | None,
    violations: FieldViolations,
) -> None:
    """Check that `model` knows the language and can do the task."""
    assert speech is not None, "it takes audio"
    known = ", ".join(sorted(speech.languages)) or "it has one alone: leave it out"
    violations.check(
        not audio.language or audio.language in speech.languages,
        "audio.language",
        f"{model} has no language of that name; known: {known}",
    )
    violations.check(
        not audio.translate or "translate" in speech.tasks,
        "audio.task",
        f"{model} does not translate",
    )
    violations.check(
        not request.audio.prompt or speech.previous is not None,
        "audio.prompt",
        f"{model} takes none: its tokenizer has no <|startofprev|>",
    )
