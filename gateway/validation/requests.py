"""Validate requests: each becomes a `ValidRequest`, or one error that names the wrong fields."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from google.protobuf.message import Message

from gateway.identity.caller import Caller
from gateway.identity.resume_token import ResumeKey
from gateway.models.catalog import Catalog
from gateway.models.tools import ToolUse
from gateway.validation.conversation import (
    Conversation,
    FieldViolations,
    conversation_of,
    model_among,
)
from gateway.validation.options import check_options, tool_use_of
from gateway.validation.speech import ValidAudio, audio_of
from sluice import defaults
from sluice.defaults import AUTO
from sluice.errors import InvalidRequest
from sluice.v1 import inference_pb2 as pb
from sluice.wire.clock import ms_of
from sluice.wire.tokens import VisibleToken, tokens_of

MAX_KEY_CHARS: Final = 128
"""Most characters of an idempotency key."""
MAX_COALESCE_S: Final = 3600
"""Longest time for which a request may have its tokens coalesced, in seconds."""
WORKLOAD_LABEL: Final = "task"
"""Label that names the workload of a request."""
UNSTATED_CLASS: Final = "standard"
"""Class of calls whose message has no field for a priority, such as CountTokens, and of batches that set none."""
CONSTRAINTS: Final = {"json_schema": "a JSON schema", "regex": "a regular expression"}
"""Names of constraints, by field."""
MAX_BIAS: Final = 100
"""Largest absolute bias of a token, as in OpenAI's API."""
MAX_ANSWERS: Final = 16
"""Most answers to one request."""
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
"""Ranges of sampling parameters that are set."""
MOST: Final[Mapping[str, tuple[int, str]]] = {
    "stop": (8, "strings"),
    "stop_token_ids": (32, "tokens"),
    "logit_bias": (1024, "tokens"),
}
"""Most entries of repeated sampling parameters."""
MAX_STOP_CHARS: Final = 64
"""Longest stop string, in characters."""
DOES: Final = {"embedding": "computes embeddings", "reranker": "scores documents"}
"""Descriptions of models that do not answer prompts, by engine, for errors."""
_LEAST_URGENT: Final = "bulk"
CLASSES_OF: Final[Mapping[int, str]] = {
    pb.PRIORITY_UNSPECIFIED: "interactive",
    pb.PRIORITY_INTERACTIVE: "interactive",
    pb.PRIORITY_STANDARD: "standard",
    pb.PRIORITY_BULK: "bulk",
}
"""Class of each priority. A request that sets none is interactive: usually a person waits for it."""


@dataclass
class ValidRequest:
    """A request that is valid as far as can be known before routing and tokenization.

    Attributes:
        conversation: Input of the model.
        caller: Identity of the caller.
        labels: Labels of the request.
        timeout_s: Time that the request may take, in seconds.
        model: Name of the model; None if the router chooses.
        priority_class: Class of the request.
        sampling: Sampling parameters; empty if no answer is generated.
        key: Idempotency key with the tenant; may be empty.
        key_is_shared: Whether other gateways may receive requests with the key.
        fingerprint: Hash of the content, see `fingerprint_of`.
        resume: Tokens of the answer that the caller has received.
        allow_degraded: Whether a fallback may answer.
        accept_replace: Whether the caller's text may be replaced by another model's answer.
        coalesce_ms: How long to coalesce tokens before they are sent; None for the operator's setting.
        resume_model: Model of the resumed tokens; may be empty.
        resume_version: Name in tasks of the version of the model of the resumed tokens.
        tools: Which tools the answer may call; None for none.
        audio: Speech for the model; the conversation is then the text that precedes it.
        answer_index: Index of the answer, if the caller asked for several.
        route_key: Key that decides about shares of the traffic; empty for the request id.
        tenant: Tenant of the caller.
        workload: Workload that the labels name; may be empty.
    """

    conversation: Conversation
    caller: Caller
    labels: Mapping[str, str]
    timeout_s: float
    model: str | None = None
    priority_class: str = UNSTATED_CLASS
    sampling: pb.SamplingParams = field(default_factory=pb.SamplingParams)
    key: str = ""
    key_is_shared: bool = False
    fingerprint: bytes = b""
    resume: tuple[VisibleToken, ...] = ()
    allow_degraded: bool = False
    accept_replace: bool = False
    coalesce_ms: int | None = None
    resume_model: str = ""
    resume_version: str = ""
    tools: ToolUse | None = None
    audio: ValidAudio | None = None
    answer_index: int = 0
    route_key: str = ""
    tenant: str = field(init=False)
    workload: str = field(init=False)

    def __post_init__(self) -> None:
        self.tenant = self.caller.tenant
        self.workload = self.labels.get(WORKLOAD_LABEL, "")

    @property
    def seed_of_key(self) -> int:
        """Seed for a request that has an idempotency key and no seed, equal at every gateway."""
        digest = hashlib.sha256(self.key.encode() + self.fingerprint).digest()
        return int.from_bytes(digest[:8]) >> 1


