"""The events of an answer become OpenAI's objects: a whole one, or the chunks of a stream of server-sent events."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from typing_extensions import override

from gateway.api.whole import add_events
from gateway.http.echo import Echo
from gateway.http.encodings import GZIP
from gateway.http.logprobs import TextLogprobs
from gateway.http.names import plain_names
from sluice.errors import PromptTooLong, SluiceError, UnknownModel
from sluice.openai.answers import (
    Shape,
    calls_of,
    choice,
    finish_reason,
    in_text,
    usage_of,
    whole_answer,
)
from sluice.openai.errors import error_body, http_status
from sluice.v1 import inference_pb2 as pb

DONE: Final = b"data: [DONE]\n\n"
_LINE_ENDS: Final = tuple(
    (chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029)
)
"""Characters that JSON may hold as they are and that some clients take for the end of a line; with their escapes."""
ErrorAnswer = tuple[int, dict[str, str], dict[str, Any]]
"""Status, headers and body."""
_WAIT_S_MAX: Final = 60.0
_HEADERS_OF: Final[Mapping[int, Mapping[str, str]]] = {
    401: {"www-authenticate": "Bearer"},
    415: {"accept-encoding": GZIP},
}
"""Headers that HTTP wants beside a status."""
_RETRIED: Final = (409, 429)
"""Statuses that OpenAI's clients retry beside those of 500 and above, unless a header says otherwise."""


def encode(value: Mapping[str, Any]) -> bytes:
    """JSON as short as it can be."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def sse(value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event.

    Clients that split a stream with `str.splitlines`, as httpx does, end a line at U+0085, U+2028 and U+2029 too.
    """
    data = encode(value)
    for raw, escaped in _LINE_ENDS:
        data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"


class HttpAnswer:
    """The body of an answer that is written as its messages come, or at their end.

    Attributes:
        request_id: of the request; empty until it is known. Of several answers it is the first that began.
        model: that answers.
        degraded: whether it is a fallback, also of one of several answers.
    """

    def __init__(self) -> None:
        self.request_id = self.model = ""
        self.degraded = False

    def take(self, response: pb.GenerateResponse) -> bytes:
        """What the next message adds to a stream; may be empty."""
        if response.HasField("started"):
            self.request_id = self.request_id or response.started.request_id
            self.model = response.started.model
            self.degraded |= response.started.route.degraded
        for notice in response.notices:
            if notice.kind == pb.NOTICE_KIND_ESCALATED:
                # Nothing of the first model's answer was sent: requests of this API do not set accept_replace.
                self.model = notice.model
                self.degraded |= notice.degraded
        index, sent = response.answer_index, b""
        if response.HasField("delta"):
            sent = self.add(index, response.delta)
        if response.HasField("finished"):
            sent += self.finish(index, response.finished)
        return sent

    def facts(self) -> dict[str, Any]:
        """Return the fields of an object that OpenAI's do not have."""
        return {"degraded": True} if self.degraded else {}

    def add(self, index: int, delta: pb.Delta) -> bytes:
        """As `take`, of a piece of an answer."""
        raise NotImplementedError

    def finish(self, index: int, finished: pb.Finished) -> bytes:
        """As `take`, of the end of an answer."""
        return b""

    def end(self) -> bytes:
        """The whole body, or the end of a stream, when all its answers are complete."""
        raise NotImplementedError


class WholeBody(HttpAnswer):
    """The body of answers that are not streamed."""

    def __init__(self, shape: Shape, created: int, *, may_call: bool) -> None:
        """``created``: in seconds since 1970; ``may_call``: tools."""
        super().__init__()
        self._shape, self._created, self._may_call = shape, created, may_call
        self._answers = defaultdict[int, pb.GenerateTextResponse](pb.GenerateTextResponse)
        self.echoes: Mapping[int, Echo] = {}

    @override
    def take(self, response: pb.GenerateResponse) -> bytes:
        add_events(self._answers[response.answer_index], response)
        self.request_id = self._answers[0].started.request_id
        self.degraded = any(one.started.route.degraded for one in self._answers.values())
        return b""

    @override
    def end(self) -> bytes:
        choices, usage, shape = [], pb.Usage(), self._shape
        for index, one in sorted(self._answers.items()):
            entries: Sequence[pb.TokenLogprobs] = one.logprobs
            if self._may_call and entries:
                known = TextLogprobs()
                entries = [*known.push(entries, one.text), *known.flush()]
            if (echo := self.echoes.get(index)) is not None:
                parts = echo.whole(one.text, entries)
            else:
                parts = shape.message(one.text, entries, one.tool_calls, one.reasoning)
            choices.append(choice(index, parts, finish_reason(one.finished.reason)))
            _add_usage(usage, one.finished.usage)
        model = self._answers[0].finished.model
        whole = whole_answer(shape, self.request_id, self._created, model, choices, usage)
        return encode(whole | self.facts())


