"""Serve the URLs that models answer: `ModelCalls` turns a body into a request, and writes or returns the answer."""

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from typing import Any, Final, TypeVar

from gateway.api.count import count_tokens
from gateway.api.generate import Generator, Write
from gateway.api.texts import EMBED, RERANK, TextsKind, respond
from gateway.http.answers import Chunks, HttpAnswer, WholeBody
from gateway.http.audio import HEADS, SpokenText, speech_request
from gateway.http.call import SSE, HttpCall
from gateway.http.completions import PromptAnswers
from gateway.http.message_events import MessageEvents
from gateway.http.messages import MessagesBody
from gateway.http.names import BodyKind, FieldNames
from gateway.http.requests import add_headers, generate_request, timeout_s
from gateway.http.responses import ResponseEvents, chat_of
from sluice.errors import UnknownModel
from sluice.openai.answers import SHAPES
from sluice.openai.embeddings import (
    embed_request,
    embeddings_object,
    format_of,
    rerank_object,
    rerank_request,
)
from sluice.openai.requests import CHAT, COMPLETIONS
from sluice.v1 import inference_pb2 as pb

DEGRADED: Final = "x-sluice-degraded"
"""Header of an answer that a fallback gave."""
R = TypeVar("R", pb.EmbedResponse, pb.RerankResponse)
Json = dict[str, Any]
RESPONSES: Final = "/v1/responses"


class ModelCalls:
    """The calls to models; `gateway.http.app` maps URLs to the methods."""

    def __init__(self, generator: Generator, ping_s: float) -> None:
        """Serve calls with `generator`; `ping_s` is `HttpSettings.stream_ping_s`."""
        self._generator = generator
        self._ping_s = ping_s

    async def chat(self, call: HttpCall) -> None:
        """Serve /v1/chat/completions."""
        body = await call.object()
        call.named = FieldNames(BodyKind.CHAT, body)
        request, with_usage = generate_request(CHAT, body)
        answer = _answer_of(CHAT, with_usage, may_call=bool(request.tools))
        await self._generate(call, request, answer, {} if with_usage is None else SSE)

    async def complete(self, call: HttpCall) -> None:
        """Serve /v1/completions."""
        body = await call.object()
        call.named = FieldNames(BodyKind.COMPLETION, body)
        answers = PromptAnswers(self._generator, call, body)
        answer = _answer_of(COMPLETIONS, answers.with_usage, may_call=False)
        answer.echoes = answers.echoes
        head = {} if answers.with_usage is None else SSE
        await self._write(call, answer, head, answers.answer)

    async def respond(self, call: HttpCall) -> None:
        """Serve /v1/responses without state: answers are not stored, and each request has its whole conversation."""
        body, places = await call.object(), dict[str, str]()
        call.named = FieldNames(BodyKind.RESPONSE, body, places)
        request, options = generate_request(CHAT, chat_of(body, places))
        events = ResponseEvents(body, int(time.time()))
        call.failing = events.fail
        await self._generate(call, request, events, {} if options is None else SSE)

    async def message(self, call: HttpCall) -> None:
        """Serve /v1/messages, Anthropic's API."""
        body = MessagesBody(await call.object())
        request = body.request(self._generator.catalog)
        call.named = body.named
        max_tokens, streams = request.sampling.max_tokens, body.streams
        events = MessageEvents(max_tokens, streams=streams, caches=body.caches)
        await self._generate(call, request, events, SSE if streams else {})

    async def count_tokens(self, call: HttpCall) -> Json:
        """Serve /v1/messages/count_tokens: count the prompt tokens of a message."""
        body = MessagesBody(await call.object())
        request = body.count_request()
        call.named = body.named
        call.remaining_s = timeout_s(call.metadata, streams=False)
        call.is_read = True
        with call.while_connected():
            response = await count_tokens(self._generator, request, call)
        return {"input_tokens": response.token_count}

    async def transcribe(self, call: HttpCall) -> None:
        """Serve /v1/audio/transcriptions and /v1/audio/translations."""
        if not self._generator.catalog.hearing:
            raise UnknownModel("no model of this mesh takes audio", metadata={"models": ""})
        request, answer_format = await speech_request(call, self._generator.settings.audio_max_s)
        answer = SpokenText(request, answer_format, self._generator.catalog)
        await self._generate(call, request, answer, HEADS.get(answer_format, {}))

    async def embed(self, call: HttpCall) -> Json:
        """Serve /v1/embeddings."""
        body = await call.object()
        call.named = FieldNames(BodyKind.TEXTS, body)
        request = embed_request(body)
        response = await self._texts(call, EMBED, request)
        return embeddings_object(response, format_of(body))

    async def rerank(self, call: HttpCall) -> Json:
        """Serve /v1/rerank and its aliases."""
        body = await call.object()
        call.named = FieldNames(BodyKind.TEXTS, body)
        request, returned = rerank_request(body)
        response = await self._texts(call, RERANK, request)
        return rerank_object(response, request.documents, returned=returned)

    async def _generate(
        self,
        call: HttpCall,
        request: pb.GenerateRequest,
        answer: HttpAnswer,
        head: Mapping[str, str] = {},
    ) -> None:
        """Answer `request`; `head` has the headers of the answer, for a stream the object `SSE` itself."""
        call.remaining_s = add_headers(call.metadata, request, streams=head is SSE)

        async def work(write: Write) -> None:
            await self._generator.answer(request, call, write, call.request_id)

        await self._write(call, answer, head, work)

    async def _write(
        self,
        call: HttpCall,
        answer: HttpAnswer,
        head: Mapping[str, str],
        work: Callable[[Write], Awaitable[None]],
    ) -> None:
        """Write `answer` while `work` adds its messages."""
        streams, call.is_read = head is SSE, True

        def headers() -> dict[str, str]:
            return {**head, DEGRADED: "true"} if answer.degraded else dict(head)

        # The head goes out with the first text or ping, so that an error before it still sets the status.
        async def write(response: pb.GenerateResponse) -> None:
            if (sent := answer.take(response)) and streams:
                call.request_id = answer.request_id
                await call.write(sent, headers(), more=True)

        pings = call.pinged(self._ping_s, headers) if streams else nullcontext()
        with call.while_connected(), pings:
            await work(write)
            call.request_id = answer.request_id
            await call.write(answer.end(), headers())

    async def _texts(self, call: HttpCall, kind: TextsKind[Any, R], request: Any) -> R:
        """Return the response to a request about texts."""
        call.remaining_s = add_headers(call.metadata, request)
        call.is_read = True
        with call.while_connected():
            response = await respond(self._generator, kind, request, call)
        call.request_id = response.request_id
        return response


def _answer_of(url: str, with_usage: bool | None, *, may_call: bool) -> WholeBody | Chunks:
    """Return the body of an answer of `url`; `with_usage` is as `generate_request` returns it."""
    shape, created = SHAPES[url], int(time.time())
    if with_usage is None:
        return WholeBody(shape, created, may_call=may_call)
    return Chunks(shape, created, with_usage, may_call=may_call)
