"""Validates requests: each becomes a `ValidRequest`, or one error that names every wrong field."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from google.protobuf.message import Message

from gateway.identity.caller import Caller
from gateway.identity.resume_token import ResumeKey
from gateway.models.catalog import Catalog
from gateway.models.tools import ToolUse
from gateway.validation.conversation import (
    Conversation,
    FieldViolations,
    ValidAudio,
    audio_of,
    check_vocabulary,
    conversation_of,
    model_among,
    tool_use_of,
    tools_of,
)
from gateway.validation.options import check_options
from sluice.defaults import (
    AUTO,
    LABEL_KEY_CHARS_MAX,
    LABEL_VALUE_CHARS_MAX,
    LABELS_BYTES_MAX,
    LABELS_MAX,
    labels_bytes,
)
from sluice.errors import InvalidRequest
from sluice.v1 import inference_pb2 as pb
from sluice.wire.clock import ms_of
from sluice.wire.tokens import VisibleToken, tokens_of

MAX_KEY_CHARS: Final = 128
MAX_GATHER_S: Final = 3600
WORKLOAD_LABEL: Final = "task"
"""The label that names the workload of a request."""


UNSTATED_CLASS: Final = "standard"
"""The class of calls whose message has no priority, such as CountTokens."""
CONSTRAINTS: Final = {"json_schema": "a JSON schema", "regex": "a regular expression"}
"""What constraints are, by their fields."""
MAX_BIAS: Final = 100
MAX_ANSWERS: Final = 16
RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.5, 2),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "top_k": (0, 1 << 20),
    "logprobs": (0, 20),
    "n": (1, MAX_ANSWERS),
}
"""What sampling parameters may be, where they are set."""
MOST: Final[Mapping[str, tuple[int, str]]] = {
    "stop": (8, "strings"),
    "stop_token_ids": (32, "tokens"),
    "logit_bias": (1024, "tokens"),
}
"""How many of them a request may have."""
MAX_STOP_CHARS: Final = 64
TEXTS_MAX: Final = 2048
"""Texts of one request; each is a row."""
_DOES: Final = {"embedding": "computes embeddings", "reranker": "scores documents"}
"""What models do that callers may name and that answer no prompts, by engine."""
_LEAST_URGENT: Final = "bulk"
CLASSES_OF: Final[Mapping[int, str]] = {
    pb.PRIORITY_UNSPECIFIED: "interactive",
    pb.PRIORITY_INTERACTIVE: "interactive",
    pb.PRIORITY_STANDARD: "standard",
    pb.PRIORITY_BULK: "bulk",
}


@dataclass
class ValidRequest:
    """A request that is valid as far as can be known before it is routed and tokenized."""

    conversation: Conversation
    caller: Caller
    labels: Mapping[str, str]
    timeout_s: float
    model: str | None = None
    """None: the router chooses."""
    priority_class: str = UNSTATED_CLASS
    sampling: pb.SamplingParams = field(default_factory=pb.SamplingParams)
    """Empty where no answer is wanted."""
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
    coalesce_ms: int | None = None
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
    request: pb.GenerateRequest,
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
    """
    found = FieldViolations()
    conversation = conversation_of(request, found)
    tools = tool_use_of(request, found)
    variables = check_options(request, found)
    if tools is not None or variables:
        offered = () if tools is None else tools.tools
        conversation = replace(conversation, tools=offered, variables=variables)
    sampling = sampling_of(request.sampling, catalog.max_answer_tokens(request.model), found)
    check_priority_and_labels(request, found)
    found.check(
        len(request.idempotency_key) <= MAX_KEY_CHARS,
        "idempotency_key",
        f"must have at most {MAX_KEY_CHARS} characters",
    )
    coalesce_ms = None
    if request.HasField("gather"):
        asked, most = ms_of(request.gather), 1000 * MAX_GATHER_S
        found.check(0 <= asked <= most, "gather", f"must be 0 to {MAX_GATHER_S} s")
        coalesce_ms = round(asked)
    resume: tuple[VisibleToken, ...] = ()
    if request.HasField("resume"):
        if request.resume.HasField("seed") and not sampling.HasField("seed"):
            sampling.seed = request.resume.seed
        resume = _resumed(request, sampling, catalog, found)
    audio = None
    if request.WhichOneof("input") == "audio":
        audio, model = audio_of(request, catalog, audio_max_s, found)
    else:
        model = prompt_model(request.model, catalog, found)
    found.raise_if_any()
    fingerprint = fingerprint_of(request)
    version = ""
    if resume:
        versions = catalog.task_names(request.resume.model or request.model)
        version = _issued_by(request, resume, sampling, fingerprint, resume_key, versions)
    return ValidRequest(
        conversation=conversation,
        model=model,
        priority_class=CLASSES_OF[request.priority],
        sampling=sampling,
        labels=dict(request.labels) if request.labels else {},
        # Tenants do not share keys. A tenant's name has no space.
        key=request.idempotency_key and f"{caller.tenant} {request.idempotency_key}",
        key_is_shared=bool(request.idempotency_key) and not request.idempotency_key_generated,
        fingerprint=fingerprint,
        resume=resume,
        timeout_s=timeout_s,
        caller=caller,
        allow_degraded=_allows_degraded(request, model) and audio is None,
        accept_replace=request.accept_replace,
        coalesce_ms=coalesce_ms,
        resume_model=request.resume.model,
        resume_version=version,
        tools=tools,
        audio=audio,
    )


