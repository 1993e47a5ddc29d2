"""The input of a request: a prompt, a conversation with calls of tools, or speech; and the tools that the model sees.

Chat templates take it by the convention of transformers (https://huggingface.co/docs/transformers/chat_extras).
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from google.protobuf.message import DecodeError, Message

from gateway.models.catalog import Catalog
from gateway.models.speech import (
    BYTES_A_SECOND,
    SAMPLE_BYTES,
    BadAudio,
    SpeechTokens,
    pcm_of_wav,
)
from gateway.models.tools import Tool, ToolCall, ToolFormat, ToolUse, map_texts, texts_in
from sluice.constraints import JSON_SCHEMA_MAX_BYTES
from sluice.defaults import AUTO
from sluice.errors import FieldViolation, InvalidRequest, UnknownModel
from sluice.internal.v1.gateway_pb2 import EarlierInput
from sluice.openai.fields import BadJson, load_json, values_in
from sluice.v1 import inference_pb2 as pb
from sluice.wire.enums import word_of
from sluice.wire.subjects import is_token

NAMED_MAX: Final = 16
"""An error travels in the trailers of a call, which have room for a few kilobytes."""
MESSAGES_MAX: Final = 2048
"""Every message costs inspection and tokenization, however short it is."""
SYSTEM: Final = "system"
USER: Final = "user"
ASSISTANT: Final = "assistant"
TOOL: Final = "tool"
TOOLS_MAX: Final = 128
TOOLS_BYTES_MAX: Final = 256 << 10
CALLS_MAX: Final = 2048
"""Calls of tools in a conversation. They are counted before any of them is looked at."""
VALUES_MAX: Final = 16_384
"""Values in the JSON of all tools, or of all calls, of a request: each string is inspected like a message."""
DEPTH_MAX: Final = 64
_OUTDATED: Final = (
    "comes from a client of an earlier release, which would not read the answer: "
    "generate its stubs again, or update the SDK; CHANGELOG.md says what changed in GenerateResponse"
)
_NAME_EDITED: Final = (
    "the safety policy removes a part of the name of a tool or call; "
    "choose a name that holds no such value"
)
CALL_ID_CHARS_MAX: Final = 512
"""Characters of the id of a call; some servers put a signature of their reasoning into it."""
CALL_NAME_CHARS_MAX: Final = 256
"""Characters of the name in a call of an earlier turn: models name tools that do not exist, too."""
_PLAIN_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{0,64}")
"""Ids that a model may see as they are. A hash stands for any other one: neither does the safety policy edit it, nor
does its text reach the prompt."""


class FieldViolations:
    """The wrong fields found so far; of many the first `NAMED_MAX` are named."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, field: str, description: str) -> None:
        """``field`` is wrong; ``description`` says what would be valid, and quotes no text of a prompt."""
        self._found.append(FieldViolation(field, description))

    def check(self, holds: bool, field: str, description: str) -> None:
        """Adds ``field`` unless ``holds``."""
        if not holds:
            self.add(field, description)

    def raise_if_any(self) -> None:
        """Raises one `InvalidRequest` with all of them."""
        if self._found:
            told, more = self._found[:NAMED_MAX], len(self._found) - NAMED_MAX
            message = "; ".join(f"{v.field}: {v.description}" for v in told)
            message += f"; and {more} more" if more > 0 else ""
            raise InvalidRequest(message, violations=told)


def named(model: str) -> str:
    """The model that a request names; empty: none, or "auto"."""
    return "" if model == AUTO else model


def model_among(
    known: Sequence[str],
    name: str,
    catalog: Catalog,
    found: FieldViolations,
    none: str,
    wrong: str,
    *,
    routed: bool = False,
) -> str | None:
    """The model ``name`` of the ``known`` ones, which can do what is asked; without a name the only one.

    Args:
        none: what is said where nothing is known; ``wrong``: where the named model is another one.
        routed: without a name it is None: the router chooses.

    Raises:
        UnknownModel: there is none, or, where nothing else is wrong, none of that name.
    """
    wanted = named(name)
    if wanted in known:
        return wanted
    names = ", ".join(known)
    if wanted in catalog.callable:
        found.add("model", wrong)
    elif not known:
        raise UnknownModel(none, metadata={"models": ""})
    elif wanted:
        message = f"no model {wanted[:64]!r}; there are {names}" + f', or "{AUTO}"' * routed
        if not found:
            raise UnknownModel(message, metadata={"models": names})
        found.add("model", message)
    elif not routed and len(known) == 1:
        return known[0]
    elif not routed:
        found.add("model", f"name one of {names}")
    return None


