"""Answers as OpenAI's objects: whole ones, and choices of the chunks of a stream."""

from collections.abc import Iterable, Mapping, Sequence
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
        return {"message": message | thought, "logprobs": chat_logprobs(logprobs)}

    def delta(
        self,
        text: str | None = None,
        logprobs: Sequence[pb.TokenLogprobs] = (),
        offset: int = 0,
        **said: Any,
    ) -> Json:
        """The same of a chunk with ``said`` beside text that begins ``offset`` characters into the answer."""
        if not self.chats:
            listed = list(filter(in_text, logprobs))
            logged = text_logprobs(listed, text or "", offset) if logprobs else None
            return {"text": text or "", **said, "logprobs": logged}
        content = {} if text is None else {"content": text}
        return {"delta": content | said, "logprobs": chat_logprobs(logprobs)}


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


def chat_logprobs(entries: Sequence[pb.TokenLogprobs]) -> Json | None:
    """Return the log-probabilities of a message, of the tokens in its text; None: none were asked for."""
    if not entries:
        return None
    content = [
        {**_token(entry), "top_logprobs": [_token(one) for one in entry.top]}
        for entry in entries
        if in_text(entry)
    ]
    return {"content": content, "refusal": None}


def in_text(entry: pb.TokenLogprobs) -> bool:
    """Return whether a token adds to the text: other tokens have no log-probabilities in OpenAI's API."""
    return bool(entry.text or entry.token_bytes)


def _token(entry: pb.TokenLogprobs | pb.TokenLogprob) -> Json:
    """Return a token with its bytes, which somebody else's server may not tell."""
    known = list(entry.token_bytes) if entry.token_bytes or not entry.text else None
    return {"token": entry.text, "logprob": entry.logprob, "bytes": known}


def text_logprobs(
    entries: Sequence[pb.TokenLogprobs], text: str, offset: int, unscored: int = 0
) -> Json:
    """Return the log-probabilities of ``text``, which begins ``offset`` characters into a completion.

    The first ``unscored`` of them are not known.
    """
    offsets, at = [], 0
    for entry in entries:
        # The safety policy may have put other text in the place of a token before it.
        at = max(at, text.find(entry.text, at))
        offsets.append(offset + at)
        at += len(entry.text)
    known = entries[unscored:]
    unknown = [None] * unscored
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [*unknown, *(entry.logprob for entry in known)],
        "top_logprobs": [*unknown, *(_by_text(entry.top) for entry in known)],
        "text_offset": offsets,
    }


def joined(*parts: Json | None) -> Json | None:
    """Return the log-probabilities of a text from those of its parts; None: of none are there any."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    return {name: [value for part in found for value in part[name]] for name in found[0]}


def _by_text(top: Iterable[pb.TokenLogprob]) -> dict[str, float]:
    """Return log-probabilities by token: of one that is no whole character by its bytes, as OpenAI writes them."""
    found: dict[str, float] = {}
    for one in top:
        name = one.text
        if _REPLACEMENT in name and one.token_bytes:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.token_bytes)
        found[f"token_id:{one.token_id}" if name in found else name] = one.logprob
    return found
