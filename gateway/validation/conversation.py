"""The input of a request: a prompt or a conversation, with the tools that the model sees.

Chat templates take it by the convention of transformers (https://huggingface.co/docs/transformers/chat_extras).
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from gateway.tools.formats import ToolFormat
from gateway.tools.tool import Tool, ToolCall, map_texts, texts_in
from gateway.validation.fields import FieldViolations
from gateway.validation.tools import VALUES_MAX, calls_of, has_room_for_calls
from sluice.v1 import inference_pb2
from sluice.v1.inference_pb2 import (
    ChatMessage,
    CountTokensRequest,
    GenerateRequest,
    ScoreRequest,
)

MESSAGES_MAX: Final = 2048
"""Every message costs inspection and tokenization, however short it is."""
SYSTEM: Final = "system"
USER: Final = "user"
ASSISTANT: Final = "assistant"
TOOL: Final = "tool"
_ROLES: Final[Mapping[int, str]] = {
    inference_pb2.ROLE_SYSTEM: SYSTEM,
    inference_pb2.ROLE_USER: USER,
    inference_pb2.ROLE_ASSISTANT: ASSISTANT,
    inference_pb2.ROLE_TOOL: TOOL,
}


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Conversation:
    """The input of a model: a chat, or a prompt as one user turn."""

    turns: tuple[Turn, ...]
    raw: bool
    """One turn, to be tokenized without the chat template."""
    tools: tuple[Tool, ...] = ()
    """Those that the model sees."""

    @property
    def texts(self) -> list[str]:
        """All text that callers wrote: of the turns in order, then inside the calls and tools."""
        texts = [turn.content for turn in self.turns]
        for turn in self.turns:
            for call in turn.calls:
                texts += texts_in(call.arguments)
        for tool in self.tools:
            texts += [tool.description, *texts_in(tool.parameters)]
        return texts

    def with_texts(self, texts: Sequence[str]) -> "Conversation":
        """The same with other `texts`."""
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
        return replace(self, turns=turns, tools=tools)

    @property
    def system_text(self) -> str:
        """The text of all system turns."""
        return "\n\n".join(turn.content for turn in self.turns if turn.role == SYSTEM)

    @property
    def user_text(self) -> str:
        """The text of all user turns."""
        return "\n".join(turn.content for turn in self.turns if turn.role == USER)


def conversation_of(
    request: GenerateRequest | CountTokensRequest | ScoreRequest, found: FieldViolations
) -> Conversation:
    """The input of ``request``, without its tools; what is wrong with it goes into ``found``."""
    kind = request.WhichOneof("input")
    if kind == "chat":
        found.check(not request.raw_prompt, "raw_prompt", "needs prompt, not chat")
        return _chat(request.chat.messages, found)
    if isinstance(request, GenerateRequest) and kind == "audio":
        return Conversation((Turn(USER, request.audio.prompt),), raw=True)
    if kind is None:
        found.add("input", "set prompt, chat or audio")
    else:
        found.check(bool(request.prompt.strip()), "prompt", "must not be empty")
    return Conversation((Turn(USER, request.prompt),), raw=request.raw_prompt)


def _chat(messages: Sequence[ChatMessage], found: FieldViolations) -> Conversation:
    if not 1 <= len(messages) <= MESSAGES_MAX:
        found.add("chat.messages", f"must have 1 to {MESSAGES_MAX} messages")
        return Conversation((), raw=False)
    if not has_room_for_calls(messages):
        found.add("chat.messages", f"their calls must have at most {VALUES_MAX} values in all")
        return Conversation((), raw=False)
    turns = tuple(
        _turn(message, f"chat.messages[{i}]", found) for i, message in enumerate(messages)
    )
    known: set[str] = set()
    for index, turn in enumerate(turns):
        _check_turn(index, turn, known, found)
        known.update(call.id for call in turn.calls)
    says = any(turn.content.strip() or turn.calls for turn in turns)
    found.check(says, "chat.messages", "have no text")
    return Conversation(_with_one_system(turns), raw=False)


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


def _turn(message: ChatMessage, at: str, found: FieldViolations) -> Turn:
    calls = calls_of(message, at, found) if message.tool_calls else ()
    return Turn(_ROLES.get(message.role, ""), message.content, calls, message.tool_call_id)


def _changed(call: ToolCall, texts: Iterator[str]) -> ToolCall:
    return replace(call, arguments=map_texts(call.arguments, lambda _: next(texts)))


def _check_turn(index: int, turn: Turn, known: set[str], found: FieldViolations) -> None:
    """``known``: the ids of earlier calls."""
    at = f"chat.messages[{index}]"
    found.check(turn.role != "", f"{at}.role", "must be system, user, assistant or tool")
    found.check(
        turn.role == ASSISTANT or not turn.calls, f"{at}.tool_calls", "only the assistant has calls"
    )
    answers = turn.call_id in known if turn.role == TOOL else not turn.call_id
    found.check(
        answers,
        f"{at}.tool_call_id",
        "must be the id of an earlier call where the role is tool, else empty",
    )


def function_of(tool: Tool) -> Mapping[str, Any]:
    """A tool as chat templates take it."""
    parameters = tool.parameters or {"type": "object", "properties": {}}
    described = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": described}


def messages_of(turns: Sequence[Turn], form: ToolFormat | None) -> list[Mapping[str, Any]]:
    """The turns as the chat template of a model takes them whose calls have ``form``."""
    names = {call.id: call.name for turn in turns for call in turn.calls}
    return [_message(turn, names, form) for turn in turns]


def _message(turn: Turn, names: Mapping[str, str], form: ToolFormat | None) -> Mapping[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.calls:
        message["tool_calls"] = [_call_message(call, form) for call in turn.calls]
    if turn.call_id:
        message |= {"tool_call_id": _id(turn.call_id, form), "name": names[turn.call_id]}
    return message


def _call_message(call: ToolCall, form: ToolFormat | None) -> Mapping[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": _id(call.id, form), "type": "function", "function": function}


def _id(call_id: str, form: ToolFormat | None) -> str:
    """``call_id`` as the template takes it: that of Mistral takes ids of its own length alone."""
    if form is None or form.id_prefix or (len(call_id) == form.id_chars and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[: form.id_chars]
