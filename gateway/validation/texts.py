"""Validates requests about texts: Embed, Rerank, Score. Each becomes a `ValidRequest` whose turns are the texts."""

from collections.abc import Sequence
from typing import Final

from gateway.identity.caller import Caller
from gateway.models.catalog import Catalog
from gateway.validation.conversation import ASSISTANT, USER, Conversation, Turn, conversation_of
from gateway.validation.requests import ValidRequest, valid_request
from gateway.validation.violations import FieldViolations
from sluice.defaults import AUTO
from sluice.errors import UnknownModel
from sluice.v1.inference_pb2 import EmbedRequest, RerankRequest, ScoreRequest

TEXTS_MAX: Final = 2048
"""Texts of one request; each is a row."""


def validate_embed(
    request: EmbedRequest, catalog: Catalog, timeout_s: float, caller: Caller
) -> ValidRequest:
    """Checks all of ``request``; raises as `gateway.validation.requests.validate`."""
    found = FieldViolations()
    _check_texts("texts", request.texts, found)
    model = _only_model(request.model, catalog, "embedding", found)
    if model is not None:
        _check_embedding(request, catalog, model, found)
    return valid_request(request, _said(USER, request.texts), model, timeout_s, caller, found)


def validate_rerank(
    request: RerankRequest, catalog: Catalog, timeout_s: float, caller: Caller
) -> ValidRequest:
    """As `validate_embed`; the first text is the query."""
    found = FieldViolations()
    found.check(bool(request.query.strip()), "query", "must not be empty")
    _check_texts("documents", request.documents, found)
    model = _only_model(request.model, catalog, "reranker", found)
    texts = _said(USER, [request.query, *request.documents])
    return valid_request(request, texts, model, timeout_s, caller, found)


def validate_score(
    request: ScoreRequest, catalog: Catalog, timeout_s: float, caller: Caller
) -> ValidRequest:
    """As `validate_embed`; the last texts are the answers."""
    found = FieldViolations()
    _check_texts("answers", request.answers, found)
    asked = None if request.WhichOneof("input") is None else conversation_of(request, found)
    turns = () if asked is None else asked.turns
    answers = _said(ASSISTANT, request.answers).turns
    known = catalog.of_engine("transformers")
    if not known:
        raise UnknownModel("no model of this mesh gives log-probabilities", metadata={"models": ""})
    if request.model not in ("", AUTO, *known):
        found.add("model", f"gives no log-probabilities; known: {', '.join(known)}, or {AUTO}")
    model = None if request.model in ("", AUTO) else request.model
    said = Conversation((*turns, *answers), raw=request.raw_prompt)
    return valid_request(request, said, model, timeout_s, caller, found)


def _said(role: str, texts: Sequence[str]) -> Conversation:
    return Conversation(tuple(Turn(role, text) for text in texts), raw=True)


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
    known = catalog.of_engine(engine)
    if not known or (name not in ("", AUTO) and name not in catalog.names):
        names = ", ".join(known)
        named = f"known: {names}" if known else f"configure one with engine: {engine}"
        message = f"there is no model of that name with engine {engine}; {named}"
        raise UnknownModel(message, metadata={"models": names})
    if name in known or (name in ("", AUTO) and len(known) == 1):
        return name if name in known else known[0]
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