def validate(
    request: pb.GenerateRequest,
    catalog: Catalog,
    timeout_s: float,
    caller: Caller,
    resume_key: ResumeKey,
    audio_max_s: float = 0.0,
) -> ValidRequest:
    """Check all fields of `request`, which may take `timeout_s` seconds from now on.

    Raises:
        InvalidRequest: Fields are wrong; the error names the first `conversation.NAMED_MAX`.
        UnknownModel: Only the model is wrong; or no model takes the input, whatever else is wrong.
    """
    violations = FieldViolations()
    conversation = conversation_of(request, violations)
    tools = None
    if request.tools or request.HasField("tool_choice") or request.HasField("parallel_tool_calls"):
        tools = tool_use_of(request, violations)
    sent, variables = request.sampling, dict[str, Any]()
    if sent.reasoning_effort or sent.response_format or sent.chat_template_kwargs:
        variables = check_options(request, violations)
    if tools is not None or variables:
        offered = () if tools is None else tools.tools
        conversation = replace(conversation, tools=offered, variables=variables)
    answer_limit = catalog.answer_limits.get(request.model, catalog.answer_limit)
    sampling = sampling_of(sent, answer_limit, violations)
    check_priority_and_labels(request, violations)
    if key := request.idempotency_key:
        violations.check_count("idempotency_key", len(key), MAX_KEY_CHARS, "characters")
    coalesce_ms = None
    if request.HasField("gather"):
        coalesce_ms = round(gather_ms := ms_of(request.gather))
        is_in_range = 0 <= gather_ms <= 1000 * MAX_COALESCE_S
        violations.check(is_in_range, "gather", f"must be 0 to {MAX_COALESCE_S} s")
    resume: tuple[VisibleToken, ...] = ()
    if request.HasField("resume"):
        resume = _resumed(request, sampling, catalog, violations)
    audio = None
    if request.WhichOneof("input") == "audio":
        audio, model = audio_of(request, catalog, audio_max_s, violations)
    else:
        model = prompt_model(request.model, catalog, violations)
    if violations:
        violations.raise_any()
    fingerprint, version = fingerprint_of(request), ""
    if resume:
        versions = catalog.task_names(request.resume.model or request.model)
        version = issued_by(request, resume, sampling, fingerprint, resume_key, versions)
    # By default a fallback may answer only if the gateway chooses the model.
    may_degrade = request.allow_degraded if request.HasField("allow_degraded") else model is None
    return ValidRequest(
        conversation=conversation,
        model=model,
        priority_class=CLASSES_OF[request.priority],
        sampling=sampling,
        labels=dict(request.labels) if request.labels else {},
        # Tenants do not share keys. The space separates the parts: names of tenants have none.
        key=key and f"{caller.tenant} {key}",
        key_is_shared=bool(key) and not request.idempotency_key_generated,
        fingerprint=fingerprint,
        resume=resume,
        timeout_s=timeout_s,
        caller=caller,
        allow_degraded=may_degrade and audio is None,
        accept_replace=request.accept_replace,
        coalesce_ms=coalesce_ms,
        resume_model=request.resume.model,
        resume_version=version,
        tools=tools,
        audio=audio,
    )


