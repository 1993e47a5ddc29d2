"""Calls about texts: Embed, Rerank, Score. Every text is a row; a call ends when all its rows have, or one has failed.

Rows are those of every other request: queued by class and tenant, batched, recovered when a worker is lost.
"""

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Generic, TypeVar

from opentelemetry.trace import SpanKind

from gateway.admission.calls import AnyCall
from gateway.admission.pipeline import AdmittedRequest
from gateway.admission.prompts import PreparedPrompt, embed_rows, rerank_rows, score_rows
from gateway.api.generate import Generator, Kind, RunningCall
from gateway.identity.caller import Caller
from gateway.models.catalog import Catalog, ServedModel
from gateway.streaming.token_logprobs import scored_entries
from gateway.telemetry.request_log import RequestLog
from gateway.upstream.rows import InternalRow
from gateway.validation.conversation import Conversation
from gateway.validation.requests import (
    WORKLOAD_LABEL,
    ValidRequest,
    validate_embed,
    validate_rerank,
    validate_score,
)
from sluice.errors import SluiceError
from sluice.internal.v1.frame_pb2 import Logprobs
from sluice.telemetry import names
from sluice.telemetry.tracing import TRACEPARENT, UNSAMPLED, headers_of
from sluice.v1 import inference_pb2 as pb

TRACED_ROWS: Final = 16
"""Rows of a call whose way is traced; of thousands the spans would cost more than the work."""

_Q = TypeVar("_Q", pb.EmbedRequest, pb.RerankRequest, pb.ScoreRequest)
_R = TypeVar("_R")


Facts = Mapping[str, Any]
"""The fields that the responses of all methods have."""
Computed = Sequence[tuple[bytes, PreparedPrompt]]
"""What the rows of a call have given, float32, each with its row."""


@dataclass(frozen=True)
class TextsKind(Kind, Generic[_Q, _R]):
    """A method that works on texts.

    Attributes:
        validate: a request with catalog, seconds that are left, and caller.
        rows: of a request, by its texts as a model may see them.
        response: to a request.
        keeps: whether what a row gives is kept for equal rows.
    """

    validate: Callable[[_Q, Catalog, float, Caller], ValidRequest]
    rows: Callable[[_Q, Conversation, ServedModel], Sequence[PreparedPrompt]]
    response: Callable[[_Q, Computed, Facts], _R]
    keeps: bool = False


def _embedded(wire: pb.EmbedRequest, computed: Computed, facts: Facts) -> pb.EmbedResponse:
    embeddings = [
        pb.Embedding(values=values, token_count=len(row.prompt_token_ids), truncated=row.truncated)
        for values, row in computed
    ]
    return pb.EmbedResponse(**facts, embeddings=embeddings)


def _ranked(wire: pb.RerankRequest, computed: Computed, facts: Facts) -> pb.RerankResponse:
    """The documents by score."""
    found = [
        pb.RankedDocument(index=place, score=_floats(values)[0], truncated=row.truncated)
        for place, (values, row) in enumerate(computed)
    ]
    found.sort(key=lambda one: -one.score)
    return pb.RerankResponse(**facts, results=found[: wire.top_n or None])


def _scored(wire: pb.ScoreRequest, computed: Computed, facts: Facts) -> pb.ScoreResponse:
    answers = []
    for values, row in computed:
        assert row.values is not None, "its tokens are scored"
        scored, numbers = row.values.scored_token_ids, _floats(values)
        found = numbers[: len(scored)]
        answer = pb.ScoredAnswer(logprob=sum(found), token_ids=scored, logprobs=found)
        if wire.HasField("alternatives"):
            answer.tokens.extend(_tokens(row, numbers, wire.alternatives))
        answers.append(answer)
    return pb.ScoreResponse(**facts, answers=answers)


def _tokens(row: PreparedPrompt, numbers: Sequence[float], most: int) -> list[pb.TokenLogprobs]:
    """Return all tokens of a scored answer; ``numbers``: as `Values.scored_alternatives` says."""
    assert row.values is not None, "its tokens are scored"
    count = len(row.values.scored_token_ids)
    ids, scores = numbers[count : count * (1 + most)], numbers[count * (1 + most) :]
    logged = [Logprobs() for _ in range(len(row.answer_token_ids) - count)]
    for at in range(count):
        best = slice(at * most, (at + 1) * most)
        top_ids, top = [int(one) for one in ids[best]], scores[best]
        logged.append(Logprobs(logprob=numbers[at], top_token_ids=top_ids, top_logprobs=top))
    return scored_entries(row.model.tokenizer, row.answer_token_ids, logged, most)


_LATE: Final = "the deadline passed before all texts were computed"
EMBED: Final = TextsKind(
    names.SPAN_EMBED, "embeddings", _LATE, validate_embed, embed_rows, _embedded, keeps=True
)
RERANK: Final = TextsKind(names.SPAN_RERANK, "rerank", _LATE, validate_rerank, rerank_rows, _ranked)
SCORE: Final = TextsKind(names.SPAN_SCORE, "score", _LATE, validate_score, score_rows, _scored)