def _allows_degraded(request: pb.GenerateRequest, model: str | None) -> bool:
    """Return whether a fallback may answer: unless the caller says so, only where the gateway chooses the model."""
    return request.allow_degraded if request.HasField("allow_degraded") else model is None


def class_of(message: Message) -> str:
    """The class of a call, for limits that come before validation; one with an unknown priority is bulk."""
    priority = getattr(message, "priority", None)
    if isinstance(message, pb.GenerateBatchRequest) and not priority:
        return UNSTATED_CLASS
    return UNSTATED_CLASS if priority is None else CLASSES_OF.get(priority, _LEAST_URGENT)


def check_labels(labels: Mapping[str, str]) -> None:
    """Raises InvalidRequest for labels that are too many or too long."""
    found = FieldViolations()
    _check_labels(labels, found)
    found.raise_if_any()


def in_vocabulary(token_ids: Iterable[VisibleToken], size: int) -> bool:
    """Whether all are tokens of a model, except those that were hidden from the caller."""
    return all(token is None or token < size for token in token_ids)


def prompt_model(name: str, catalog: Catalog, found: FieldViolations) -> str | None:
    """The model that a request names for its prompt; as `model_among`."""
    known, wrong = ", ".join(catalog.reading), f"{name} takes audio, and no prompts"
    if name in catalog.callable and name not in catalog.answering:
        does = _DOES[catalog[name].settings.engine]
        wrong = f'{name} {does}; prompts are answered by {known}, or "{AUTO}"'
    none = "no model of this mesh takes prompts"
    return model_among(catalog.reading, name, catalog, found, none, wrong, routed=True)


def check_priority_and_labels(
    request: pb.GenerateRequest | pb.EmbedRequest | pb.RerankRequest | pb.ScoreRequest,
    found: FieldViolations,
) -> None:
    """What is wrong with priority and labels of ``request`` goes into ``found``."""
    found.check(request.priority in CLASSES_OF, "priority", "is none of the known priorities")
    if request.labels:
        _check_labels(request.labels, found)


def _check_labels(labels: Mapping[str, str], found: FieldViolations) -> None:
    if len(labels) > LABELS_MAX:
        found.add("labels", f"has more than {LABELS_MAX} entries")
        return
    for key, value in labels.items():
        field = f"labels.{key}" if key else "labels"
        found.check(
            1 <= len(key) <= LABEL_KEY_CHARS_MAX,
            field,
            f"the key has {len(key)} characters; send 1 to {LABEL_KEY_CHARS_MAX}",
        )
        found.check(
            len(value) <= LABEL_VALUE_CHARS_MAX,
            field,
            f"has {len(value)} characters; send at most {LABEL_VALUE_CHARS_MAX}",
        )
    size = labels_bytes(labels)
    found.check(
        size <= LABELS_BYTES_MAX,
        "labels",
        f"have {size} bytes; send at most {LABELS_BYTES_MAX} in keys and values together",
    )


