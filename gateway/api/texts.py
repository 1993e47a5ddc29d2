"""Answers calls about texts: Embed, Rerank, Score.

Every text, pair or answer is a run, unless the cache spares it; a call ends when all its runs have, or one has failed.
They are runs as those of every other request: queued by class and tenant, batched, recovered when a worker is lost.
"""

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Generic, TypeVar

from opentelemetry.trace import SpanKind

from gateway.admission.request_context import Call, PreparedPrompt, RequestContext, RequestKind
from gateway.admission.text_prompts import embed_prompts, rerank_prompts, score_prompts
from gateway.api.generate import Generator
from gateway.identity.caller import Caller
from gateway.models.catalog import Catalog, ServedModel
from gateway.streaming.model_run import ModelRun, ResultCollector
from gateway.streaming.token_logprobs import scored_entries
from gateway.telemetry.request_log import RequestLog
from gateway.validation.conversation import Conversation
from gateway.validation.requests import WORKLOAD_LABEL, ValidRequest
from gateway.validation.texts import validate_embed, validate_rerank, validate_score
from sluice.errors import InvalidRequest, SluiceError, UnknownModel
from sluice.internal.v1.frame_pb2 import Logprobs
from sluice.telemetry import names
from sluice.telemetry.tracing import TRACEPARENT, UNSAMPLED, headers_of
from sluice.v1 import inference_pb2 as pb

TRACED_TEXTS: Final = 16
"""Texts of a call whose runs are traced; spans of thousands would cost more than the work."""

_Q = TypeVar("_Q", pb.EmbedRequest, pb.RerankRequest, pb.ScoreRequest)
_R = TypeVar("_R")


Facts = Mapping[str, Any]
"""Fields that the responses of all methods have."""
Computed = Sequence[tuple[bytes, PreparedPrompt]]
"""What the runs of a call have computed, float32, each with its prompt."""


@dataclass(frozen=True)
class TextsKind(RequestKind, Generic[_Q, _R]):
    """A method that works on texts.

    Attributes:
        validate: Validates a request, with the catalog, the seconds that are left, and the caller.
        prompts: Makes the prompts of a request, of its texts as the model may see them.
        response: Makes the response to a request.
        is_cached: Whether what a run computes is cached for equal prompts.
    """

    validate: Callable[[_Q, Catalog, float, Caller], ValidRequest]
    prompts: Callable[[_Q, Conversation, ServedModel], Sequence[PreparedPrompt]]
    response: Callable[[_Q, Computed, Facts], _R]
    is_cached: bool = False


def _embedded(wire: pb.EmbedRequest, computed: Computed, facts: Facts) -> pb.EmbedResponse:
    embeddings = [
        pb.Embedding(values=values, token_count=len(row.prompt_token_ids), truncated=row.truncated)
        for values, row in computed
    ]
    return pb.EmbedResponse(**facts, embeddings=embeddings)


def _ranked(wire: pb.RerankRequest, computed: Computed, facts: Facts) -> pb.RerankResponse:
    """Return the documents by score."""
    results = [
        pb.RankedDocument(index=place, score=_floats(values)[0], truncated=row.truncated)
        for place, (values, row) in enumerate(computed)
    ]
    results.sort(key=lambda result: -result.score)
    return pb.RerankResponse(**facts, results=results[: wire.top_n or None])


def _scored(wire: pb.ScoreRequest, computed: Computed, facts: Facts) -> pb.ScoreResponse:
    answers = []
    for values, row in computed:
        assert row.values is not None, "its tokens are scored"
        scored, numbers = row.values.scored_token_ids, _floats(values)
        logprobs = numbers[: len(scored)]
        answer = pb.ScoredAnswer(logprob=sum(logprobs), token_ids=scored, logprobs=logprobs)
        if wire.HasField("alternatives"):
            answer.tokens.extend(_tokens(row, numbers, wire.alternatives))
        answers.append(answer)
    return pb.ScoreResponse(**facts, answers=answers)


def _tokens(row: PreparedPrompt, numbers: Sequence[float], most: int) -> list[pb.TokenLogprobs]:
    """Return all tokens of a scored answer; `numbers` are in the order of `Values.scored_alternatives`."""
    assert row.values is not None, "its tokens are scored"
    count = len(row.values.scored_token_ids)
    ids, scores = numbers[count : count * (1 + most)], numbers[count * (1 + most) :]
    logged = [Logprobs() for _ in range(len(row.answer_token_ids) - count)]
    for at in range(count):
        best = slice(at * most, (at + 1) * most)
        top_ids, top = [int(token_id) for token_id in ids[best]], scores[best]
        logged.append(Logprobs(logprob=numbers[at], top_token_ids=top_ids, top_logprobs=top))
    return scored_entries(row.model.tokenizer, row.answer_token_ids, logged, most)


_LATE: Final = "the deadline passed before all texts were computed"
EMBED: Final = TextsKind(
    names.SPAN_EMBED, "embeddings", _LATE, validate_embed, embed_prompts, _embedded, is_cached=True
)
RERANK: Final = TextsKind(
    names.SPAN_RERANK, "rerank", _LATE, validate_rerank, rerank_prompts, _ranked
)
SCORE: Final = TextsKind(names.SPAN_SCORE, "score", _LATE, validate_score, score_prompts, _scored)


