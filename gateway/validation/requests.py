"""Validates requests: each becomes a `ValidRequest`, or one error that names every wrong field.

The turns of requests about texts (Embed, Rerank, Score) are the texts.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from google.protobuf.message import Message

from gateway.identity.caller import Caller
from gateway.identity.resume_token import ResumeKey
from gateway.models.catalog import Catalog
from gateway.tools.tool import ToolUse
from gateway.validation.audio import ValidAudio, audio_of, hearing_model
from gateway.validation.conversation import ASSISTANT, USER, Conversation, Turn, conversation_of
from gateway.validation.fields import FieldViolations, sampling_of
from gateway.validation.tools import tool_use_of, tools_of
from sluice.defaults import AUTO, LABEL_KEY_CHARS_MAX, LABEL_VALUE_CHARS_MAX, LABELS_MAX
from sluice.errors import DeadlinePassed, InvalidRequest, UnknownModel
from sluice.v1 import inference_pb2
from sluice.v1.inference_pb2 import (
    CountTokensRequest,
    EmbedRequest,
    GenerateRequest,
    RerankRequest,
    SamplingParams,
    ScoreRequest,
)
from sluice.wire.tokens import VisibleToken, tokens_of

MAX_KEY_CHARS: Final = 128
MAX_GATHER_S: Final = 3600
TEXTS_MAX: Final = 2048
"""Texts of one request; each is a row."""
WORKLOAD_LABEL: Final = "task"
"""The label that names the workload of a request."""


UNSTATED_CLASS: Final = "standard"
"""The class of calls whose message has no priority, such as CountTokens."""
_DOES: Final = {"embedding": "computes embeddings", "reranker": "scores documents"}
"""What models do that callers may name and that answer no prompts, by engine."""
_LEAST_URGENT: Final = "bulk"
_CLASSES: Final[Mapping[int, str]] = {
    inference_pb2.PRIORITY_UNSPECIFIED: "interactive",
    inference_pb2.PRIORITY_INTERACTIVE: "interactive",
    inference_pb2.PRIORITY_STANDARD: "standard",
    inference_pb2.PRIORITY_BULK: "bulk",
}


@dataclass(frozen=True)
class ValidRequest:
    """A request that is valid as far as can be known before it is routed and tokenized."""

    conversation: Conversation
    model: str | None
    """None: the router chooses."""
    priority_class: str
    sampling: SamplingParams
    labels: Mapping[str, str]
    timeout_s: float
    caller: Caller
    key: str = ""
    """Idempotency key with the tenant; empty without one."""
    key_is_shared: bool = False
    """Whether other gateways may get the key."""
    fingerprint: bytes = b""
    """Equal for requests with the same content."""
    resume: tuple[VisibleToken, ...] = ()
    """Tokens of the answer that the caller has received."""
    allow_degraded: bool = False
    accept_replace: bool = False
    gather_ms: int | None = None
    """How long tokens may be gathered before they are sent; None: the operator says."""
    resume_model: str = ""
    """The model that those tokens came from; empty: not named."""
    resume_version: str = ""
    """What tasks call the version of the model that those tokens came from."""
    tools: ToolUse | None = None
    """What the answer may call; None: nothing."""
    audio: ValidAudio | None = None
    """What the model hears; the conversation is the text that comes before it."""
    answer_index: int = 0
    """Which of several answers to the caller's request it is for."""
    route_key: str = ""
    """What decides about shares of the traffic; empty: the request id."""

    @property
    def seed_of_key(self) -> int | None:
        """The seed where the caller names none: the same at every gateway. None without a key."""
        if not self.key:
            return None
        digest = hashlib.sha256(self.key.encode() + self.fingerprint).digest()
        return int.from_bytes(digest[:8]) >> 1

    @property
    def tenant(self) -> str:
        """Whose request it is."""
        return self.caller.tenant

    @property
    def workload(self) -> str:
        """The workload; may be empty."""
        return self.labels.get(WORKLOAD_LABEL, "")