@dataclass
class Turn:
    """One message of a conversation.

    Attributes:
        calls: of tools, by the assistant.
        call_id: which call the turn of a tool answers.
    """

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""


@dataclass
class Conversation:
    """The input of a model: a chat, or a prompt as one user turn; and the texts that Embed, Rerank and Score are about.

    Attributes:
        raw: one turn, to be tokenized without the chat template.
        tools: those that the model sees.
        query: what the documents are ranked for.
        documents: texts that are embedded or ranked.
        answers: to the turns; each is scored.
        variables: of the chat template.
        token_ids: of the turn, as the caller sent them; its text is known once they are decoded. Empty: it sent text.
        answer_token_ids: the same of the answers.
        vocabulary: the model whose tokens those are.
    """

    turns: tuple[Turn, ...]
    raw: bool
    tools: tuple[Tool, ...] = ()
    query: str = ""
    documents: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    token_ids: tuple[int, ...] = ()
    answer_token_ids: tuple[tuple[int, ...], ...] = ()
    vocabulary: str = ""

    @cached_property
    def texts(self) -> list[str]:
        """All text that callers wrote: of the turns in order, inside the calls and tools, then all else.

        Names are one text, a line each, and so are ids.
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
        """The names of tools and calls, each once."""
        names = [*(tool.name for tool in self.tools), *(call.name for call in self._calls)]
        return "\n".join(dict.fromkeys(names))

    @cached_property
    def _ids(self) -> str:
        """The ids of calls, each once."""
        return "\n".join(dict.fromkeys(call.id for call in self._calls))

    def with_texts(self, texts: Sequence[str]) -> "Conversation":
        """Return the same with other `texts`; where one of the ids would change, others stand for all of them.

        Raises:
            InvalidRequest: a name would change, by which tools and calls refer to one another.
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
        if self._ids and next(left) != self._ids:
            turns = tuple(map(_withopaque_ids, turns))
        return replace(
            self,
            turns=turns,
            tools=tools,
            query=next(left) if self.query else "",
            documents=tuple([next(left) for _ in self.documents]),
            answers=(answers := tuple(left)),
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
        """How many tokens the caller sent."""
        return len(self.token_ids) + sum(map(len, self.answer_token_ids))

    @property
    def system_text(self) -> str:
        """The text of all system turns."""
        return "\n\n".join([turn.content for turn in self.turns if turn.role == SYSTEM])

    @property
    def user_text(self) -> str:
        """The text of all user turns, of the query and of the documents."""
        said = [turn.content for turn in self.turns if turn.role == USER]
        return "\n".join([*said, *([self.query] if self.query else ()), *self.documents])

    @property
    def last_user_text(self) -> str | None:
        """The text of the last user turn; None without one."""
        return next((turn.content for turn in reversed(self.turns) if turn.role == USER), None)


def conversation_of(
    request: pb.GenerateRequest | pb.CountTokensRequest | pb.ScoreRequest, found: FieldViolations
) -> Conversation:
    """The input of ``request``, without its tools; what is wrong with it goes into ``found``."""
    kind = request.WhichOneof("input")
    if kind == "chat":
        found.check(not request.raw_prompt, "raw_prompt", "needs prompt, not chat")
        return _chat(request.chat.messages, found)
    if isinstance(request, pb.GenerateRequest) and kind == "audio":
        return Conversation((Turn(USER, request.audio.prompt),), raw=True)
    if isinstance(request, pb.GenerateRequest) and kind == "tokens":
        token_ids = tuple(request.tokens.token_ids)
        found.check(bool(token_ids), "tokens.token_ids", "is empty; send at least one token")
        check_vocabulary(request.model, found)
        turn = Turn(USER, "")
        return Conversation((turn,), raw=True, token_ids=token_ids, vocabulary=request.model)
    if kind is None:
        found.add("input", _OUTDATED if is_outdated(request) else "set prompt, chat or audio")
    else:
        found.check(bool(request.prompt.strip()), "prompt", "must not be empty")
    return Conversation((Turn(USER, request.prompt),), raw=request.raw_prompt)


def check_vocabulary(model: str, found: FieldViolations) -> None:
    """Add to ``found`` that ``model`` must be named, where it is not."""
    found.check(bool(named(model)), "model", "is not named; name the model whose tokens these are")


def is_outdated(request: Message) -> bool:
    """Return whether an input stands where clients put it that read one event a message: they would lose the others.

    The request is parsed as `EarlierInput`: a list of its unknown fields has an object for each, and 1 MiB has hundreds
    of thousands.
    """
    earlier, known = EarlierInput(), request.DESCRIPTOR.fields_by_number
    try:
        earlier.MergeFromString(request.SerializeToString())
    except DecodeError:
        return False
    return any(given.number not in known for given, _ in earlier.ListFields())


def _chat(messages: Sequence[pb.ChatMessage], found: FieldViolations) -> Conversation:
    values = (values_in(call.arguments) for message in messages for call in message.tool_calls)
    if not 1 <= len(messages) <= MESSAGES_MAX:
        found.add("chat.messages", f"must have 1 to {MESSAGES_MAX} messages")
    elif sum(len(message.tool_calls) for message in messages) > CALLS_MAX:
        found.add("chat.messages", f"must have at most {CALLS_MAX} tool_calls in all")
    elif sum(values) > VALUES_MAX:
        found.add("chat.messages", f"their calls must have at most {VALUES_MAX} values in all")
    else:
        turns, known = list[Turn](), set[str]()
        for index, message in enumerate(messages):
            turns.append(_turn(message, f"chat.messages[{index}]", known, found))
            known.update(call.id for call in turns[-1].calls)
        says = any(turn.content.strip() or turn.calls for turn in turns)
        found.check(says, "chat.messages", "have no text")
        return Conversation(_with_one_system(turns), raw=False)
    return Conversation((), raw=False)


def _with_one_system(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """System turns that follow one another become one: most chat templates take no second one."""
    joined: list[Turn] = []
    for turn in turns:
        if turn.role == SYSTEM and joined and joined[-1].role == SYSTEM:
            texts = filter(None, (joined.pop().content, turn.content))
            joined.append(Turn(SYSTEM, "\n\n".join(texts)))
        else:
            joined.append(turn)
    return tuple(joined)


def _turn(message: pb.ChatMessage, at: str, known: set[str], found: FieldViolations) -> Turn:
    """``known``: the ids of earlier calls."""
    calls = [
        _call(call, f"{at}.tool_calls[{i}]", found) for i, call in enumerate(message.tool_calls)
    ]
    role, call_id = word_of(pb.Role, message.role), _call_id(message.tool_call_id)
    known_role = role in (SYSTEM, USER, ASSISTANT, TOOL)
    found.check(known_role, f"{at}.role", "must be system, user, assistant or tool")
    found.check(role == ASSISTANT or not calls, f"{at}.tool_calls", "only the assistant has calls")
    found.check(
        call_id in known if role == TOOL else not call_id,
        f"{at}.tool_call_id",
        "must be the id of an earlier call where the role is tool, else empty",
    )
    return Turn(role, message.content, tuple(calls), call_id)


def _withopaque_ids(turn: Turn) -> Turn:
    calls = tuple(replace(call, id=opaque_id(call.id)) for call in turn.calls)
    return replace(turn, calls=calls, call_id=turn.call_id and opaque_id(turn.call_id))


def _changed(call: ToolCall, texts: Iterator[str]) -> ToolCall:
    return replace(call, arguments=map_texts(call.arguments, lambda _: next(texts)))


def _call(call: pb.ToolCall, at: str, found: FieldViolations) -> ToolCall:
    found.check(
        len(call.id) <= CALL_ID_CHARS_MAX and call.id.isprintable(),
        f"{at}.id",
        f"must have at most {CALL_ID_CHARS_MAX} printable characters",
    )
    found.check(
        1 <= len(call.name) <= CALL_NAME_CHARS_MAX and call.name.isprintable(),
        f"{at}.name",
        f"must have 1 to {CALL_NAME_CHARS_MAX} printable characters",
    )
    return ToolCall(_call_id(call.id), call.name, _arguments(call.arguments))


def _call_id(given: str) -> str:
    """Return the id of a call as a model sees it."""
    return given if _PLAIN_ID.fullmatch(given) else opaque_id(given)


def opaque_id(call_id: str) -> str:
    """Return an id that stands for ``call_id``, with nothing of its text."""
    return "call_" + hashlib.sha256(call_id.encode()).hexdigest()[:24]


def _arguments(text: str) -> Mapping[str, Any] | str:
    """Return the object in ``text``, or ``text`` where it is none, or deeper than `DEPTH_MAX`."""
    try:
        value = load_json(text or "null", strict=False)
    except BadJson:
        return text
    if value is None:  # a call without arguments
        return {}
    return value if isinstance(value, dict) and _fits(value, DEPTH_MAX) else text


def tools_of(tools: Sequence[pb.Tool], found: FieldViolations) -> tuple[Tool, ...]:
    """The tools; what is wrong with them goes into ``found``."""
    sizes = (len(tool.description) + len(tool.parameters) for tool in tools)
    if len(tools) > TOOLS_MAX or sum(sizes) > TOOLS_BYTES_MAX:
        found.add("tools", f"must be at most {TOOLS_MAX} tools with {TOOLS_BYTES_MAX} characters")
        return ()
    values = [values_in(tool.parameters) for tool in tools]
    if sum(values) > VALUES_MAX:
        field = f"tools[{values.index(max(values))}].parameters"
        found.add(field, f"all parameters together must have at most {VALUES_MAX} values")
        return ()
    names = [tool.name for tool in tools]
    found.check(len(set(names)) == len(names), "tools", "have the same name twice")
    return tuple(_tool(tool, f"tools[{i}]", found) for i, tool in enumerate(tools))


def tool_use_of(request: pb.GenerateRequest, found: FieldViolations) -> ToolUse | None:
    """What the answer may call; None without tools."""
    choice = request.tool_choice
    if not request.tools:
        wants = choice.function or choice.mode == pb.TOOL_CHOICE_MODE_REQUIRED
        found.check(not wants, "tool_choice", "needs tools")
        found.check(
            not request.HasField("parallel_tool_calls"), "parallel_tool_calls", "needs tools"
        )
        return None
    tools = tools_of(request.tools, found)
    found.check(
        choice.mode in pb.ToolChoiceMode.values(), "tool_choice.mode", "is none of the known ones"
    )
    found.check(
        choice.function in ("", *(tool.name for tool in tools)),
        "tool_choice.function",
        "is the name of none of the tools",
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
    _check_together(request, use, found)
    return use


def _check_together(request: pb.GenerateRequest, use: ToolUse, found: FieldViolations) -> None:
    sampling = request.sampling
    raw = request.raw_prompt or request.WhichOneof("input") == "tokens"
    found.check(not raw, "tools", "need the chat template, and no raw prompt")
    constraint = sampling.WhichOneof("constraint")
    found.check(constraint != "regex", "sampling.regex", "cannot be combined with tools")
    for name in ("min_tokens", "stop_token_ids"):
        found.check(
            not (use.constrained and getattr(sampling, name)),
            f"sampling.{name}",
            "cannot be combined with strict tools or a demanded call, which determine where the answer ends",
        )


def _tool(tool: pb.Tool, at: str, found: FieldViolations) -> Tool:
    found.check(
        is_token(tool.name),
        f"{at}.name",
        "must be 1 to 64 letters, digits, '_' and '-'",
    )
    field, parameters = f"{at}.parameters", {}
    if len(tool.parameters.encode()) > JSON_SCHEMA_MAX_BYTES:
        found.add(field, f"must have at most {JSON_SCHEMA_MAX_BYTES} bytes")
    elif tool.parameters:
        parameters = _object(tool.parameters, field, found)
        found.check(
            parameters.get("type", "object") == "object",
            field,
            'must be a schema of "type": "object"',
        )
    return Tool(tool.name, tool.description, parameters, tool.strict)


def _object(text: str, field: str, found: FieldViolations) -> dict[str, Any]:
    """The JSON object in ``text``; empty when it is none."""
    try:
        value = load_json(text)
    except BadJson:
        value = None
    if not isinstance(value, dict):
        found.add(field, "must be a JSON object")
        return {}
    if not _fits(value, DEPTH_MAX):
        found.add(field, f"must be at most {DEPTH_MAX} levels deep")
        return {}
    return value


def _fits(value: Any, levels: int) -> bool:
    """Whether ``value`` has no more than so many levels."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_fits(one, levels - 1) for one in inner)


def function_of(tool: Tool, *, says_strict: bool = False) -> Mapping[str, Any]:
    """Return a tool as chat templates take it; ``says_strict``: with ``strict`` where it is, for a server."""
    parameters = tool.parameters or {"type": "object", "properties": {}}
    described: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": parameters,
    }
    if says_strict and tool.strict:
        described["strict"] = True
    return {"type": "function", "function": described}


def messages_of(
    turns: Sequence[Turn], form: ToolFormat | None, *, wrapped: bool = False
) -> list[Mapping[str, Any]]:
    """Return the turns as the chat template of a model takes them whose calls have ``form``.

    ``wrapped``: arguments that are no object are put into one, for templates that take nothing else.
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
            made = {"id": _id(call.id, form), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(made)
        if turn.role == TOOL and turn.call_id in names:
            message |= {"tool_call_id": _id(turn.call_id, form), "name": names[turn.call_id]}
        messages.append(message)
    return messages


def _id(call_id: str, form: ToolFormat | None) -> str:
    """``call_id`` as the template takes it: that of Mistral takes ids of its own length alone."""
    if form is None or form.id_prefix or (len(call_id) == form.id_chars and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[: form.id_chars]


# Speech, and what is asked with it.


@dataclass(frozen=True)
class ValidAudio:
    """Speech, and what to do with it.

    Attributes:
        pcm: the samples, as a task has them.
        language: empty: the model finds it.
    """

    pcm: bytes
    language: str
    translate: bool


def audio_of(
    request: pb.GenerateRequest, catalog: Catalog, audio_max_s: float, found: FieldViolations
) -> tuple[ValidAudio, str | None]:
    """The audio of ``request``, and the model that gets it: the named one, else the only one; as `model_among`.

    What is wrong goes into ``found``.
    """
    audio, known = request.audio, ", ".join(catalog.hearing)
    pcm = _pcm(audio, found)
    seconds = len(pcm) / BYTES_A_SECOND
    found.check(
        seconds <= audio_max_s,
        "audio.data",
        f"has {seconds:.1f} s, the limit is {audio_max_s:g} s (gateway.audio_max_s): cut it",
    )
    found.check(not request.raw_prompt, "raw_prompt", "needs prompt, not audio")
    found.check(not request.tools, "tools", "need a prompt or a chat, not audio")
    constraint = request.sampling.WhichOneof("constraint")
    found.check(constraint is None, f"sampling.{constraint}", "needs a prompt or a chat, not audio")
    found.check(audio.task in pb.AudioTask.values(), "audio.task", "is none of the known tasks")
    valid = ValidAudio(pcm, audio.language.lower(), audio.task == pb.AUDIO_TASK_TRANSLATE)
    takes = f"name one that does: {known}" if known else "no model of this mesh does"
    wrong, none = f"{request.model} takes no audio; {takes}", "no model of this mesh takes audio"
    model = model_among(catalog.hearing, request.model, catalog, found, none, wrong)
    if model is not None:
        _check_speech(request, valid, model, catalog[model].speech, found)
    return valid, model


def _pcm(audio: pb.AudioInput, found: FieldViolations) -> bytes:
    pcm = audio.data
    if audio.format not in pb.AudioFormat.values():
        found.add("audio.format", "is none of the known formats")
        return b""
    if audio.format != pb.AUDIO_FORMAT_PCM:
        try:
            pcm = pcm_of_wav(pcm)
        except BadAudio as error:
            found.add("audio.data", str(error))
            return b""
    elif len(pcm) % SAMPLE_BYTES:
        found.add("audio.data", "has half a sample: samples have 2 bytes")
    pcm = pcm[: len(pcm) // SAMPLE_BYTES * SAMPLE_BYTES]
    found.check(bool(pcm), "audio.data", "has no samples")
    return pcm


def _check_speech(
    request: pb.GenerateRequest,
    audio: ValidAudio,
    model: str,
    speech: SpeechTokens | None,
    found: FieldViolations,
) -> None:
    """What ``model`` must know."""
    assert speech is not None, "it takes audio"
    known = ", ".join(sorted(speech.languages)) or "it has one alone: leave it out"
    found.check(
        not audio.language or audio.language in speech.languages,
        "audio.language",
        f"{model} has no language of that name; known: {known}",
    )
    found.check(
        not audio.translate or "translate" in speech.tasks,
        "audio.task",
        f"{model} does not translate",
    )
    found.check(
        not request.audio.prompt or speech.previous is not None,
        "audio.prompt",
        f"{model} takes none: its tokenizer has no <|startofprev|>",
    )
