"""Build OpenAI's objects from answers: whole answers, and the choices in chunks of a stream."""

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
    """The form of the answers of one URL.

    Attributes:
        prefix: Prefix of the ids.
        whole: "object" of a whole answer.
        chunk: "object" of a chunk.
        chats: Whether answers are messages; else they are texts.
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
        """Return the fields of a whole choice beside index and finish_reason."""
        extra = {"reasoning_content": reasoning} if reasoning else {}
        if not self.chats:
            return self.delta(text, logprobs) | extra
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls_of(calls)}
        return {"message": message | extra, "logprobs": chat_logprobs(logprobs)}

    def delta(
        self,
        text: str | None = None,
        logprobs: Sequence[pb.TokenLogprobs] = (),
        offset: int = 0,
        **fields: Any,
    ) -> Json:
        """Return the fields of a choice in a chunk; its text begins `offset` characters into the answer."""
        if not self.chats:
            entries = list(filter(in_text, logprobs))
            logged = text_logprobs(entries, text or "", offset) if logprobs else None
            return {"text": text or "", **fields, "logprobs": logged}
        content = {} if text is None else {"content": text}
        return {"delta": content | fields, "logprobs": chat_logprobs(logprobs)}


SHAPES: Final[Mapping[str, Shape]] = {
    CHAT: Shape("chatcmpl", "chat.completion", "chat.completion.chunk", chats=True),
    COMPLETIONS: Shape("cmpl", "text_completion", "text_completion", chats=False),
}
"""Forms by URL."""


def choice(index: int, parts: Json, finish_reason: str | None) -> Json:
    """Return a choice with the fields of a `Shape`."""
    return {"index": index, **parts, "finish_reason": finish_reason}


def whole_answer(
    shape: Shape, request_id: str, created: int, model: str, choices: list[Json], usage: pb.Usage
) -> Json:
    """Return a whole answer; `created` is in seconds since the Unix epoch."""
    return {
        "id": f"{shape.prefix}-{request_id}",
        "object": shape.whole,
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage_of(usage),
    }


def calls_of(calls: Sequence[pb.ToolCall], first: int | None = None) -> list[Json]:
    """Return tool calls as OpenAI has them; in a stream numbered from `first`."""
    return [
        {
            **({} if first is None else {"index": first + position}),
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for position, call in enumerate(calls)
    ]


def finish_reason(reason: pb.FinishReason.ValueType) -> str:
    """Return OpenAI's word for a finish reason, which does not tell stop strings from the end of the answer."""
    return _FINISH.get(reason, "stop")


def usage_of(usage: pb.Usage) -> Json:
    """Return the used tokens as OpenAI has them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
    }


def chat_logprobs(entries: Sequence[pb.TokenLogprobs]) -> Json | None:
    """Return the log-probabilities of the tokens in a message's text; None if there are none."""
    if not entries:
        return None
    content = [
        {**_token(entry), "top_logprobs": [_token(alternative) for alternative in entry.top]}
        for entry in entries
        if in_text(entry)
    ]
    return {"content": content, "refusal": None}


def in_text(entry: pb.TokenLogprobs) -> bool:
    """Return whether a token adds to the text; other tokens have no log-probabilities in OpenAI's API."""
    return bool(entry.text or entry.token_bytes)


def _token(entry: pb.TokenLogprobs | pb.TokenLogprob) -> Json:
    """Return a token with its bytes; None if the server behind a remote worker did not send them."""
    data = list(entry.token_bytes) if entry.token_bytes or not entry.text else None
    return {"token": entry.text, "logprob": entry.logprob, "bytes": data}


def text_logprobs(
    entries: Sequence[pb.TokenLogprobs], text: str, offset: int, unscored: int = 0
) -> Json:
    """Return the log-probabilities of `text`, which begins `offset` characters into a completion.

    The first `unscored` tokens have none.
    """
    offsets, position = [], 0
    for entry in entries:
        # The safety policy may have replaced the text of an earlier token, so places cannot be counted up alone.
        position = max(position, text.find(entry.text, position))
        offsets.append(offset + position)
        position += len(entry.text)
    scored = entries[unscored:]
    unknown = [None] * unscored
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [*unknown, *(entry.logprob for entry in scored)],
        "top_logprobs": [*unknown, *(_by_text(entry.top) for entry in scored)],
        "text_offset": offsets,
    }


def joined(*parts: Json | None) -> Json | None:
    """Join the log-probabilities of consecutive parts of a text; return None if no part has any."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    return {name: [value for part in present for value in part[name]] for name in present[0]}


def _by_text(top: Iterable[pb.TokenLogprob]) -> dict[str, float]:
    """Return log-probabilities by text; like OpenAI, name a token that is not whole characters by its bytes."""
    logprobs: dict[str, float] = {}
    for token in top:
        name = token.text
        if _REPLACEMENT in name and token.token_bytes:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token_bytes)
        logprobs[f"token_id:{token.token_id}" if name in logprobs else name] = token.logprob
    return logprobs