async def answer_texts(
    generator: Generator, kind: TextsKind[_Q, _R], wire: _Q, call: Call
) -> tuple[_R, RequestLog]:
    """Return the response to a call about texts, and its log.

    Raises:
        SluiceError: The call ends with it.
    """
    with RequestLog(
        generator.tracer, kind.span, call.metadata, kind.operation, route=call.route
    ) as log:
        log.received(wire, call.caller.tenant)
        catalog, timeout_s = generator.catalog, generator.timeout_s(call)
        try:
            request = kind.validate(wire, catalog, timeout_s, call.caller)
        except (InvalidRequest, UnknownModel):
            generator.admission.limits.count_refused(call.caller)
            raise
        log.validated(request)
        texts = len(request.conversation.documents) + len(request.conversation.answers)
        log.describe({names.TEXTS: texts})
        context = RequestContext(kind, request, log, to_prompts=partial(kind.prompts, wire))
        with generator.limiter.texts.hold(request.tenant, texts):
            return await context.run(_answer(generator, kind, wire, context)), log


async def respond(generator: Generator, kind: TextsKind[_Q, _R], wire: _Q, call: Call) -> _R:
    """Return the response alone, as `answer_texts` does."""
    response, _ = await answer_texts(generator, kind, wire, call)
    return response


async def _answer(
    generator: Generator, kind: TextsKind[Any, Any], wire: Any, context: RequestContext
) -> Any:
    """Return the response to a request about texts."""
    request, log = context.request, context.log
    try:
        await generator.admit(context)
    except BaseException as error:
        generator.refused(context, error)
        raise
    results = list[ResultCollector]()
    try:
        compute, answers = partial(_compute, generator, context, results), generator.state.answers
        values = (
            await answers.embeddings_of(request.tenant, context.prompts, compute)
            if kind.is_cached
            else await compute(context.prompts)
        )
    except BaseException as error:
        _end(generator, context, results, context.error_of(error))
        raise
    facts = {
        "request_id": context.request_id,
        "trace_id": log.trace_id,
        "model": context.plan.model,
        "usage": _end(generator, context, results),
    }
    if kind is EMBED:
        log.describe({names.GEN_AI_DIMENSIONS: len(values[0]) // 4})
    computed = [*zip(values, context.prompts, strict=True)]
    work = partial(kind.response, wire, computed, facts)
    if kind is not SCORE:
        return work()
    threads = generator.admission.preparation.threads
    return await threads.work_on(request.conversation.texts, request.tenant, work)


async def _compute(
    generator: Generator,
    context: RequestContext,
    results: list[ResultCollector],
    prompts: Sequence[PreparedPrompt],
) -> list[bytes]:
    """Send `prompts`, and return what their runs computed; when one fails the others are cancelled.

    The results are appended to `results`, which has them also if this fails.
    """
    operation, model = context.kind.operation, context.plan.model
    # Answers of no tokens must not count as short answers of the caller's own kind of work.
    request = replace(context.request, labels={WORKLOAD_LABEL: operation})
    attributes = context.log.run_attributes(model, context.request_id)
    name = f"{operation} {model}"
    with context.log.child(name, attributes, SpanKind.CLIENT) as span:
        traced = headers_of(span)
        # The others have the same parent, and nothing of them is recorded.
        parent = traced.get(TRACEPARENT, "")
        untraced = {TRACEPARENT: parent[:-3] + UNSAMPLED} if parent else {}
        runs = list[ModelRun]()
        for number, prompt in enumerate(prompts):
            run_id = f"{context.request_id}-{number}"
            run = generator.upstream.new_run(request, prompt, run_id, context.deadline)
            run.headers = traced if number < TRACED_TEXTS else untraced
            runs.append(run)
        await generator.upstream.compute(runs, results.append)
        computed = sum(len(prompt.prompt_token_ids) for prompt in prompts)
        span.set_attribute(names.GEN_AI_INPUT_TOKENS, computed)
    return [run.final.values for run in runs if run.final]


def _end(
    generator: Generator,
    context: RequestContext,
    results: Sequence[ResultCollector],
    error: SluiceError | None = None,
) -> pb.Usage:
    """Record a request whose runs have ended, or of which one has failed it with `error`; return its usage."""
    now, runs = time.monotonic(), [result.current for result in results]
    used = sum(generator.upstream.record_end(context, result, now) for result in results)
    was_accepted = any(run.was_accepted for run in runs)
    generator.admission.release(context, used, None if was_accepted else error)
    usage = pb.Usage(
        prompt_tokens=sum(len(prompt.prompt_token_ids) for prompt in context.prompts),
        cached_prompt_tokens=sum(run.usage.cached_prompt_tokens for run in runs),
        cached=not runs and error is None,
    )
    reason = "" if error is None else error.reason
    context.log.runs_ended(context.plan, runs, usage, reason, now)
    generator.ended(context.log)
    return usage


def _floats(values: bytes) -> list[float]:
    return array("f", values).tolist()
