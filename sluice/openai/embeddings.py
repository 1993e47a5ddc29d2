"""Bodies of /v1/embeddings (OpenAI) and /v1/rerank (Cohere, Jina), and their answers.

Token ids are refused: a text passes the safety policy, and the model's own tokenizer, before a model sees it.
"""

import base64
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sluice.openai.fields import BadField, check_entries, check_kind, set_field
from sluice.openai.requests import body_of_line
from sluice.v1 import inference_pb2 as pb
from sluice.v1.jobs_pb2 import JobAnswer

EMBEDDINGS: Final = "/v1/embeddings"
RERANK: Final = ("/v1/rerank", "/v2/rerank", "/rerank")
"""Of Cohere's client, of Jina's, and as LiteLLM and others ask servers of a company's own."""
FORMATS: Final = ("float", "base64")

_EMBED_FIELDS: Final = ("model", "dimensions", "normalize", "truncate", "prompt_name")
_RERANK_FIELDS: Final = ("model", "query", "top_n", "truncate")
_PROMPTS: Final[Mapping[str, str]] = {
    "query": "query",
    "search_query": "query",
    "passage": "document",
    "document": "document",
    "search_document": "document",
}
"""What others call the kinds of texts."""


def embed_request(body: Mapping[str, Any]) -> pb.EmbedRequest:
    """The request of a body, less its ``encoding_format``.

    Raises:
        BadField: a field is not served, or its value does not fit.
    """
    request = pb.EmbedRequest()
    asked = {name: value for name, value in body.items() if value is not None}
    format_of(asked)
    _set_texts(request.texts, asked.pop("input", None), "input")
    if (user := asked.pop("user", None)) is not None:
        check_kind("user", user, str)
        request.labels["user"] = user
    if (kind := asked.pop("input_type", None)) is not None:
        if kind not in _PROMPTS:
            raise BadField(f"input_type: is none of {', '.join(_PROMPTS)}")
        request.prompt_name = _PROMPTS[kind]
    asked.pop("encoding_format", None)
    _set_fields(request, asked, _EMBED_FIELDS)
    return request


def request_of_line(line: Mapping[str, Any], defaults: pb.GenerateRequest) -> pb.EmbedRequest:
    """The request of a line of OpenAI's batch format whose url is `EMBEDDINGS`; raises as `embed_request`."""
    body = body_of_line(line)
    try:
        if format_of(body) != FORMATS[0]:
            raise BadField("encoding_format: results of jobs have float alone")
        request = embed_request(body)
    except BadField as error:
        raise BadField(f"body.{error}") from error
    request.model = request.model or defaults.model
    request.labels.update({**defaults.labels, **request.labels})
    return request


def rerank_request(body: Mapping[str, Any]) -> tuple[pb.RerankRequest, bool]:
    """The request of a body, and whether the documents are wanted back; raises as `embed_request`.

    Documents that are too long are cut, unless ``truncate`` is false: so it is with the services whose shape this is.
    """
    request = pb.RerankRequest(truncate=True)
    asked = {name: value for name, value in body.items() if value is not None}
    documents = asked.pop("documents", None)
    check_entries("documents", documents)
    if isinstance(documents, list):
        documents = [one.get("text") if isinstance(one, dict) else one for one in documents]
    _set_texts(request.documents, documents, "documents")
    returned: bool = asked.pop("return_documents", False)
    check_kind("return_documents", returned, bool)
    _set_fields(request, asked, _RERANK_FIELDS)
    return request, returned


def format_of(body: Mapping[str, Any]) -> str:
    """How the numbers are wanted, one of `FORMATS`.

    Raises:
        BadField: otherwise.
    """
    wanted = body.get("encoding_format") or FORMATS[0]
    if wanted not in FORMATS:
        raise BadField(f"encoding_format: is none of {', '.join(FORMATS)}")
    return str(wanted)


def embeddings_object(response: pb.EmbedResponse | JobAnswer, format: str) -> dict[str, Any]:
    """The answer to a call of `EMBEDDINGS`, or to an item of a job."""
    data = [
        {"object": "embedding", "index": index, "embedding": _numbers(one.values, format)}
        for index, one in enumerate(response.embeddings)
    ]
    return {"object": "list", "data": data, "model": response.model, "usage": _usage(response)}


def rerank_object(
    response: pb.RerankResponse, documents: Sequence[str], *, returned: bool
) -> dict[str, Any]:
    """The answer to a call of `RERANK`; ``returned``: with the documents."""
    results = []
    for one in response.results:
        result: dict[str, Any] = {"index": one.index, "relevance_score": one.score}
        if returned:
            result["document"] = {"text": documents[one.index]}
        results.append(result)
    found = {"id": response.request_id, "object": "list", "model": response.model}
    return {**found, "results": results, "usage": _usage(response)}


def _usage(response: Any) -> dict[str, int]:
    return dict.fromkeys(("prompt_tokens", "total_tokens"), response.usage.prompt_tokens)


def _numbers(values: bytes, format: str) -> Any:
    if format == "base64":
        return base64.b64encode(values).decode()
    return array("f", values).tolist()


def _set_texts(texts: Any, given: Any, field: str) -> None:
    given = [given] if isinstance(given, str) else given
    check_entries(field, given)
    if not isinstance(given, list) or not given:
        raise BadField(f"{field}: is no text and no list of texts")
    for place, text in enumerate(given):
        if isinstance(text, int | list):
            raise BadField(
                f"{field}: has token ids, which are not served; send the text "
                "(OpenAIEmbeddings of LangChain: check_embedding_ctx_length=False)"
            )
        if not isinstance(text, str):
            raise BadField(f"{field}[{place}]: is no text")
        try:
            texts.append(text)
        except (UnicodeError, ValueError):
            raise BadField(f"{field}[{place}]: is not valid UTF-8") from None


def _set_fields(request: Any, asked: Mapping[str, Any], known: Sequence[str]) -> None:
    for name, value in asked.items():
        if name not in known:
            raise BadField(f"{name}: is not served; leave it out")
        set_field(request, name, value)
