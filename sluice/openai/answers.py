"""Answers as OpenAI's objects: whole ones, and choices of the chunks of a stream."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sluice.openai.requests import CHAT, COMPLETIONS
from sluice.v1 import inference_pb2 as pb

Json = dict[str, Any]
_REPLACEMENT: Final = "\ufffd"
_FINISH: Final = {
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CONTENT_FILTER: "content_filter",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(frozen=True)
class Shape:
    """How the answers of one URL look.

    Attributes:
        prefix: of the ids.
        whole: "object" of a whole answer.
        chunk: "object" of a chunk.
        chats: whether its answers are messages; else they are texts.
    """

    prefix: str
    whole: str
    chunk: str
    chats: bool

    def message(
        self,
        text: str,
        logprobs: Sequence[pb.TokenLogprobs],
        calls: Sequence[pb.ToolCall] = (),
        reasoning: str = "",
    ) -> Json:
        """What a choice of a whole answer has beside index and finish_reason."""
        thought = {"reasoning_content": reasoning} if reasoning else {}
        if not self.chats:
            return self.delta(text, logprobs) | thought
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls_of(calls)}
        return {"message": message | thought, "logprobs": _chat_logprobs(logprobs)}

    def delta(
        self,
        text: str | None = None,
        logprobs: Sequence[pb.TokenLogprobs] = (),
        offset: int = 0,
        **said: Any,
    ) -> Json:
        """The same of a chunk with ``said`` beside text that begins ``offset`` characters into the answer."""
        if not self.chats:
            return {"text": text or "", **said, "logprobs": _text_logprobs(logprobs, offset)}
        content = {} if text is None else {"content": text}
        return {"delta": content | said, "logprobs": _chat_logprobs(logprobs)}


SHAPES: Final[Mapping[str, Shape]] = {
    CHAT: Shape("chatcmpl", "chat.completion", "chat.completion.chunk", chats=True),
    COMPLETIONS: Shape("cmpl", "text_completion", "text_completion", chats=False),
}
"""By URL."""


def choice(index: int, parts: Json, finish_reason: str | None) -> Json:
    """A choice; ``parts`` is of a `Shape`."""
    return {"index": index, **parts, "finish_reason": finish_reason}


def whole_answer(
    shape: Shape, request_id: str, created: int, model: str, choices: list[Json], usage: pb.Usage
) -> Json:
    """A whole answer; ``created`` in seconds since 1970."""
    return {
        "id": f"{shape.prefix}-{request_id}",
        "object": shape.whole,
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage_of(usage),
    }


def calls_of(calls: Sequence[pb.ToolCall], first: int | None = None) -> list[Json]:
    """The calls of an answer; in a stream the number of the ``first`` of them."""
    return [
        {
            **({} if first is None else {"index": first + at}),
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for at, call in enumerate(calls)
    ]


def finish_reason(reason: pb.FinishReason.ValueType) -> str:
    """OpenAI's word; stop strings are no reason of their own."""
    return _FINISH.get(reason, "stop")


def usage_of(usage: pb.Usage) -> Json:
    """The tokens used."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
    }


def _chat_logprobs(entries: Sequence[pb.TokenLogprobs]) -> Json | None:
    if not entries:
        return None
    content = [
        {
            **_token(entry.text, entry.logprob),
            "top_logprobs": [_token(one.text, one.logprob) for one in entry.top],
        }
        for entry in entries
        if entry.text
    ]
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float) -> Json:
    """A token that is no whole character has no bytes: its text does not tell them."""
    known = None if _REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": known}


def _text_logprobs(entries: Sequence[pb.TokenLogprobs], offset: int) -> Json | None:
    if not entries:
        return None
    entries, offsets = [entry for entry in entries if entry.text], []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.text)
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{one.text: one.logprob for one in entry.top} for entry in entries],
        "text_offset": offsets,
    }