def class_of(message: Message) -> str:
    """Return the class of a call for limits that are checked before validation; bulk for an unknown priority."""
    priority = getattr(message, "priority", None)
    if isinstance(message, pb.GenerateBatchRequest) and not priority:
        return UNSTATED_CLASS
    return UNSTATED_CLASS if priority is None else CLASSES_OF.get(priority, _LEAST_URGENT)


def in_vocabulary(token_ids: Iterable[VisibleToken], size: int) -> bool:
    """Return whether all tokens, except those hidden from the caller, are in a vocabulary of this size."""
    return all(token is None or token < size for token in token_ids)


def prompt_model(name: str, catalog: Catalog, violations: FieldViolations) -> str | None:
    """Return the requested model for a prompt, as `model_among` does."""
    if name in catalog.reading:
        return name
    if name in ("", AUTO) and catalog.reading:
        return None
    names, wrong = ", ".join(catalog.reading), f"{name} takes audio, and no prompts"
    if name in catalog.callable and name not in catalog.answering:
        does = DOES[catalog[name].settings.engine]
        wrong = f'{name} {does}; prompts are answered by {names}, or "{AUTO}"'
    none = "no model of this mesh takes prompts"
    return model_among(catalog.reading, name, catalog, violations, none, wrong, routed=True)


def check_priority_and_labels(
    request: pb.GenerateRequest | pb.EmbedRequest | pb.RerankRequest | pb.ScoreRequest,
    violations: FieldViolations,
) -> None:
    """Add what is wrong with priority and labels of `request` to `violations`."""
    is_known = request.priority in CLASSES_OF
    violations.check(is_known, "priority", "must be interactive, standard or bulk")
    if request.labels:
        check_labels(request.labels, violations)


def check_labels(labels: Mapping[str, str], violations: FieldViolations) -> None:
    """Add what is wrong with labels to `violations`; too many are not looked at."""
    check_count = violations.check_count
    if not check_count("labels", len(labels), defaults.LABELS_MAX, "entries"):
        return
    for key, value in labels.items():
        field = f"labels.{key}" if key else "labels"
        check_count(field, len(key), defaults.LABEL_KEY_CHARS_MAX, "characters in its key", least=1)
        check_count(field, len(value), defaults.LABEL_VALUE_CHARS_MAX, "characters")
    unit = "bytes in keys and values together"
    check_count("labels", defaults.labels_bytes(labels), defaults.LABELS_BYTES_MAX, unit)


def sampling_of(
    params: pb.SamplingParams, max_answer_tokens: int, violations: FieldViolations
) -> pb.SamplingParams:
    """Return `params` with the defaults that do not depend on the model; add what is wrong to `violations`.

    If a repeated field has too many entries, nothing is copied. Constraints are compiled after admission, because that
    takes longer than all other checks.
    """
    sampling = pb.SamplingParams(top_p=1.0, repetition_penalty=1.0)
    too_many = [name for name, (most, _) in MOST.items() if len(getattr(params, name)) > most]
    for name in too_many:
        violations.add(f"sampling.{name}", "must have at most {} {}".format(*MOST[name]))
    if too_many:  # copying a million entries costs more than refusing them
        return sampling
    sampling.MergeFrom(params)
    # Comparisons with NaN are false, so NaN is out of every range.
    ranges = {"max_tokens": (1, max_answer_tokens), **RANGES}
    for parameter, value in params.ListFields():
        bounds = ranges.get(parameter.name)
        if bounds is not None and not bounds[0] <= value <= bounds[1]:
            violations.add(f"sampling.{parameter.name}", f"must be in [{bounds[0]}, {bounds[1]}]")
    biases = sampling.logit_bias.values()
    if biases and not all(-MAX_BIAS <= bias <= MAX_BIAS for bias in biases):
        violations.add("sampling.logit_bias", f"values must be in [-{MAX_BIAS}, {MAX_BIAS}]")
    if sampling.min_tokens or sampling.stop or sampling.WhichOneof("constraint"):
        _check_ends(sampling, max_answer_tokens, violations)
    return sampling