def sampling_of(
    params: pb.SamplingParams, max_answer_tokens: int, found: FieldViolations
) -> pb.SamplingParams:
    """A copy with all defaults but those that depend on the model; what is wrong goes into ``found``.

    Whether a constraint can be enforced is checked after admission, because it takes longer than all else.
    """
    sampling = pb.SamplingParams(top_p=1.0, repetition_penalty=1.0)
    too_many = [name for name, (most, _) in MOST.items() if len(getattr(params, name)) > most]
    for name in too_many:
        found.add(f"sampling.{name}", "has more than {} {}".format(*MOST[name]))
    if too_many:  # a copy of a million costs more than the refusal
        return sampling
    sampling.MergeFrom(params)
    _check_numbers(sampling, max_answer_tokens, found)
    _check_ends(sampling, max_answer_tokens, found)
    return sampling


def _check_numbers(s: pb.SamplingParams, max_answer_tokens: int, found: FieldViolations) -> None:
    # Comparisons with NaN are false, so NaN fails these.
    ranges = {"max_tokens": (1, max_answer_tokens), **RANGES}
    for given, value in s.ListFields():
        bounds = ranges.get(given.name)
        if bounds is not None and not bounds[0] <= value <= bounds[1]:
            found.add(f"sampling.{given.name}", f"must be in [{bounds[0]}, {bounds[1]}]")
    biases = s.logit_bias.values()
    if biases and not all(-MAX_BIAS <= bias <= MAX_BIAS for bias in biases):
        found.add("sampling.logit_bias", f"values must be in [-{MAX_BIAS}, {MAX_BIAS}]")


def _check_ends(s: pb.SamplingParams, max_answer_tokens: int, found: FieldViolations) -> None:
    """What says where an answer ends: a constraint does so alone."""
    limit, kind = s.max_tokens or max_answer_tokens, s.WhichOneof("constraint")
    found.check(
        s.min_tokens <= limit, "sampling.min_tokens", f"must be at most max_tokens, {limit}"
    )
    if kind is not None:
        beside = f"cannot be combined with {CONSTRAINTS.get(kind, '')}, which determines where the answer ends"
        # An answer that is complete by its constraint but must not end yet could not continue.
        found.check(not s.min_tokens, "sampling.min_tokens", beside)
        found.check(not s.stop_token_ids, "sampling.stop_token_ids", beside)
    for index, stop in enumerate(s.stop):
        found.check(
            1 <= len(stop) <= MAX_STOP_CHARS,
            f"sampling.stop[{index}]",
            f"must have 1 to {MAX_STOP_CHARS} characters",
        )


def _resumed(
    request: pb.GenerateRequest,
    sampling: pb.SamplingParams,
    catalog: Catalog,
    found: FieldViolations,
) -> tuple[VisibleToken, ...]:
    """The tokens that the caller holds."""
    resume = request.resume
    found.check(sampling.n <= 1, "resume", "continues one answer, not n: ask again without it")
    limit = sampling.max_tokens or catalog.max_answer_tokens(request.model)
    if max(len(resume.token_ids), len(resume.hidden_indexes)) > limit:
        found.add("resume.token_ids", f"has more tokens than the limit of {limit}")
        return ()
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
        f"no model {resume.model[:64]!r}; there are {known}",
    )
    return tokens_of(resume)


