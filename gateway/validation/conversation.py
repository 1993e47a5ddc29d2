"""The input of a request: a prompt or a conversation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.validation.violations import FieldViolations
from sluice.v1 import inference_pb2
from sluice.v1.inference_pb2 import ChatMessage, CountTokensRequest, GenerateRequest

MESSAGES_MAX: Final = 2048
"""Every message costs inspection and tokenization, however short it is."""
SYSTEM: Final = "system"
USER: Final = "user"
ASSISTANT: Final = "assistant"
_ROLES: Final[Mapping[int, str]] = {
    inference_pb2.ROLE_SYSTEM: SYSTEM,
    inference_pb2.ROLE_USER: USER,
    inference_pb2.ROLE_ASSISTANT: ASSISTANT,
}


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """The input of a model: a chat, or a prompt as one user turn."""

    turns: tuple[Turn, ...]
    raw: bool
    """One turn, to be tokenized without the chat template."""

    @property
    def system_text(self) -> str:
        """The system message; empty without one."""
        first = self.turns[0]
        return first.content if first.role == SYSTEM else ""

    @property
    def user_text(self) -> str:
        """The text of all user turns."""
        return "\n".join(turn.content for turn in self.turns if turn.role == USER)


def conversation_of(
    request: GenerateRequest | CountTokensRequest, found: FieldViolations
) -> Conversation:
    """The input of ``request``; what is wrong with it goes into ``found``."""
    kind = request.WhichOneof("input")
    if kind == "chat":
        found.check(not request.raw_prompt, "raw_prompt", "needs prompt, not chat")
        return _chat(request.chat.messages, found)
    if kind is None:
        found.add("input", "set prompt or chat")
    else:
        found.check(bool(request.prompt.strip()), "prompt", "must not be empty")
    return Conversation((Turn(USER, request.prompt),), raw=request.raw_prompt)


def _chat(messages: Sequence[ChatMessage], found: FieldViolations) -> Conversation:
    if not 1 <= len(messages) <= MESSAGES_MAX:
        found.add("chat.messages", f"must have 1 to {MESSAGES_MAX} messages")
        return Conversation((), raw=False)
    turns = tuple(Turn(_ROLES.get(message.role, ""), message.content) for message in messages)
    for index, turn in enumerate(turns):
        _check_turn(index, turn, found)
    found.check(turns[-1].role == USER, "chat.messages", "the last message must be of ROLE_USER")
    return Conversation(turns, raw=False)


def _check_turn(index: int, turn: Turn, found: FieldViolations) -> None:
    at = f"chat.messages[{index}]"
    found.check(turn.role != "", f"{at}.role", "must be ROLE_SYSTEM, ROLE_USER or ROLE_ASSISTANT")
    found.check(turn.role != SYSTEM or index == 0, f"{at}.role", "ROLE_SYSTEM may only come first")
    found.check(bool(turn.content.strip()), f"{at}.content", "must not be empty")
