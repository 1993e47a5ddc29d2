"""Validate the input of a request: a prompt, tokens, or a conversation with tool calls.

`messages_of` turns it into what chat templates take, by the convention of transformers
(https://huggingface.co/docs/transformers/chat_extras). Tools and speech have modules of their own.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from gateway.models.catalog import Catalog
from gateway.models.tools import FunctionTool, ToolCall, ToolFormat, map_texts, texts_in
from sluice.defaults import AUTO
from sluice.errors import FieldViolation, InvalidRequest, UnknownModel
from sluice.openai.fields import BadJson, load_json, values_in
from sluice.v1 import inference_pb2 as pb
from sluice.wire.enums import word_of

NAMED_MAX: Final = 16
"""Most wrong fields that an error names: it is sent in the trailers of a call, which hold a few kilobytes."""
MESSAGES_MAX: Final = 2048
"""Most messages of a conversation; each costs inspection and tokenization, however short it is."""
SYSTEM: Final = "system"
USER: Final = "user"
ASSISTANT: Final = "assistant"
TOOL: Final = "tool"
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


class FieldViolations(list[FieldViolation]):
    """The wrong fields of a request; an error names the first `NAMED_MAX`."""

    def add(self, field: str, description: str) -> None:
        """Add a wrong field; `description` says what would be valid, and must not quote a prompt."""
        self.append(FieldViolation(field, description))

    def check(self, holds: bool, field: str, description: str) -> None:
        """Add a wrong field unless `holds`."""
        if not holds:
            self.add(field, description)

    def error(self) -> InvalidRequest:
        """Return one error with all violations."""
        named, more = self[:NAMED_MAX], len(self) - NAMED_MAX
        message = "; ".join(f"{wrong.field}: {wrong.description}" for wrong in named)
        return InvalidRequest(message + f"; and {more} more" * (more > 0), violations=named)


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
    wanted = "" if name == AUTO else name
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
    violations.check(
        model not in ("", AUTO), "model", "is required with token ids; name their model"
    )


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
    return value if isinstance(value, dict) and fits_depth(value, DEPTH_MAX) else text


def fits_depth(value: Any, levels: int) -> bool:
    """Return whether the JSON `value` is at most `levels` deep."""
    if isinstance(value, dict):
        value = list(value.values())
    inner = value if isinstance(value, list) else ()
    return levels > 0 and all(fits_depth(entry, levels - 1) for entry in inner)


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
