"""Translate bodies and answers of /v1/embeddings (OpenAI) and /v1/rerank (Cohere, Jina).

Token ids are refused, because the safety policy inspects text.
"""

import base64
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sluice.openai.fields import BadField, add_value, check_entries, check_kind, set_field
from sluice.openai.requests import body_of_line
from sluice.v1 import inference_pb2 as pb
from sluice.v1.jobs_pb2 import JobAnswer

EMBEDDINGS: Final = "/v1/embeddings"
RERANK: Final = ("/v1/rerank", "/v2/rerank", "/rerank")
"""URLs of Jina's client, of Cohere's, and of LiteLLM for self-hosted servers."""
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
"""Names of prompts by the kinds of text that other APIs have."""


def embed_request(body: Mapping[str, Any]) -> pb.EmbedRequest:
    """Return the request of a body; `format_of` returns its `encoding_format`.

    Raises:
        BadField: A field is unsupported, or its value is invalid.
    """
    request = pb.EmbedRequest()
    fields = {name: value for name, value in body.items() if value is not None}
    format_of(fields)
    _set_texts(request, "texts", fields.pop("input", None), "input")
    if (user := fields.pop("user", None)) is not None:
        check_kind("user", user, str)
        request.labels["user"] = user
    if (kind := fields.pop("input_type", None)) is not None:
        if kind not in _PROMPTS:
            raise BadField(f"input_type: must be one of {', '.join(_PROMPTS)}")
        request.prompt_name = _PROMPTS[kind]
    fields.pop("encoding_format", None)
    _set_fields(request, fields, _EMBED_FIELDS)
    return request


def request_of_line(line: Mapping[str, Any], defaults: pb.GenerateRequest) -> pb.EmbedRequest:
    """Return the request of a line of OpenAI's batch format with the URL `EMBEDDINGS`; raise as `embed_request`."""
    body = body_of_line(line)
    try:
        if format_of(body) != FORMATS[0]:
            raise BadField("encoding_format: must be float in jobs")
        request = embed_request(body)
    except BadField as error:
        raise BadField(f"body.{error}") from error
    request.model = request.model or defaults.model
    request.labels.update({**defaults.labels, **request.labels})
    return request


def rerank_request(body: Mapping[str, Any]) -> tuple[pb.RerankRequest, bool]:
    """Return the request of a body, and whether to return the documents; raise as `embed_request`.

    As in Cohere's and Jina's services, documents that are too long are truncated unless `truncate` is false.
    """
    request = pb.RerankRequest(truncate=True)
    fields = {name: value for name, value in body.items() if value is not None}
    documents = fields.pop("documents", None)
    check_entries("documents", documents)
    if isinstance(documents, list):
        documents = [
            document.get("text") if isinstance(document, dict) else document
            for document in documents
        ]
    _set_texts(request, "documents", documents, "documents")
    returned: bool = fields.pop("return_documents", False)
    check_kind("return_documents", returned, bool)
    _set_fields(request, fields, _RERANK_FIELDS)
    return request, returned


def format_of(body: Mapping[str, Any]) -> str:
    """Return the `encoding_format` of a body.

    Raises:
        BadField: It is not one of `FORMATS`.
    """
    encoding = body.get("encoding_format") or FORMATS[0]
    if encoding not in FORMATS:
        raise BadField(f"encoding_format: must be one of {', '.join(FORMATS)}")
    return str(encoding)


def embeddings_object(response: pb.EmbedResponse | JobAnswer, format: str) -> dict[str, Any]:
    """Return the answer to a call of `EMBEDDINGS`, or to an item of a job."""
    data = [
        {"object": "embedding", "index": index, "embedding": _numbers(embedding.values, format)}
        for index, embedding in enumerate(response.embeddings)
    ]
    return {"object": "list", "data": data, "model": response.model, "usage": _usage(response)}


def rerank_object(
    response: pb.RerankResponse, documents: Sequence[str], *, returned: bool
) -> dict[str, Any]:
    """Return the answer to a call of `RERANK`; `returned`: with the documents."""
    results = []
    for scored in response.results:
        result: dict[str, Any] = {"index": scored.index, "relevance_score": scored.score}
        if returned:
            result["document"] = {"text": documents[scored.index]}
        results.append(result)
    return {
        "id": response.request_id,
        "object": "list",
        "model": response.model,
        "results": results,
        "usage": _usage(response),
    }


def _usage(response: Any) -> dict[str, int]:
    return dict.fromkeys(("prompt_tokens", "total_tokens"), response.usage.prompt_tokens)


def _numbers(values: bytes, format: str) -> Any:
    if format == "base64":
        return base64.b64encode(values).decode()
    return array("f", values).tolist()


def _set_texts(request: Any, name: str, value: Any, path: str) -> None:
    """Set the repeated field `name` to the texts in `value`, the field `path` of a body."""
    value = [value] if isinstance(value, str) else value
    check_entries(path, value)
    if not isinstance(value, list) or not value:
        raise BadField(f"{path}: must be a text or a list of texts")
    field = request.DESCRIPTOR.fields_by_name[name]
    for position, text in enumerate(value):
        if isinstance(text, int | list):
            raise BadField(
                f"{path}: token ids are not supported; send the text "
                "(OpenAIEmbeddings of LangChain: check_embedding_ctx_length=False)"
            )
        add_value(getattr(request, name), text, field, f"{path}[{position}]")


def _set_fields(request: Any, fields: Mapping[str, Any], known_fields: Sequence[str]) -> None:
    for name, value in fields.items():
        if name not in known_fields:
            raise BadField(f"{name}: is not supported; leave it out")
        set_field(request, name, value)
