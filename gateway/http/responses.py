"""/v1/responses, without state: answers are not stored, and each request has its whole conversation."""

import time
from collections.abc import Mapping
from typing import Any, Final

from gateway.api.generate import Generator
from gateway.http.answers import encode
from gateway.http.call import SSE, HttpCall
from gateway.http.requests import GenerateCall, response_call, response_field_name
from gateway.http.response_events import ResponseEvents
from sluice.v1.inference_pb2 import GenerateResponse

RESPONSES: Final = "/v1/responses"


class Responses:
    """Answers the calls of the URL."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def __call__(self, call: HttpCall) -> None:
        """Answers one call.

        Raises:
            SluiceError, ClientGone: it ends with that.
        """
        call.named = response_field_name
        body = await call.json()
        asked = response_call(body, call.headers)
        with call.while_connected():
            await self._answer(call, asked, body)

    async def _answer(self, call: HttpCall, asked: GenerateCall, body: Mapping[str, Any]) -> None:
        events = ResponseEvents(body, int(time.time()))
        call.failing = events.fail

        # The head is sent with the first text: an error before it has a status of its own.
        async def take(event: GenerateResponse) -> None:
            if (sent := events.take(event)) and asked.streams:
                await call.write(sent, {**SSE, "x-request-id": events.request_id})

        await self._generator.answer(asked.request, take, asked.timeout_s, call.headers)
        if asked.streams:
            await call.end(b"", SSE)
        else:
            await call.answer(200, encode(events.response), {"x-request-id": events.request_id})
