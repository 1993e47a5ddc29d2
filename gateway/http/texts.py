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
        timeout_s = header_fields.apply(call.headers, request)
        with call.while_connected():
            response = await self._texts.embed(request, timeout_s, call.headers)
            answer = encode(embeddings_object(response, format_of(body)))
            await call.answer(200, answer, {"x-request-id": response.request_id})

    async def rerank(self, call: HttpCall) -> None:
        """Answers one call of /v1/rerank; as `embed`."""
        body = await call.json()
        with bad_fields_refused():
            request, returned = rerank_request(body)
        timeout_s = header_fields.apply(call.headers, request)
        with call.while_connected():
            response = await self._texts.rerank(request, timeout_s, call.headers)
            answer = encode(rerank_object(response, request.documents, returned=returned))
            await call.answer(200, answer, {"x-request-id": response.request_id})
