"""/v1/embeddings and /v1/rerank."""

from gateway.api.texts import TextCalls
from gateway.http import headers as header_fields
from gateway.http.answers import encode
from gateway.http.call import HttpCall
from gateway.http.requests import bad_fields_refused
from sluice.openai.embeddings import (
    embed_request,
    embeddings_object,
    format_of,
    rerank_object,
    rerank_request,
)
from sluice.v1.inference_pb2 import EmbedRequest, Priority, RerankRequest
from sluice.wire.enums import value_of


class Texts:
    """Answers their calls."""

    def __init__(self, texts: TextCalls) -> None:
        self._texts = texts

    async def embed(self, call: HttpCall) -> None:
        """Answers one call of /v1/embeddings.

        Raises:
            SluiceError, ClientGone: it ends with that.
        """
        body = await call.json()
        with bad_fields_refused():
            request = embed_request(body)
        timeout_s = _apply(call, request)
        with call.while_connected():
            response = await self._texts.embed(request, timeout_s, call.headers)
            answer = encode(embeddings_object(response, format_of(body)))
            await call.answer(200, answer, {"x-request-id": response.request_id})

    async def rerank(self, call: HttpCall) -> None:
        """Answers one call of /v1/rerank; as `embed`."""
        body = await call.json()
        with bad_fields_refused():
            request, returned = rerank_request(body)
        timeout_s = _apply(call, request)
        with call.while_connected():
            response = await self._texts.rerank(request, timeout_s, call.headers)
            answer = encode(rerank_object(response, request.documents, returned=returned))
            await call.answer(200, answer, {"x-request-id": response.request_id})


def _apply(call: HttpCall, request: EmbedRequest | RerankRequest) -> float | None:
    """Adds what the headers say to ``request``; returns the seconds that it may take."""
    request.priority = value_of(Priority, header_fields.class_of(call.headers))
    request.labels.update(header_fields.labels_of(call.headers))
    return header_fields.timeout_s(call.headers, streams=False)