def _check_ends(s: pb.SamplingParams, max_answer_tokens: int, violations: FieldViolations) -> None:
    """Check the parameters that end an answer: a constraint excludes min_tokens and stop_token_ids."""
    check, kind, limit = violations.check, s.WhichOneof("constraint"), s.max_tokens
    limit = limit or max_answer_tokens
    check(s.min_tokens <= limit, "sampling.min_tokens", f"must be at most max_tokens, {limit}")
    if kind is not None:
        conflict = f"cannot be combined with {CONSTRAINTS.get(kind, '')}, which determines where the answer ends"
        # An answer that is complete by its constraint cannot continue up to min_tokens.
        check(not s.min_tokens, "sampling.min_tokens", conflict)
        check(not s.stop_token_ids, "sampling.stop_token_ids", conflict)
    for i, stop in enumerate(s.stop):
        violations.check_count(f"sampling.stop[{i}]", len(stop), MAX_STOP_CHARS, "characters", 1)


def _resumed(
    request: pb.GenerateRequest,
    sampling: pb.SamplingParams,
    catalog: Catalog,
    violations: FieldViolations,
) -> tuple[VisibleToken, ...]:
    """Return the tokens that the caller has received; add what is wrong to `violations`."""
    resume, check = request.resume, violations.check
    # A client that resumes knows the seed that the gateway had drawn from `Started`.
    if resume.HasField("seed") and not sampling.HasField("seed"):
        sampling.seed = resume.seed
    check(sampling.n <= 1, "resume", "continues one answer, not n: ask again without it")
    limit = sampling.max_tokens or catalog.answer_limits.get(request.model, catalog.answer_limit)
    tokens = max(len(resume.token_ids), len(resume.hidden_indexes))
    if not violations.check_count("resume.token_ids", tokens, limit, "tokens"):
        return ()
    is_drawn = resume.token_ids and sampling.temperature > 0
    needed = "is needed to continue a sampled answer: take it from Started"
    check(not is_drawn or sampling.HasField("seed"), "resume.seed", needed)
    size, models = catalog.vocab_size(request.model), catalog.answering
    is_known = in_vocabulary(resume.token_ids, size)
    check(is_known, "resume.token_ids", f"must be below {size}, the vocabulary")
    wrong = f"no model {resume.model[:64]!r}; there are {', '.join(models)}"
    check(resume.model in ("", *models), "resume.model", wrong)
    return tokens_of(resume)


def issued_by(
    request: pb.GenerateRequest,
    token_ids: Sequence[VisibleToken],
    sampling: pb.SamplingParams,
    fingerprint: bytes,
    resume_key: ResumeKey,
    versions: Sequence[str],
) -> str:
    """Return which of `versions` generated the tokens that the caller has received.

    Raises:
        InvalidRequest: This mesh did not send them in answer to this request.
    """
    # Greedy answers do not depend on the seed, so their resume tokens do not either.
    seed = sampling.seed if sampling.temperature > 0 else 0
    for version in versions:
        if resume_key.issued(request.resume.resume_token, fingerprint, version, seed, token_ids):
            return version
    raise InvalidRequest.of(
        "resume.resume_token",
        "does not belong to these tokens of an answer to this request: take it from the last delta and model and seed "
        "from Started, or ask again without resume",
    )


_NO_CONTENT: Final = ("idempotency_key", "idempotency_key_generated", "resume", "gather")
"""Fields that do not change the answer."""


def fingerprint_of(request: pb.GenerateRequest) -> bytes:
    """Return a hash of the request without idempotency key, resumed tokens and coalescing time."""
    content, extra = request, request.HasField("resume") or request.HasField("gather")
    if extra or request.idempotency_key or request.idempotency_key_generated:
        content = pb.GenerateRequest()
        content.CopyFrom(request)
        for field in _NO_CONTENT:
            content.ClearField(field)
    return hashlib.sha256(content.SerializeToString(deterministic=True)).digest()