def validate(
    request: GenerateRequest,
    catalog: Catalog,
    timeout_s: float,
    caller: Caller,
    resume_key: ResumeKey,
    audio_max_s: float = 0.0,
) -> ValidRequest:
    """Checks all of ``request``, which may take ``timeout_s`` from now on.

    Raises:
        InvalidRequest: fields are wrong; the error names every one.
        UnknownModel: only the model is wrong.
        DeadlinePassed: no time is left.
    """
    if timeout_s <= 0:
        raise DeadlinePassed("the deadline passed before the request arrived")
    found = FieldViolations()
    conversation = conversation_of(request, found)
    audio = None
    if request.WhichOneof("input") == "audio":
        audio = audio_of(request, catalog, audio_max_s, found)
    tools = tool_use_of(request, found)
    if tools is not None:
        conversation = replace(conversation, tools=tools.tools)
    sampling = sampling_of(request.sampling, catalog.max_answer_tokens(request.model), found)
    _check_priority_and_labels(request, found)
    found.check(
        len(request.idempotency_key) <= MAX_KEY_CHARS,
        "idempotency_key",
        f"must have at most {MAX_KEY_CHARS} characters",
    )
    gather_ms = None
    if request.HasField("gather"):
        gather_s = request.gather.seconds + request.gather.nanos / 1e9
        found.check(0 <= gather_s <= MAX_GATHER_S, "gather", f"must be 0 to {MAX_GATHER_S} s")
        gather_ms = round(1000 * gather_s)
    resume: tuple[VisibleToken, ...] = ()
    if request.HasField("resume"):
        resume = _check_resume(request, sampling, catalog, found)
    choose = _model if audio is None else hearing_model
    model = choose(request.model, catalog, found)
    fingerprint = fingerprint_of(request)
    version = ""
    if resume:
        versions = catalog.task_names(request.resume.model or request.model)
        version = _issued_by(request, resume, sampling, fingerprint, resume_key, versions)
    return ValidRequest(
        conversation=conversation,
        model=model,
        priority_class=_CLASSES[request.priority],
        sampling=sampling,
        labels=dict(request.labels),
        # Tenants do not share keys. A tenant's name has no space.
        key=request.idempotency_key and f"{caller.tenant} {request.idempotency_key}",
        key_is_shared=bool(request.idempotency_key) and not request.idempotency_key_generated,
        fingerprint=fingerprint,
        resume=resume,
        timeout_s=timeout_s,
        caller=caller,
        allow_degraded=request.allow_degraded and audio is None,
        accept_replace=request.accept_replace,
        gather_ms=gather_ms,
        resume_model=request.resume.model,
        resume_version=version,
        tools=tools,
        audio=audio,
    )


def validate_embed(
    request: EmbedRequest, catalog: Catalog, timeout_s: float, caller: Caller
) -> ValidRequest:
    """Checks all of ``request``; raises as `validate`."""
    found = FieldViolations()
    _check_texts("texts", request.texts, found)
    model = _only_model(request.model, catalog, "embedding", found)
    if model is not None:
        _check_embedding(request, catalog, model, found)
    return _valid(request, _said(USER, request.texts), model, timeout_s, caller, found)


def validate_rerank(
    request: RerankRequest, catalog: Catalog, timeout_s: float, caller: Caller
) -> ValidRequest:
    """As `validate_embed`; the first text is the query."""
    found = FieldViolations()
    found.check(bool(request.query.strip()), "query", "must not be empty")
    _check_texts("documents", request.documents, found)
    model = _only_model(request.model, catalog, "reranker", found)
    texts = _said(USER, [request.query, *request.documents])
    return _valid(request, texts, model, timeout_s, caller, found)


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
    return _valid(request, said, model, timeout_s, caller, found)


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
    _check_priority_and_labels(request, found)
    found.raise_if_any()
    priority_class = _CLASSES[request.priority]
    return request_about(texts, caller, request.labels, timeout_s, model, priority_class)


def request_about(
    texts: Conversation,
    caller: Caller,
    labels: Mapping[str, str],
    timeout_s: float,
    model: str | None = None,
    priority_class: str = UNSTATED_CLASS,
) -> ValidRequest:
    """A request for no answer: something is done with its ``texts``."""
    return ValidRequest(
        conversation=texts,
        model=model,
        priority_class=priority_class,
        sampling=SamplingParams(),
        labels=dict(labels),
        timeout_s=timeout_s,
        caller=caller,
    )


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
    return conversation, _model(request.model, catalog, found)


def class_of(message: Message) -> str:
    """The class of a call, for limits that come before validation; one with an unknown priority is bulk."""
    priority = getattr(message, "priority", None)
    return UNSTATED_CLASS if priority is None else _CLASSES.get(priority, _LEAST_URGENT)


def check_labels(labels: Mapping[str, str]) -> None:
    """Raises InvalidRequest for labels that are too many or too long."""
    found = FieldViolations()
    _check_labels(labels, found)
    found.raise_if_any()


def in_vocabulary(token_ids: Iterable[VisibleToken], size: int) -> bool:
    """Whether all are tokens of a model, except those that were hidden from the caller."""
    return all(token is None or token < size for token in token_ids)


