"""Fits a valid request to the model that was chosen for it: the checks that need the prompt's length."""

import secrets
from collections.abc import Sequence

from gateway.models.catalog import ServedModel
from gateway.validation.requests import ValidRequest, in_vocabulary
from gateway.validation.sampling import ValidSampling
from sluice.errors import FieldViolation, InvalidRequest, PromptTooLong
from sluice.internal.v1.task_pb2 import Sampling


def fit(request: ValidRequest, model: ServedModel, prompt_tokens: int) -> Sampling:
    """The complete sampling parameters of ``request`` on ``model``.

    max_tokens is cut to what the context has room for: an answer that comes there ends with FINISH_REASON_LENGTH.

    Raises:
        PromptTooLong: the context has no room for a single token of an answer.
        InvalidRequest: the tokens to resume from are not of this model, or it cannot end an answer by itself, which a
            constraint needs.
    """
    context = model.context_tokens
    if prompt_tokens >= context:
        raise _too_long(model.name, prompt_tokens, context)
    _check_vocabulary(request.resume, model)
    sampling = request.sampling
    _check_can_end(sampling, model)
    limit = min(model.max_answer_tokens, context - prompt_tokens)
    max_tokens = min(sampling.max_tokens or limit, limit)
    fitted = Sampling(
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        logprobs=sampling.logprobs is not None,
        top_logprobs=sampling.logprobs or 0,
        stop_token_ids=sorted(model.tokenization.stop_token_ids),
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        min_tokens=min(sampling.min_tokens, max_tokens),
    )
    if sampling.json_schema is not None:
        fitted.json_schema = sampling.json_schema
    if sampling.regex is not None:
        fitted.regex = sampling.regex
    return fitted


def _too_long(model: str, prompt_tokens: int, context: int) -> PromptTooLong:
    message = f"the prompt has {prompt_tokens} tokens, the context of {model} has {context}, answer included"
    return PromptTooLong(
        message,
        metadata={"prompt_tokens": str(prompt_tokens), "context_tokens": str(context)},
        violations=[FieldViolation("input", message)],
    )


def _check_vocabulary(resume: Sequence[int], model: ServedModel) -> None:
    """The door could not know the model of an "auto" request."""
    vocab_size = model.tokenization.vocab_size
    if not in_vocabulary(resume, vocab_size):
        raise InvalidRequest.of(
            "resume.token_ids", f"must be below {vocab_size}, the vocabulary of {model.name}"
        )


def _check_can_end(sampling: ValidSampling, model: ServedModel) -> None:
    if sampling.constraint and not model.tokenization.stop_token_ids:
        raise InvalidRequest.of(
            f"sampling.{sampling.constraint}", f"{model.name} has no token that ends an answer"
        )
