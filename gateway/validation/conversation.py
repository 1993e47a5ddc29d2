"""Validate the input of a request: a prompt, tokens, or a conversation with tool calls.

`messages_of` turns it into what chat templates take, by the convention of transformers
(https://huggingface.co/docs/transformers/chat_extras). Tools and speech have modules of their own.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from gateway.models.catalog import Catalog
from gateway.models.tools import FunctionTool, ToolCall, ToolFormat, map_texts
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

    def check_count(self, field: str, count: int, most: int, unit: str, least: int = 0) -> bool:
        """Return whether `count` is in range; add a wrong field if it is not."""
        holds = least <= count <= most
        span = f"{least} to {most}" if least else f"at most {most}"
        self.check(holds, field, f"must have {span} {unit}")
        return holds

    def raise_any(self) -> None:
        """Raise InvalidRequest with the first `NAMED_MAX` violations, if there are some."""
        if self:
            named, more = self[:NAMED_MAX], len(self) - NAMED_MAX
            message = "; ".join(f"{wrong.field}: {wrong.description}" for wrong in named)
            message += f"; and {more} more" * (more > 0)
            raise InvalidRequest(message, violations=named)


def model_among(
    known_models: Sequence[str],
    name: str,
    catalog: Catalog,
    violations: FieldViolations,
    none: str,
    wrong: str,
    *,
    routed: bool = False,
) -> str | None:
    """Return the requested model if it is one of `known_models`; without a name the only one.

    Args:
        known_models: Models that can do what the request asks for.
        name: Model of the request.
        catalog: All models.
        violations: Receives what is wrong.
        none: Error for no known model.
        wrong: Error for a model that exists, but is not one of the known.
        routed: Whether the router chooses for a request without a name; the result is then None.

    Raises:
        UnknownModel: There is no known model, or the name is unknown and nothing else is wrong.
    """
    model = "" if name == AUTO else name
    if model in known_models:
        return model
    names = ", ".join(known_models)
    if model in catalog.callable:
        violations.add("model", wrong)
    elif not known_models:
        raise UnknownModel(none, metadata={"models": ""})
    elif model:
        message = f"no model {model[:64]!r}; there are {names}" + f', or "{AUTO}"' * routed
        if not violations:
            raise UnknownModel(message, metadata={"models": names})
        violations.add("model", message)
    elif not routed and len(known_models) == 1:
        return known_models[0]
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
        if not self.tools and not any(turn.calls for turn in self.turns):
            first = [turn.content for turn in self.turns]
            return [*first, *filter(None, [self.query]), *self.documents, *self.answers]
        texts = list[str]()

        def note(text: str) -> str:
            texts.append(text)
            return text

        self._map(note)
        return texts

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
        return self._map(lambda _: next(left))

    def _map(self, change: Callable[[str], str]) -> "Conversation":
        """Return a copy with changed texts, each passed to `change` in the order of `texts`."""
        contents = [change(turn.content) for turn in self.turns]
        turns = tuple(
            replace(turn, content=content, calls=tuple(_changed(turn.calls, change)))
            for turn, content in zip(self.turns, contents, strict=True)
        )
        tools = tuple(
            replace(
                tool,
                description=change(tool.description),
                parameters=map_texts(tool.parameters, change),
            )
            for tool in self.tools
        )
        if self._names and change(self._names) != self._names:
            raise InvalidRequest.of("tools" if self.tools else "chat.messages", _NAME_EDITED)
        # One changed id may have merged with another, so all are replaced.
        if self._ids and change(self._ids) != self._ids:
            turns = tuple(map(_with_opaque_ids, turns))
        query = change(self.query) if self.query else ""
        documents = tuple([change(text) for text in self.documents])
        answers = tuple([change(text) for text in self.answers])
        # Tokens that the caller sent are only valid for unchanged text.
        answer_edits = zip(self.answer_token_ids, answers, self.answers, strict=False)
        return replace(
            self,
            turns=turns,
            tools=tools,
            query=query,
            documents=documents,
            answers=answers,
            token_ids=self.token_ids if turns == self.turns else (),
            answer_token_ids=tuple(ids if new == old else () for ids, new, old in answer_edits),
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
    kind, check = request.WhichOneof("input"), violations.check
    if kind == "chat":
        check(not request.raw_prompt, "raw_prompt", "needs prompt, not chat")
        return _chat(request.chat.messages, violations)
    if isinstance(request, pb.GenerateRequest) and kind == "audio":
        return Conversation((Turn(USER, request.audio.prompt),), raw=True)
    if isinstance(request, pb.GenerateRequest) and kind == "tokens":
        ids = tuple(request.tokens.token_ids)
        check(bool(ids), "tokens.token_ids", "is empty; send at least one token")
        check_vocabulary(request.model, violations)
        return Conversation((Turn(USER, ""),), raw=True, token_ids=ids, vocabulary=request.model)
    check(kind is not None, "input", "set prompt, tokens, chat or audio")
    check(kind is None or bool(request.prompt.strip()), "prompt", "must not be empty")
    return Conversation((Turn(USER, request.prompt),), raw=request.raw_prompt)


def check_vocabulary(model: str, violations: FieldViolations) -> None:
    """Add a violation unless the request names the model of its tokens."""
    is_named = model not in ("", AUTO)
    violations.check(is_named, "model", "is required with token ids; name their model")


def _chat(messages: Sequence[pb.ChatMessage], violations: FieldViolations) -> Conversation:
    field, calls = "chat.messages", [call for message in messages for call in message.tool_calls]
    # Counted before any is read.
    if not (
        violations.check_count(field, len(messages), MESSAGES_MAX, "messages", least=1)
        and violations.check_count(field, len(calls), CALLS_MAX, "tool_calls in all")
        and violations.check_count(
            field,
            sum(values_in(call.arguments) for call in calls),
            VALUES_MAX,
            "values in all calls",
        )
    ):
        return Conversation((), raw=False)
    turns, call_ids = list[Turn](), set[str]()
    for index, message in enumerate(messages):
        turns.append(_turn(message, f"{field}[{index}]", call_ids, violations))
        call_ids.update(call.id for call in turns[-1].calls)
    has_text = any(turn.content.strip() or turn.calls for turn in turns)
    violations.check(has_text, field, "have no text")
    return Conversation(_with_one_system(turns), raw=False)


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
    check, calls = violations.check, list[ToolCall]()
    for i, call in enumerate(message.tool_calls):
        calls.append(_call(call, f"{path}.tool_calls[{i}]", violations))
    role, call_id = word_of(pb.Role, message.role), _call_id(message.tool_call_id)
    is_known = role in (SYSTEM, USER, ASSISTANT, TOOL)
    check(is_known, f"{path}.role", "must be system, user, assistant or tool")
    check(role == ASSISTANT or not calls, f"{path}.tool_calls", "only the assistant has calls")
    is_answer = call_id in call_ids if role == TOOL else not call_id
    problem = "must be the id of an earlier call where the role is tool, else empty"
    check(is_answer, f"{path}.tool_call_id", problem)
    return Turn(role, message.content, tuple(calls), call_id)


def _with_opaque_ids(turn: Turn) -> Turn:
    calls = tuple(replace(call, id=opaque_id(call.id)) for call in turn.calls)
    return replace(turn, calls=calls, call_id=turn.call_id and opaque_id(turn.call_id))


def _changed(calls: Sequence[ToolCall], change: Callable[[str], str]) -> Iterator[ToolCall]:
    return (replace(call, arguments=map_texts(call.arguments, change)) for call in calls)


def _call(call: pb.ToolCall, path: str, violations: FieldViolations) -> ToolCall:
    for place, text, least, most in (
        (f"{path}.id", call.id, 0, CALL_ID_CHARS_MAX),
        (f"{path}.name", call.name, 1, CALL_NAME_CHARS_MAX),
    ):
        # Text that cannot be printed counts as too much.
        count = len(text) if text.isprintable() else most + 1
        violations.check_count(place, count, most, "printable characters", least)
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