def _issued_by(
    request: pb.GenerateRequest,
    held: Sequence[VisibleToken],
    sampling: pb.SamplingParams,
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


_NO_CONTENT: Final = ("idempotency_key", "idempotency_key_generated", "resume", "gather")


def fingerprint_of(request: pb.GenerateRequest) -> bytes:
    """A hash of the content: without the key, what the caller has received, and how it wants to receive the rest."""
    asked, extra = request, request.HasField("resume") or request.HasField("gather")
    if extra or request.idempotency_key or request.idempotency_key_generated:
        asked = pb.GenerateRequest()
        asked.CopyFrom(request)
        for field in _NO_CONTENT:
            asked.ClearField(field)
    return hashlib.sha256(asked.SerializeToString(deterministic=True)).digest()


# Requests that want no answer: about texts (Embed, Rerank, Score), and the tokens of a prompt.


def validate_embed(
    request: pb.EmbedRequest, catalog: Catalog, timeout_s: float, caller: Caller
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
    request: pb.RerankRequest, catalog: Catalog, timeout_s: float, caller: Caller
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
    request: pb.ScoreRequest, catalog: Catalog, timeout_s: float, caller: Caller
) -> ValidRequest:
    """As `validate_embed`."""
    found = FieldViolations()
    sent = tuple(tuple(one.token_ids) for one in request.token_answers)
    if sent:
        _check_tokens(request, sent, found)
    else:
        _check_texts("answers", request.answers, found)
    most = RANGES["logprobs"][1]
    found.check(request.alternatives <= most, "alternatives", f"must be in [0, {most}]")
    asked = Conversation((), raw=request.raw_prompt)
    if request.WhichOneof("input") is not None:
        asked = conversation_of(request, found)
    known, none = catalog.of_engine("transformers"), "no model of this mesh gives log-probabilities"
    wrong = f"gives no log-probabilities; known: {', '.join(known)}, or {AUTO}"
    model = model_among(known, request.model, catalog, found, none, wrong, routed=True)
    answers = ("",) * len(sent) if sent else tuple(request.answers)
    said = replace(
        asked, answers=answers, answer_token_ids=sent, vocabulary=request.model if sent else ""
    )
    return _valid(request, said, model, timeout_s, caller, found)


def _check_tokens(
    request: pb.ScoreRequest, sent: Sequence[Sequence[int]], found: FieldViolations
) -> None:
    found.check(not request.answers, "answers", "cannot be combined with token_answers")
    found.check(len(sent) <= TEXTS_MAX, "token_answers", f"must have 1 to {TEXTS_MAX} entries")
    found.check(all(sent), "token_answers", "has one without tokens; leave it out")
    check_vocabulary(request.model, found)


def _check_texts(field: str, texts: Sequence[str], found: FieldViolations) -> None:
    """Raises for too many at once: a message has room for a million."""
    found.check(0 < len(texts) <= TEXTS_MAX, field, f"must have 1 to {TEXTS_MAX} entries")
    if len(texts) > TEXTS_MAX:
        found.raise_if_any()
    for place, text in enumerate(texts):
        found.check(bool(text.strip()), f"{field}[{place}]", "must not be empty")


def _only_model(name: str, catalog: Catalog, engine: str, found: FieldViolations) -> str | None:
    """The named model, else the only one with ``engine``; as `model_among`."""
    known = catalog.of_engine(engine)
    none = f"no model of this mesh {_DOES[engine]}; configure one with engine: {engine}"
    wrong = f"must be one with engine {engine}: {', '.join(known)}" if known else none
    return model_among(known, name, catalog, found, none, wrong)


def _check_embedding(
    request: pb.EmbedRequest, catalog: Catalog, model: str, found: FieldViolations
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
    request: pb.EmbedRequest | pb.RerankRequest | pb.ScoreRequest,
    texts: Conversation,
    model: str | None,
    timeout_s: float,
    caller: Caller,
    found: FieldViolations,
) -> ValidRequest:
    """The request whose ``texts`` are worked on one by one; ``found`` has what is wrong with them.

    Raises:
        InvalidRequest: anything is; the error names every wrong field.
    """
    check_priority_and_labels(request, found)
    found.raise_if_any()
    priority_class = CLASSES_OF[request.priority]
    return ValidRequest(texts, caller, dict(request.labels), timeout_s, model, priority_class)


def validate_count(
    request: pb.CountTokensRequest, catalog: Catalog, timeout_s: float, caller: Caller
) -> ValidRequest:
    """As `validate`, of a request to count."""
    found = FieldViolations()
    conversation = conversation_of(request, found)
    conversation = replace(conversation, tools=tools_of(request.tools, found))
    found.check(not (request.tools and request.raw_prompt), "tools", "need the chat template")
    model = prompt_model(request.model, catalog, found)
    found.raise_if_any()
    return ValidRequest(conversation, caller, {}, timeout_s, model)