async def answer_texts(
    shared: Generator,
    kind: TextsKind[_Q, _R],
    wire: _Q,
    asked_by: AnyCall,
) -> _R:
    """Return the response to a call of ``kind``; raises as `logged_texts`."""
    return (await logged_texts(shared, kind, wire, asked_by))[0]


async def logged_texts(
    shared: Generator,
    kind: TextsKind[_Q, _R],
    wire: _Q,
    asked_by: AnyCall,
) -> tuple[_R, RequestLog]:
    """Return the response to a call of ``kind``, and its log.

    Raises:
        SluiceError: the call ends with it.
    """
    with RequestLog(
        shared.tracer, kind.span, asked_by.metadata, kind.operation, route=asked_by.route
    ) as log:
        log.asked(wire, asked_by.caller.tenant)
        catalog, timeout_s = shared.catalog, shared.timeout_s(asked_by)
        with shared.upstream.admission.refusals_counted(asked_by.caller):
            request = kind.validate(wire, catalog, timeout_s, asked_by.caller)
        log.valid(request)
        texts = len(request.conversation.documents) + len(request.conversation.answers)
        log.describe({names.TEXTS: texts})
        call = _TextsCall(shared, kind, log, request.timeout_s)
        with shared.limiter.rows.held(request.tenant, texts):
            return await call.within_deadline(request, partial(call.answer, wire)), log


class _TextsCall(RunningCall):
    """A call about texts. Its methods stand in the order in which they run."""

    def __init__(
        self, shared: Generator, kind: TextsKind[Any, Any], log: RequestLog, timeout_s: float
    ) -> None:
        super().__init__(shared, kind, log, timeout_s)
        self._texts = kind
        self._rows: list[InternalRow] = []

    async def answer(self, wire: Any, incoming: AdmittedRequest) -> Any:
        request = incoming.request
        try:
            await self.admit(incoming, partial(self._texts.rows, wire))
        except BaseException as error:
            self.refused(error, request)
            raise
        try:
            compute, answers = partial(self._compute, incoming), self._shared.state.answers
            values = (
                await answers.values_of(request.tenant, incoming.rows, compute)
                if self._texts.keeps
                else await compute(incoming.rows)
            )
        except BaseException as error:
            self._ended(incoming, self.error_of(error, request))
            raise
        facts = {
            "request_id": incoming.request_id,
            "trace_id": self._log.trace_id,
            "model": incoming.plan.model,
            "usage": self._ended(incoming),
        }
        if self._texts is EMBED:
            self._log.describe({names.GEN_AI_DIMENSIONS: len(values[0]) // 4})
        computed = [*zip(values, incoming.rows, strict=True)]
        work = partial(self._texts.response, wire, computed, facts)
        if self._texts is not SCORE:
            return work()
        threads = self._upstream.admission.threads
        return await threads.work_on(request.conversation.texts, request.tenant, work)

    async def _compute(
        self, admitted: AdmittedRequest, rows: Sequence[PreparedPrompt]
    ) -> list[bytes]:
        """Sends ``rows``, and waits until they have ended; when one fails the others are cancelled."""
        # Answers of no tokens must not count as short answers of the caller's own kind of work.
        request = replace(admitted.request, labels={WORKLOAD_LABEL: self._kind.operation})
        deadline = admitted.deadline
        sent = self._log.row_attributes(admitted.plan.model, self._request_id)
        name = names.model_span(self._kind.operation, admitted.plan.model)
        with self._log.child(name, sent, SpanKind.CLIENT) as span:
            traced = headers_of(span)
            untraced = _untraced(traced)
            for number, row in enumerate(rows):
                row_id = f"{self._request_id}-{number}"
                headers = traced if number < TRACED_ROWS else untraced
                self._rows.append(
                    InternalRow(self._upstream, request, row, row_id, deadline, headers)
                )
            await InternalRow.answer(*self._rows)
            computed = sum(len(row.prompt_token_ids) for row in rows)
            span.set_attribute(names.GEN_AI_INPUT_TOKENS, computed)
        return [one.attempt.final.values for one in self._rows if one.attempt.final]

    def _ended(self, admitted: AdmittedRequest, error: SluiceError | None = None) -> pb.Usage:
        """All rows have ended, or one has failed the call with ``error``; returns what was computed."""
        now, rows = time.monotonic(), [row.attempt for row in self._rows]
        record_stream = self._upstream.usage.record_stream
        used = sum(record_stream(admitted, row.result, now) for row in self._rows)
        is_taken = any(row.taken for row in rows)
        admitted.reservation.release(used, None if is_taken else error)
        usage = pb.Usage(
            prompt_tokens=sum(len(row.prompt_token_ids) for row in admitted.rows),
            cached_prompt_tokens=sum(row.usage.cached_prompt_tokens for row in rows),
            cached=not rows and error is None,
        )
        reason = "" if error is None else error.reason
        self._log.rows_ended(admitted.plan, rows, usage, reason, now)
        self._shared.ended(self._log)
        return usage


def _floats(values: bytes) -> list[float]:
    return array("f", values).tolist()


def _untraced(headers: Mapping[str, str]) -> Mapping[str, str]:
    """The same parent, of which nothing is recorded."""
    parent = headers.get(TRACEPARENT, "")
    return {TRACEPARENT: parent[:-3] + UNSAMPLED} if parent else {}
