"""The URLs that models answer, and those that list the models."""

import time
from collections import defaultdict
from collections.abc import Collection
from typing import Any, Final

from gateway.admission.load_table import ModelLoadTable
from gateway.api.generate import Generator, Write
from gateway.api.inference_service import add_event
from gateway.api.texts import EMBED, RERANK, answer_texts
from gateway.http import headers as header_fields
from gateway.http.answers import Chunks, encode, whole
from gateway.http.audio import EVENTS, Transcript, speech_request
from gateway.http.call import SSE, HttpCall
from gateway.http.requests import (
    GenerateCall,
    bad_fields_refused,
    chat_field_name,
    generate_call,
    response_call,
    response_field_name,
)
from gateway.http.response_events import ResponseEvents
from gateway.models.catalog import Catalog
from sluice.defaults import AUTO
from sluice.errors import UnknownModel
from sluice.openai.answers import SHAPES
from sluice.openai.embeddings import (
    embed_request,
    embeddings_object,
    format_of,
    rerank_object,
    rerank_request,
)
from sluice.openai.requests import CHAT
from sluice.v1.inference_pb2 import GenerateResponse, GenerateTextResponse

RESPONSES: Final = "/v1/responses"


class ModelCalls:
    """Answers the calls, each method those of its URL; they end with SluiceError or starlette's ClientDisconnect."""

    def __init__(self, generator: Generator, loads: ModelLoadTable) -> None:
        self._generator = generator
        self._loads = loads
        self._created = int(time.time())

    @property
    def _catalog(self) -> Catalog:
        return self._generator.upstream.admission.policies.catalog

    async def complete(self, call: HttpCall) -> None:
        """/v1/chat/completions and /v1/completions."""
        url = call.scope["path"]
        if url == CHAT:
            call.named = chat_field_name
        asked = generate_call(url, await call.object(), call.metadata)
        shape, created = SHAPES[url], int(time.time())
        with call.while_connected():
            if asked.streams:
                usage = asked.include_usage, asked.continuous_usage
                chunks = Chunks(shape, created, self._ends, *usage)
                await self._stream(call, asked, chunks)
                await call.write(chunks.end(), SSE)
                return
            answers: defaultdict[int, GenerateTextResponse] = defaultdict(GenerateTextResponse)

            async def collect(event: GenerateResponse) -> None:
                add_event(answers[event.answer_index], event)

            await self._answer(call, asked, collect)
            found = [answers[index] for index in sorted(answers)]
            body = whole(shape, created, found, self._ends)
            await call.write(body, {"x-request-id": found[0].started.request_id})

    async def respond(self, call: HttpCall) -> None:
        """/v1/responses, without state: answers are not stored, and each request has its whole conversation."""
        call.named = response_field_name
        body = await call.object()
        asked = response_call(body, call.metadata)
        events = ResponseEvents(body, int(time.time()))
        call.failing = events.fail
        with call.while_connected():
            await self._stream(call, asked, events)
            if asked.streams:
                await call.write(b"", SSE)
            else:
                await call.write(encode(events.response), {"x-request-id": events.request_id})

    async def transcribe(self, call: HttpCall) -> None:
        """/v1/audio/transcriptions and /v1/audio/translations."""
        if not self._catalog.hearing:
            raise UnknownModel("no model of this mesh takes audio", metadata={"models": ""})
        request, form = await speech_request(call, self._generator.settings.audio_max_s)
        streams = form == EVENTS
        timeout_s = header_fields.apply(call.metadata, request, streams=streams)
        transcript = Transcript(request, form, self._catalog)
        with call.while_connected():
            await self._stream(call, GenerateCall(request, streams, timeout_s), transcript)
            await call.write(*transcript.end())

    async def embed(self, call: HttpCall) -> None:
        """/v1/embeddings."""
        body = await call.object()
        with bad_fields_refused():
            request = embed_request(body)
        timeout_s = header_fields.apply(call.metadata, request)
        with call.while_connected():
            response = await answer_texts(
                self._generator, EMBED, request, call.caller, timeout_s, call.metadata
            )
            answer = encode(embeddings_object(response, format_of(body)))
            await call.write(answer, {"x-request-id": response.request_id})

    async def rerank(self, call: HttpCall) -> None:
        """/v1/rerank."""
        body = await call.object()
        with bad_fields_refused():
            request, returned = rerank_request(body)
        timeout_s = header_fields.apply(call.metadata, request)
        with call.while_connected():
            response = await answer_texts(
                self._generator, RERANK, request, call.caller, timeout_s, call.metadata
            )
            answer = encode(rerank_object(response, request.documents, returned=returned))
            await call.write(answer, {"x-request-id": response.request_id})

    async def models(self, call: HttpCall) -> None:
        """/v1/models: what can be named in a request, "auto" first."""
        models = [self._model(name) for name in (AUTO, *self._catalog.callable)]
        await call.write(encode({"object": "list", "data": models}))

    async def model(self, call: HttpCall) -> None:
        """/v1/models/NAME."""
        name, known = call.path_params["name"], (AUTO, *self._catalog.callable)
        if name not in known:
            raise UnknownModel(f"there is no model of that name; known: {', '.join(known)}")
        await call.write(encode(self._model(name)))

    async def _stream(
        self, call: HttpCall, asked: GenerateCall, events: Chunks | ResponseEvents | Transcript
    ) -> None:
        # The head is sent with the first text: an error before it has a status of its own.
        async def write(event: GenerateResponse) -> None:
            if (sent := events.take(event)) and asked.streams:
                await call.write(sent, {**SSE, "x-request-id": events.request_id}, more=True)

        await self._answer(call, asked, write)

    async def _answer(self, call: HttpCall, asked: GenerateCall, write: Write) -> None:
        await self._generator.answer(
            asked.request, call.caller, write, asked.timeout_s, call.metadata
        )

    def _ends(self, model: str) -> Collection[int]:
        return self._catalog[model].tokenizer.stop_token_ids

    def _model(self, name: str) -> dict[str, Any]:
        named = {"id": name, "object": "model", "created": self._created, "owned_by": "sluice"}
        if name == AUTO:
            return named
        model = self._catalog[name]
        ready = self._loads.load(model.settings.task_name, time.monotonic()).ready
        facts = {"tier": model.settings.tier, "max_model_len": model.context_tokens}
        return {**named, **facts, "ready": ready}
