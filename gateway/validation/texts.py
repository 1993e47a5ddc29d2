"""Validate requests that generate no answer: about texts (Embed, Rerank, Score), and to count tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gateway.identity.caller import Caller
from gateway.models.catalog import Catalog
from gateway.validation import requests
from gateway.validation.conversation import (
    Conversation,
    FieldViolations,
    check_vocabulary,
    conversation_of,
    model_among,
)
from gateway.validation.options import tools_of
from gateway.validation.requests import ValidRequest
from sluice.defaults import AUTO
from sluice.v1 import inference_pb2 as pb

TEXTS_MAX: Final = 2048
"""Most texts of one request; each becomes a run."""


def validate_embed(
    request: pb.EmbedRequest, catalog: Catalog, timeout_s: float, caller: Caller
) -> ValidRequest:
    """Check all fields of `request`; raise as `validate`."""
    violations = FieldViolations()
    _check_texts("texts", request.texts, violations)
    model = _only_model(request.model, catalog, "embedding", violations)
    if model is not None and (sentence := catalog[model].sentence) is not None:
        names = ", ".join(sorted(sentence.prompts))
        is_known = not request.prompt_name or request.prompt_name in sentence.prompts
        problem = f"{model} has no such prompt; known: {names}"
        violations.check(is_known, "prompt_name", problem)
        size = sentence.size
        problem = f"must be at most {size}, the size of an embedding of {model}"
        violations.check(not size or request.dimensions <= size, "dimensions", problem)
    texts = Conversation((), raw=True, documents=tuple(request.texts))
    return _valid(request, texts, model, timeout_s, caller, violations)


def validate_rerank(
    request: pb.RerankRequest, catalog: Catalog, timeout_s: float, caller: Caller
) -> ValidRequest:
    """Check all fields of `request`; raise as `validate`."""
    violations = FieldViolations()
    violations.check(bool(request.query.strip()), "query", "must not be empty")
    _check_texts("documents", request.documents, violations)
    model = _only_model(request.model, catalog, "reranker", violations)
    documents = tuple(request.documents)
    texts = Conversation((), raw=True, query=request.query, documents=documents)
    return _valid(request, texts, model, timeout_s, caller, violations)


def validate_score(
    request: pb.ScoreRequest, catalog: Catalog, timeout_s: float, caller: Caller
) -> ValidRequest:
    """Check all fields of `request`; raise as `validate`."""
    violations = FieldViolations()
    sent = tuple(tuple(answer.token_ids) for answer in request.token_answers)
    if sent:
        check, field = violations.check, "token_answers"
        check(not request.answers, "answers", f"cannot be combined with {field}")
        violations.check_count(field, len(sent), TEXTS_MAX, "entries", least=1)
        check(all(sent), field, "has one without tokens; leave it out")
        check_vocabulary(request.model, violations)
    else:
        _check_texts("answers", request.answers, violations)
    most = requests.RANGES["logprobs"][1]
    violations.check(request.alternatives <= most, "alternatives", f"must be in [0, {most}]")
    prompt = Conversation((), raw=request.raw_prompt)
    if request.WhichOneof("input") is not None:
        prompt = conversation_of(request, violations)
    names, none = catalog.of_engine("transformers"), "no model of this mesh gives log-probabilities"
    wrong = f"gives no log-probabilities; known: {', '.join(names)}, or {AUTO}"
    model = model_among(names, request.model, catalog, violations, none, wrong, routed=True)
    scored = replace(
        prompt,
        answers=("",) * len(sent) or tuple(request.answers),
        answer_token_ids=sent,
        vocabulary=request.model if sent else "",
    )
    return _valid(request, scored, model, timeout_s, caller, violations)


def validate_count(
    request: pb.CountTokensRequest, catalog: Catalog, timeout_s: float, caller: Caller
) -> ValidRequest:
    """Check all fields of a request to count tokens; raise as `validate`."""
    violations = FieldViolations()
    conversation = conversation_of(request, violations)
    conversation = replace(conversation, tools=tools_of(request.tools, violations))
    violations.check(not (request.tools and request.raw_prompt), "tools", "need the chat template")
    model = requests.prompt_model(request.model, catalog, violations)
    violations.raise_any()
    return ValidRequest(conversation, caller, {}, timeout_s, model)


def _check_texts(field: str, texts: Sequence[str], violations: FieldViolations) -> None:
    """Check texts; raise InvalidRequest at once if there are too many, because a message can hold a million."""
    violations.check_count(field, len(texts), TEXTS_MAX, "entries", least=1)
    if len(texts) > TEXTS_MAX:
        violations.raise_any()
    for position, text in enumerate(texts):
        violations.check(bool(text.strip()), f"{field}[{position}]", "must not be empty")


def _only_model(
    name: str, catalog: Catalog, engine: str, violations: FieldViolations
) -> str | None:
    """Return the requested model, by default the only one with this engine, as `model_among` does."""
    names = catalog.of_engine(engine)
    none = f"no model of this mesh {requests.DOES[engine]}; configure one with engine: {engine}"
    wrong = f"must be one with engine {engine}: {', '.join(names)}" if names else none
    return model_among(names, name, catalog, violations, none, wrong)


def _valid(
    request: pb.EmbedRequest | pb.RerankRequest | pb.ScoreRequest,
    texts: Conversation,
    model: str | None,
    timeout_s: float,
    caller: Caller,
    violations: FieldViolations,
) -> ValidRequest:
    """Return a request about texts; raise InvalidRequest for fields that are wrong, here or in `violations`."""
    requests.check_priority_and_labels(request, violations)
    violations.raise_any()
    priority_class = requests.CLASSES_OF[request.priority]
    return ValidRequest(texts, caller, dict(request.labels), timeout_s, model, priority_class)
