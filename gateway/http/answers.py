"""Turn the messages of an answer into OpenAI's objects: one whole body, or chunks in server-sent events.

`HttpAnswer` is the interface that every HTTP API implements; `WholeBody` and `Chunks` implement it for OpenAI's chats
and completions.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from typing_extensions import override

from gateway.api.whole import add_events
from gateway.http.logprobs import Echo, TextLogprobs
from sluice.openai.answers import (
    Shape,
    calls_of,
    choice,
    finish_reason,
    in_text,
    usage_of,
    whole_answer,
)
from sluice.v1 import inference_pb2 as pb

DONE: Final = b"data: [DONE]\n\n"
_LINE_ENDS: Final = tuple(
    (chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029)
)
"""Characters that JSON allows in strings but that some clients take for the end of a line, with their escapes."""


def encode(value: Mapping[str, Any]) -> bytes:
    """Return `value` as JSON without blanks."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def sse(value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event.

    Clients that split a stream with `str.splitlines`, such as httpx, also end a line at U+0085, U+2028 and U+2029.
    """
    data = encode(value)
    for raw, escaped in _LINE_ENDS:
        data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"


class HttpAnswer:
    """The body of an HTTP answer, built from the messages of one or more answers.

    Attributes:
        request_id: Id of the request, of the first that began if there are several; empty until it is known.
        model: Name of the model that answers.
        degraded: Whether a fallback answers, at least one of several answers.
    """

    def __init__(self) -> None:
        self.request_id = self.model = ""
        self.degraded = False

    def take(self, response: pb.GenerateResponse) -> bytes:
        """Add the next message, and return the bytes that it adds to a stream; may be empty."""
        if response.HasField("started"):
            self.request_id = self.request_id or response.started.request_id
            self.model = response.started.model
            self.degraded |= response.started.route.degraded
        for notice in response.notices:
            if notice.kind == pb.NOTICE_KIND_ESCALATED:
                # The caller has nothing of the first model's answer: requests of HTTP do not set accept_replace.
                self.model = notice.model
                self.degraded |= notice.degraded
        index, data = response.answer_index, b""
        if response.HasField("delta"):
            data = self.add(index, response.delta)
        if response.HasField("finished"):
            data += self.finish(index, response.finished)
        return data

    def facts(self) -> dict[str, Any]:
        """Return Sluice's own fields of an answer."""
        return {"degraded": True} if self.degraded else {}

    def add(self, index: int, delta: pb.Delta) -> bytes:
        """Add a piece of the answer with this index; return as `take`."""
        raise NotImplementedError

    def finish(self, index: int, finished: pb.Finished) -> bytes:
        """End the answer with this index; return as `take`."""
        return b""

    def end(self) -> bytes:
        """Return the whole body, or the end of the stream; all answers must be complete."""
        raise NotImplementedError


class WholeBody(HttpAnswer):
    """The body of a chat or completion that is not streamed."""

    def __init__(self, shape: Shape, created: int, *, may_call: bool) -> None:
        """Create the body; `created` is in seconds since the Unix epoch, `may_call`: whether there are tools."""
        super().__init__()
        self._shape, self._created, self._may_call = shape, created, may_call
        self._answers = defaultdict[int, pb.GenerateTextResponse](pb.GenerateTextResponse)
        self.echoes: Mapping[int, Echo] = {}

    @override
    def take(self, response: pb.GenerateResponse) -> bytes:
        add_events(self._answers[response.answer_index], response)
        self.request_id = self._answers[0].started.request_id
        self.degraded = any(answer.started.route.degraded for answer in self._answers.values())
        return b""

    @override
    def end(self) -> bytes:
        choices, usage, shape = list[dict[str, Any]](), pb.Usage(), self._shape
        for index, answer in sorted(self._answers.items()):
            entries: Sequence[pb.TokenLogprobs] = answer.logprobs
            # Tokens of tool calls are not text, so their log-probabilities are dropped.
            if self._may_call and entries:
                logprobs = TextLogprobs()
                entries = [*logprobs.push(entries, answer.text), *logprobs.flush()]
            if (echo := self.echoes.get(index)) is not None:
                parts = echo.whole(answer.text, entries)
            else:
                parts = shape.message(answer.text, entries, answer.tool_calls, answer.reasoning)
            choices.append(choice(index, parts, finish_reason(answer.finished.reason)))
            _add_usage(usage, answer.finished.usage)
        model = self._answers[0].finished.model
        whole = whole_answer(shape, self.request_id, self._created, model, choices, usage)
        return encode(whole | self.facts())