class Chunks(HttpAnswer):
    """The chunks of one stream."""

    def __init__(self, shape: Shape, created: int, with_usage: bool, *, may_call: bool) -> None:
        """``created``: in seconds since 1970; ``may_call``: tools."""
        super().__init__()
        self._shape, self._created, self._may_call = shape, created, may_call
        self._logprobs = defaultdict[int, TextLogprobs](TextLogprobs)
        """Of answers that may call tools."""
        self.echoes: Mapping[int, Echo] = {}
        self._with_usage = with_usage
        self._offsets: dict[int, int] = {}
        """Characters sent of each choice that has begun."""
        self._calls: Counter[int] = Counter()
        """Calls of tools sent of each choice."""
        self._usage = pb.Usage()

    @override
    def add(self, index: int, delta: pb.Delta) -> bytes:
        logprobs = self._of_text(index, delta)
        if not (delta.text or logprobs or delta.tool_calls or delta.reasoning):
            return b""
        chunks, shape = self._begin(index), self._shape
        if delta.reasoning:
            chunks += self._chunk(index, shape.delta(reasoning_content=delta.reasoning))
        if delta.text or logprobs:
            offset, echo = self._offsets[index], self.echoes.get(index)
            form = shape.delta if echo is None else echo.answer
            parts = form(delta.text, logprobs, offset)
            self._offsets[index] += len(delta.text)
            chunks += self._chunk(index, parts)
        if delta.tool_calls:
            calls = calls_of(delta.tool_calls, self._calls[index])
            self._calls[index] += len(calls)
            chunks += self._chunk(index, shape.delta(tool_calls=calls))
        return chunks

    @override
    def finish(self, index: int, finished: pb.Finished) -> bytes:
        chunks = self._begin(index)
        if rest := self._logprobs[index].flush():
            chunks += self._chunk(index, self._shape.delta("", rest))
        _add_usage(self._usage, finished.usage)
        return chunks + self._chunk(index, self._shape.delta(), finish_reason(finished.reason))

    @override
    def end(self) -> bytes:
        if not self._with_usage:
            return DONE
        return sse({**self._frame([]), "usage": usage_of(self._usage)}) + DONE

    def _of_text(self, index: int, delta: pb.Delta) -> list[pb.TokenLogprobs]:
        """Return the log-probabilities of what has been sent, as far as they are known now."""
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
        if not self._shape.chats:
            return b""
        return self._chunk(index, self._shape.delta("", role="assistant", refusal=None))

    def _chunk(self, index: int, parts: dict[str, Any], finish: str | None = None) -> bytes:
        chunk = self._frame([choice(index, parts, finish)])
        if self._with_usage:
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
    total.prompt_tokens += usage.prompt_tokens  # counted once, with the first answer
    total.cached_prompt_tokens += usage.cached_prompt_tokens
    total.completion_tokens += usage.completion_tokens


def error_answer(error: SluiceError, named: Callable[[str], str] = plain_names) -> ErrorAnswer:
    """Return the answer that is an error; ``named``: returns what its API calls the field at a path."""
    status = http_status(error.code.value[0], error.reason)
    message, param = _described(error, named)
    body = error_body(status, error.reason, message, param)
    return status, error_headers(error, status), body


def error_headers(error: SluiceError, status: int) -> dict[str, str]:
    """Return the headers of an answer that is an error, by which clients decide whether to try again."""
    headers = dict(_HEADERS_OF.get(status, {}))
    if "request_id" in error.metadata:
        headers["x-request-id"] = error.metadata["request_id"]
    wait_s = error.retry_after_s
    if wait_s is not None:
        headers["retry-after"] = str(max(1, -int(-wait_s // 1)))
        headers["retry-after-ms"] = str(round(1000 * wait_s))
    # OpenAI's clients do not wait longer than a minute: they come back at once.
    if (wait_s is None or wait_s > _WAIT_S_MAX) and (status >= 500 or status in _RETRIED):
        headers["x-should-retry"] = "false"
    return headers


def _described(error: SluiceError, named: Callable[[str], str]) -> tuple[str, str | None]:
    """Message and field, with OpenAI's names."""
    if isinstance(error, UnknownModel):
        return error.message, "model"
    violations = [(named(one.field), one.description) for one in error.violations]
    message, param = error.message, violations[0][0] if violations else None
    if violations:
        message = "; ".join(f"{field}: {description}" for field, description in violations)
    if isinstance(error, PromptTooLong):
        # OpenAI's words, by which clients know the error whatever its code says. A worker does not say its limit.
        context = "exceeded"
        if "context_tokens" in error.metadata:
            context = f"{error.metadata['context_tokens']} tokens"
        message = f"this model's maximum context length is {context}: {message}"
    return message, param
