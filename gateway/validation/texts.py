"""Validates requests that want no answer: about texts (Embed, Rerank, Score), and the tokens of a prompt."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gateway.identity.caller import Caller
from gateway.models.catalog import Catalog
from gateway.validation.conversation import (
    Conversation,
    FieldViolations,
    conversation_of,
    tools_of,
)
from gateway.validation.requests import (
    CLASSES_OF,
    ValidRequest,
    check_priority_and_labels,
    model_of,
    named,
)
from sluice.defaults import AUTO
from sluice.errors import DeadlinePassed, UnknownModel
from sluice.v1.inference_pb2 import (
    CountTokensRequest,
    EmbedRequest,
    RerankRequest,
    ScoreRequest,
)

TEXTS_MAX: Final = 2048
"""Texts of one request; each is a row."""


def validate_embed(
    request: EmbedRequest, catalog: Catalog, timeout_s: float, caller: Caller
) -> ValidRequest:
    """Checks all of ``request``; raises as `validate`."""
    found = FieldViolations()
    _check_texts("texts", request.texts, found)
    model = _only_model(request.model, catalog, "embedding", found)
    if model is not None:
        _check_embedding(request, catalog, model, found)
    texts = Conversation((), raw=True, documents=tuple(request.texts))
    return _valid(request, texts, model, timeout_s, caller, found)


def validate_rerank(
    request: RerankRequest, catalog: Catalog, timeout_s: float, caller: Caller
) -> ValidRequest:
    """As `validate_embed`."""
    found = FieldViolations()
    found.check(bool(request.query.strip()), "query", "must not be empty")
    _check_texts("documents", request.documents, found)
    model = _only_model(request.model, catalog, "reranker", found)
    documents = tuple(request.documents)
    texts = Conversation((), raw=True, query=request.query, documents=documents)
    return _valid(request, texts, model, timeout_s, caller, found)


def validate_score(
    request: ScoreRequest, catalog: Catalog, timeout_s: float, caller: Caller
) -> ValidRequest:
    """As `validate_embed`."""
    found = FieldViolations()
    _check_texts("answers", request.answers, found)
    asked = Conversation((), raw=request.raw_prompt)
    if request.WhichOneof("input") is not None:
        asked = conversation_of(request, found)
    known = catalog.of_engine("transformers")
    if not known:
        raise UnknownModel("no model of this mesh gives log-probabilities", metadata={"models": ""})
    model = named(request.model) or None
    if model not in (None, *known):
        found.add("model", f"gives no log-probabilities; known: {', '.join(known)}, or {AUTO}")
    said = replace(asked, answers=tuple(request.answers))
    return _valid(request, said, model, timeout_s, caller, found)


def _check_texts(field: str, texts: Sequence[str], found: FieldViolations) -> None:
    """Raises for too many at once: a message has room for a million."""
    found.check(0 < len(texts) <= TEXTS_MAX, field, f"must have 1 to {TEXTS_MAX} entries")
    if len(texts) > TEXTS_MAX:
        found.raise_if_any()
    for place, text in enumerate(texts):
        found.check(bool(text.strip()), f"{field}[{place}]", "must not be empty")


def _only_model(name: str, catalog: Catalog, engine: str, found: FieldViolations) -> str | None:
    """The named model, else the only one with ``engine``; None with a violation.

    Raises:
        UnknownModel: there is none.
    """
    known, wanted = catalog.of_engine(engine), named(name)
    if not known or (wanted and wanted not in catalog.names):
        names = ", ".join(known)
        hint = f"known: {names}" if known else f"configure one with engine: {engine}"
        message = f"there is no model of that name with engine {engine}; {hint}"
        raise UnknownModel(message, metadata={"models": names})
    if wanted in known or (not wanted and len(known) == 1):
        return wanted or known[0]
    found.add("model", f"must be one with engine {engine}: {', '.join(known)}")
    return None


def _check_embedding(
    request: EmbedRequest, catalog: Catalog, model: str, found: FieldViolations
) -> None:
    served = catalog[model]
    assert served.sentence is not None, "it is an embedding model"
    prompts = served.sentence.prompts
    found.check(
        not request.prompt_name or request.prompt_name in prompts,
        "prompt_name",
        f"{model} has no such prompt; known: {', '.join(sorted(prompts))}",
    )
    size = served.sentence.size
    found.check(
        not size or request.dimensions <= size,
        "dimensions",
        f"must be at most {size}, the size of an embedding of {model}",
    )


def _valid(
    request: EmbedRequest | RerankRequest | ScoreRequest,
    texts: Conversation,
    model: str | None,
    timeout_s: float,
    caller: Caller,
    found: FieldViolations,
) -> ValidRequest:
    """The request whose ``texts`` are worked on one by one; ``found`` has what is wrong with them.

    Raises:
        InvalidRequest: anything is; the error names every wrong field.
        DeadlinePassed: no time is left.
    """
    if timeout_s <= 0:
        raise DeadlinePassed("the deadline passed before the request arrived")
    check_priority_and_labels(request, found)
    found.raise_if_any()
    priority_class = CLASSES_OF[request.priority]
    return ValidRequest(texts, caller, dict(request.labels), timeout_s, model, priority_class)


def validate_count(
    request: CountTokensRequest, catalog: Catalog
) -> tuple[Conversation, str | None]:
    """The input and the model (None for "auto") of a request to count.

    Raises:
        InvalidRequest, UnknownModel: as `validate`.
    """
    found = FieldViolations()
    conversation = conversation_of(request, found)
    conversation = replace(conversation, tools=tools_of(request.tools, found))
    found.check(not (request.tools and request.raw_prompt), "tools", "need the chat template")
    return conversation, model_of(request.model, catalog, found)
