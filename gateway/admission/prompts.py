"""A conversation becomes the tokens of a prompt."""

import asyncio
from typing import Final

from gateway.models.catalog import ServedModel
from gateway.models.template import TemplateRefused
from gateway.validation.conversation import Conversation
from sluice.errors import InvalidRequest

# Longer texts take more than a few milliseconds; tokenizers lets other threads run meanwhile.
_THREAD_CHARS: Final = 8192


async def encode(conversation: Conversation, model: ServedModel) -> list[int]:
    """The prompt's tokens; long ones are made beside the loop.

    Raises:
        InvalidRequest: the model's chat template does not take the conversation, or there is none.
    """
    if sum(len(turn.content) for turn in conversation.turns) > _THREAD_CHARS:
        return await asyncio.to_thread(encode_now, conversation, model)
    return encode_now(conversation, model)


def encode_now(conversation: Conversation, model: ServedModel) -> list[int]:
    """The prompt's tokens, made at once; raises as `encode`."""
    tokenization = model.tokenization
    if conversation.raw or (tokenization.template is None and len(conversation.turns) == 1):
        return tokenization.encode_text(conversation.turns[0].content)
    if tokenization.template is None:
        raise InvalidRequest.of("chat", f"{model.name} has no chat template; use prompt")
    messages = [{"role": turn.role, "content": turn.content} for turn in conversation.turns]
    try:
        return tokenization.encode_chat(messages)
    except TemplateRefused as refused:
        raise InvalidRequest.of(
            "chat.messages", f"the chat template of {model.name} refuses them: {refused}"
        ) from refused
