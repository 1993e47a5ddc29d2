"""/v1/chat/completions and /v1/completions."""

import time
from collections import defaultdict
from collections.abc import Collection

from gateway.api.generate import Generator
from gateway.api.inference_service import add_event
from gateway.http.answers import Chunks, whole
from gateway.http.call import SSE, HttpCall
from gateway.http.requests import GenerateCall, chat_field_name, generate_call
from gateway.models.catalog import Catalog
from sluice.openai.answers import SHAPES
from sluice.openai.requests import CHAT
from sluice.v1.inference_pb2 import GenerateResponse, GenerateTextResponse


class Completions:
    """Answers the calls of one URL."""

    def __init__(self, generator: Generator, catalog: Catalog, url: str) -> None:
        self._generator = generator
        self._catalog = catalog
        self._url = url
        self._shape = SHAPES[url]

    async def __call__(self, call: HttpCall) -> None:
        """Answers one call.

        Raises:
            SluiceError, ClientGone: it ends with that.
        """
        if self._url == CHAT:
            call.named = chat_field_name
        asked = generate_call(self._url, await call.json(), call.headers)
        with call.while_connected():
            await (self._stream if asked.streams else self._whole)(call, asked)

    async def _whole(self, call: HttpCall, asked: GenerateCall) -> None:
        answers: defaultdict[int, GenerateTextResponse] = defaultdict(GenerateTextResponse)

        async def collect(event: GenerateResponse) -> None:
            add_event(answers[event.answer_index], event)

        await self._generator.answer(asked.request, collect, asked.timeout_s, call.headers)
        whole_body = whole(
            self._shape, int(time.time()), [answers[i] for i in sorted(answers)], self._ends
        )
        headers = {"x-request-id": answers[0].started.request_id}
        await call.answer(200, whole_body, headers)

    async def _stream(self, call: HttpCall, asked: GenerateCall) -> None:
        chunks = Chunks(
            *(self._shape, int(time.time()), self._ends),
            include_usage=asked.include_usage,
            continuous_usage=asked.continuous_usage,
        )

        # The head is sent with the first text: an error before it has a status of its own.
        async def write(event: GenerateResponse) -> None:
            if events := chunks.take(event):
                await call.write(events, {**SSE, "x-request-id": chunks.request_id})

        await self._generator.answer(asked.request, write, asked.timeout_s, call.headers)
        await call.end(chunks.end(), SSE)

    def _ends(self, model: str) -> Collection[int]:
        return self._catalog[model].tokenizer.stop_token_ids