def _model(name: str, catalog: Catalog, found: FieldViolations) -> str | None:
    """The named model, None for "auto". The last check: raises what was found."""
    if name in catalog.hearing:
        found.add("model", f"{name} takes audio, and no prompts")
        found.raise_if_any()
    if not catalog.reading:
        raise UnknownModel("no model of this mesh takes prompts", metadata={"models": ""})
    if name not in ("", AUTO, *catalog.reading):
        known = ", ".join(catalog.reading)
        if name in catalog.callable:
            does = _DOES[catalog[name].settings.engine]
            found.add("model", f'{name} {does}; prompts are answered by {known}, or "{AUTO}"')
            found.raise_if_any()
        message = f'there is no model of that name; known: {known}, or "{AUTO}"'
        if not found:
            raise UnknownModel(message, metadata={"models": known})
        found.add("model", message)
    found.raise_if_any()
    return None if name in ("", AUTO) else name


def _check_priority_and_labels(
    request: GenerateRequest | EmbedRequest | RerankRequest | ScoreRequest, found: FieldViolations
) -> None:
    found.check(request.priority in _CLASSES, "priority", "is none of the known priorities")
    if request.labels:
        _check_labels(request.labels, found)


def _check_labels(labels: Mapping[str, str], found: FieldViolations) -> None:
    if len(labels) > LABELS_MAX:
        found.add("labels", f"has more than {LABELS_MAX} entries")
        return
    found.check(
        all(
            1 <= len(key) <= LABEL_KEY_CHARS_MAX and len(value) <= LABEL_VALUE_CHARS_MAX
            for key, value in labels.items()
        ),
        "labels",
        f"keys must have 1 to {LABEL_KEY_CHARS_MAX} characters, values at most {LABEL_VALUE_CHARS_MAX}",
    )


def _check_resume(
    request: GenerateRequest, sampling: SamplingParams, catalog: Catalog, found: FieldViolations
) -> tuple[VisibleToken, ...]:
    """The tokens that the caller holds. Also takes the seed from ``resume`` where ``sampling`` has none."""
    resume = request.resume
    found.check(sampling.n <= 1, "resume", "continues one answer, not n: ask again without it")
    limit = sampling.max_tokens or catalog.max_answer_tokens(request.model)
    if max(len(resume.token_ids), len(resume.hidden_indexes)) > limit:
        found.add("resume.token_ids", f"has more tokens than the limit of {limit}")
        return ()
    if resume.HasField("seed") and not sampling.HasField("seed"):
        sampling.seed = resume.seed
    if resume.token_ids and sampling.temperature > 0 and not sampling.HasField("seed"):
        found.add("resume.seed", "is needed to continue a sampled answer: take it from Started")
    vocab_size = catalog.vocab_size(request.model)
    found.check(
        in_vocabulary(resume.token_ids, vocab_size),
        "resume.token_ids",
        f"must be below {vocab_size}, the vocabulary",
    )
    known = ", ".join(catalog.answering)
    found.check(
        resume.model in ("", *catalog.answering),
        "resume.model",
        f"there is no model of that name; known: {known}",
    )
    return tokens_of(resume)


def _issued_by(
    request: GenerateRequest,
    held: Sequence[VisibleToken],
    sampling: SamplingParams,
    fingerprint: bytes,
    resume_key: ResumeKey,
    versions: Sequence[str],
) -> str:
    """Which of ``versions`` the tokens are of.

    Raises:
        InvalidRequest: this mesh did not send them in answer to this request.
    """
    seed = sampling.seed if sampling.temperature > 0 else 0
    for version in versions:
        if resume_key.issued(request.resume.resume_token, fingerprint, version, seed, held):
            return version
    raise InvalidRequest.of(
        "resume.resume_token",
        "does not belong to these tokens of an answer to this request: take it from the last delta and model and seed "
        "from Started, or ask again without resume",
    )


def fingerprint_of(request: GenerateRequest) -> bytes:
    """A hash of the content: without the key, what the caller has received, and how it wants to receive the rest."""
    asked, extra = request, request.HasField("resume") or request.HasField("gather")
    if extra or request.idempotency_key or request.idempotency_key_generated:
        asked = GenerateRequest()
        asked.CopyFrom(request)
        asked.ClearField("idempotency_key")
        asked.ClearField("idempotency_key_generated")
        asked.ClearField("resume")
        asked.ClearField("gather")
    return hashlib.sha256(asked.SerializeToString(deterministic=True)).digest()