class Chunks(HttpAnswer):
    """The chunks of a streamed chat or completion."""

    def __init__(self, shape: Shape, created: int, with_usage: bool, *, may_call: bool) -> None:
        """Create the body; `created` is in seconds since the Unix epoch, `may_call`: whether there are tools."""
        super().__init__()
        self._shape, self._created, self._may_call = shape, created, may_call
        self._logprobs = defaultdict[int, TextLogprobs](TextLogprobs)
        """By index, of answers that may call tools."""
        self.echoes: Mapping[int, Echo] = {}
        self._with_usage = with_usage
        self._offsets: dict[int, int] = {}
        """Characters that have been sent, by index of the choice; a choice without an entry has not begun."""
        self._calls: Counter[int] = Counter()
        """Tool calls that have been sent, by index of the choice."""
        self._usage = pb.Usage()

    @override
    def add(self, index: int, delta: pb.Delta) -> bytes:
        logprobs = self._text_logprobs(index, delta)
        if not (delta.text or logprobs or delta.tool_calls or delta.reasoning):
            return b""
        chunks, shape = self._begin(index), self._shape
        if delta.reasoning:
            chunks += self._chunk(index, shape.delta(reasoning_content=delta.reasoning))
        if delta.text or logprobs:
            offset, echo = self._offsets[index], self.echoes.get(index)
            make_parts = shape.delta if echo is None else echo.answer
            parts = make_parts(delta.text, logprobs, offset)
            self._offsets[index] += len(delta.text)
            chunks += self._chunk(index, parts)
        if delta.tool_calls:
            calls = calls_of(delta.tool_calls, self._calls[index])
            self._calls[index] += len(calls)
            chunks += self._chunk(index, shape.delta(tool_calls=calls))
        return chunks

    @override
    def finish(self, index: int, finished: pb.Finished) -> bytes:
        chunks = self._begin(index)  # an answer without any text has not begun
        if rest := self._logprobs[index].flush():
            chunks += self._chunk(index, self._shape.delta("", rest))
        _add_usage(self._usage, finished.usage)
        return chunks + self._chunk(index, self._shape.delta(), finish_reason(finished.reason))

    @override
    def end(self) -> bytes:
        if not self._with_usage:
            return DONE
        return sse({**self._frame([]), "usage": usage_of(self._usage)}) + DONE

    def _text_logprobs(self, index: int, delta: pb.Delta) -> list[pb.TokenLogprobs]:
        """Return the log-probabilities that can be sent now: of tokens that are certainly text."""
        # An echo counts tokens, so it keeps those without text.
        if index in self.echoes:
            return list(delta.logprobs)
        if self._may_call and (delta.logprobs or index in self._logprobs):
            return self._logprobs[index].push(delta.logprobs, delta.text)
        return list(filter(in_text, delta.logprobs))

    def _begin(self, index: int) -> bytes:
        if index in self._offsets:
            return b""
        self._offsets[index] = 0
        if (echo := self.echoes.get(index)) is not None:
            self._offsets[index] = len(echo.text)
            return self._chunk(index, echo.prompt())
        # Only chats begin with a chunk that has no text: it names the role.
        if not self._shape.chats:
            return b""
        return self._chunk(index, self._shape.delta("", role="assistant", refusal=None))

    def _chunk(self, index: int, parts: dict[str, Any], finish: str | None = None) -> bytes:
        chunk = self._frame([choice(index, parts, finish)])
        if (
            self._with_usage
        ):  # OpenAI's clients expect the field in all chunks, with a value in the last
            chunk["usage"] = None
        return sse(chunk)

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self._shape.prefix}-{self.request_id}",
            "object": self._shape.chunk,
            "created": self._created,
            "model": self.model,
            "choices": choices,
            **self.facts(),
        }


def _add_usage(total: pb.Usage, usage: pb.Usage) -> None:
    total.prompt_tokens += (
        usage.prompt_tokens
    )  # the gateway counts them with the first answer alone
    total.cached_prompt_tokens += usage.cached_prompt_tokens
    total.completion_tokens += usage.completion_tokens
