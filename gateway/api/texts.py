"""Calls about texts: Embed, Rerank, Score. Every text is a row; a call ends when all its rows have, or one has failed.

Rows are those of every other request: queued by class and tenant, batched, recovered when a worker is lost.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from gateway.admission.pipeline import AdmittedTexts, IncomingRequest, PrepareTexts
from gateway.admission.prompts import PreparedPrompt
from gateway.admission.texts import embed_rows, rerank_rows, score_rows
from gateway.api.call_attributes import request_attributes
from gateway.api.generate import Generator, departure, error_of, new_request_id
from gateway.identity.caller import Caller
from gateway.records.record_builder import RecordBuilder
from gateway.streaming.attempt import ModelAttempt
from gateway.streaming.lifecycle import RequestTimings
from gateway.telemetry.spans import CallSpans
from gateway.upstream.rows import InternalRow, row_attributes
from gateway.validation.requests import WORKLOAD_LABEL, ValidRequest
from gateway.validation.texts import validate_embed, validate_rerank, validate_score
from sluice.errors import DeadlinePassed, SluiceError
from sluice.internal.v1.frame_pb2 import RowTimings
from sluice.telemetry import names
from sluice.telemetry.tracing import TRACEPARENT, UNSAMPLED, headers_of
from sluice.v1 import inference_pb2 as pb

TRACED_ROWS: Final = 16
"""Rows of a call whose way is traced; of thousands the spans would cost more than the work."""

Validate = Callable[[float, Caller], ValidRequest]
"""The request, by the time that is left, seconds, and its caller."""


@dataclass(frozen=True)
class _Kind:
    """A method, as telemetry and records name it."""

    operation: str
    span: str


EMBED: Final = _Kind("embeddings", names.SPAN_EMBED)
RERANK: Final = _Kind("rerank", names.SPAN_RERANK)
SCORE: Final = _Kind("score", names.SPAN_SCORE)


@dataclass(frozen=True)
class _Done:
    """A call whose rows have all ended."""

    request_id: str
    trace_id: str
    admitted: AdmittedTexts
    attempts: Sequence[ModelAttempt]
    values: Sequence[bytes]
    """Of each row, float32."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """The fields that the responses of all methods have."""
        cached = sum(one.usage.cached_prompt_tokens for one in self.attempts)
        tokens = sum(len(row.prompt_token_ids) for row in self.admitted.rows)
        return {
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "model": self.admitted.plan.model,
            "usage": pb.Usage(
                prompt_tokens=tokens, cached_prompt_tokens=cached, cached=not self.attempts
            ),
        }


@dataclass(frozen=True)
class TextCalls:
    """Answers them, with what calls of Generate have too."""

    shared: Generator

    async def embed(
        self,
        wire: pb.EmbedRequest,
        caller: Caller,
        remaining_s: float | None,
        metadata: Mapping[str, str],
        *,
        is_item: bool = False,
    ) -> pb.EmbedResponse:
        """The embeddings; ``remaining_s``: until the deadline of the call. ``is_item``: of a job.

        Raises:
            SluiceError: the call ends with it.
        """
        catalog = self.shared.upstream.admission.catalog

        def validate(timeout_s: float, caller: Caller) -> ValidRequest:
            return replace(validate_embed(wire, catalog, timeout_s, caller), is_item=is_item)

        done = await self._run(
            EMBED, validate, partial(embed_rows, wire), caller, remaining_s, metadata
        )
        embeddings = [
            pb.Embedding(
                values=values, token_count=len(row.prompt_token_ids), truncated=row.truncated
            )
            for values, row in zip(done.values, done.admitted.rows, strict=True)
        ]
        return pb.EmbedResponse(**done.facts, embeddings=embeddings)

    async def rerank(
        self,
        wire: pb.RerankRequest,
        caller: Caller,
        remaining_s: float | None,
        metadata: Mapping[str, str],
    ) -> pb.RerankResponse:
        """The documents by score; as `embed`."""
        validate = partial(validate_rerank, wire, self.shared.upstream.admission.catalog)
        done = await self._run(
            RERANK, validate, partial(rerank_rows, wire), caller, remaining_s, metadata
        )
        found = [
            pb.RankedDocument(index=place, score=_floats(values)[0], truncated=row.truncated)
            for place, (values, row) in enumerate(zip(done.values, done.admitted.rows, strict=True))
        ]
        found.sort(key=lambda one: -one.score)
        return pb.RerankResponse(**done.facts, results=found[: wire.top_n or None])

    async def score(
        self,
        wire: pb.ScoreRequest,
        caller: Caller,
        remaining_s: float | None,
        metadata: Mapping[str, str],
    ) -> pb.ScoreResponse:
        """The log-probabilities; as `embed`."""
        validate = partial(validate_score, wire, self.shared.upstream.admission.catalog)
        done = await self._run(
            SCORE, validate, partial(score_rows, wire), caller, remaining_s, metadata
        )
        answers = []
        for values, row in zip(done.values, done.admitted.rows, strict=True):
            assert row.values is not None, "its tokens are scored"
            found = _floats(values)
            scored = row.values.scored_token_ids
            answers.append(pb.ScoredAnswer(logprob=sum(found), token_ids=scored, logprobs=found))
        return pb.ScoreResponse(**done.facts, answers=answers)

    async def _run(
        self,
        kind: _Kind,
        validate: Validate,
        prepare: PrepareTexts,
        caller: Caller,
        remaining_s: float | None,
        metadata: Mapping[str, str],
    ) -> _Done:
        spans = CallSpans(self.shared.tracer, kind.span, metadata)
        with spans.call():
            request = validate(self.shared.timeout_s(remaining_s), caller)
            call = _Call(self.shared, kind, request, spans)
            try:
                with self.shared.limiter.rows(request.tenant, len(request.conversation.turns)):
                    async with asyncio.timeout(request.timeout_s):
                        return await call.run(prepare)
            except TimeoutError:
                raise _deadline_passed().of_request(call.request_id) from None
            except SluiceError as error:
                raise error.of_request(call.request_id) from error


class _Call:
    """One call. Its methods stand in the order in which they run."""

    def __init__(
        self, shared: Generator, kind: _Kind, request: ValidRequest, spans: CallSpans
    ) -> None:
        self.request_id = new_request_id()
        self._shared = shared
        self._upstream = shared.upstream
        self._kind = kind
        self._request = request
        self._spans = spans
        self._timings = RequestTimings(arrived_at=time.monotonic())
        self._rows: list[InternalRow] = []
        spans.describe(self._attributes)

    async def run(self, prepare: PrepareTexts) -> _Done:
        observers = self._shared.observers
        record = observers.records.open(
            self._request, self.request_id, self._spans.trace_id, self._kind.operation
        )
        try:
            admitted = await self._admit(record, prepare)
        except BaseException as error:
            observers.refused(self._request, record, self._error_of(error))
            raise
        try:
            values = await self._work(admitted)
        except BaseException as error:
            self._ended(admitted, record, self._error_of(error).reason)
            raise
        self._ended(admitted, record, "")
        attempts = [row.attempt for row in self._rows]
        return _Done(self.request_id, self._spans.trace_id, admitted, attempts, values)

    async def _admit(self, record: RecordBuilder, prepare: PrepareTexts) -> AdmittedTexts:
        incoming = IncomingRequest(self._request, record, self._spans, self._timings)
        async with self._shared.limiter.slot(self._request.priority_class, self._request.tenant):
            return await self._upstream.admission.admit_texts(incoming, prepare)

    async def _work(self, admitted: AdmittedTexts) -> list[bytes]:
        """What each row gives: those that are kept do not need to be computed, and equal ones only once."""
        if self._kind is not EMBED:
            return await self._compute(admitted, admitted.rows)
        answers = self._shared.state.answers
        keys = answers.value_keys(self._request.tenant, admitted.rows)
        if not any(keys):
            return await self._compute(admitted, admitted.rows)
        found = await answers.find_values(keys)
        wanted = {
            key: row for key, row in zip(keys, admitted.rows, strict=True) if key not in found
        }
        computed = await self._compute(admitted, list(wanted.values())) if wanted else []
        for key, values in zip(wanted, computed, strict=True):
            answers.keep_values(key, values)
            found[key] = values
        return [found[key] for key in keys]

    async def _compute(
        self, admitted: AdmittedTexts, rows: Sequence[PreparedPrompt]
    ) -> list[bytes]:
        """Sends ``rows``, and waits until they have ended; when one fails the others are cancelled."""
        # Answers of no tokens must not count as short answers of the caller's own kind of work.
        request = replace(self._request, labels={WORKLOAD_LABEL: self._kind.operation})
        deadline = admitted.scheduling.deadline
        try:
            for number, row in enumerate(rows):
                row_id = f"{self.request_id}-{number}"
                self._rows.append(InternalRow(self._upstream, request, row, row_id, deadline))
            sent = row_attributes(admitted.plan.model, self.request_id, request.priority_class)
            with self._spans.hop(names.SPAN_ATTEMPT, SpanKind.PRODUCER, sent) as span:
                headers = headers_of(span)
                for number, one in enumerate(self._rows):
                    one.send(headers if number < TRACED_ROWS else _untraced(headers))
                for one in self._rows:
                    await one.ended()
        finally:
            for one in self._rows:
                one.close()
        return [_values_of(one.attempt) for one in self._rows]

    def _ended(self, admitted: AdmittedTexts, record: RecordBuilder, error: str) -> None:
        now, attempts = time.monotonic(), [row.attempt for row in self._rows]
        record_stream = self._upstream.usage.record_stream
        used = sum(record_stream(self._request.tenant, row.stream, now) for row in self._rows)
        admitted.reservation.release(used)
        last = next((one.final.timings for one in reversed(attempts) if one.final), RowTimings())
        timings = self._timings.with_row(last, now, now)
        record.finish_rows(admitted.plan.model, attempts, timings, error)
        span = self._spans.server.get_span_context()
        self._shared.observers.metrics.count_rows(
            self._request, self._kind.operation, admitted.plan, attempts, record.record, span
        )
        self._spans.describe(lambda: _end_attributes(admitted, attempts))

    def _error_of(self, error: BaseException) -> SluiceError:
        """What the call ends with that ``error`` ended."""
        return error_of(error, departure(self._request, self._timings, _deadline_passed()))

    def _attributes(self) -> Mapping[str, AttributeValue]:
        return {
            **request_attributes(self._request, self._kind.operation),
            names.REQUEST_ID: self.request_id,
            names.TEXTS: len(self._request.conversation.turns),
        }


def _end_attributes(
    admitted: AdmittedTexts, attempts: Sequence[ModelAttempt]
) -> Mapping[str, AttributeValue]:
    tokens = sum(len(row.prompt_token_ids) for row in admitted.rows)
    attributes: dict[str, AttributeValue] = {
        names.GEN_AI_RESPONSE_MODEL: admitted.plan.model,
        names.GEN_AI_INPUT_TOKENS: tokens,
        names.TIER: admitted.plan.tier,
        names.ROUTE_STRATEGY: admitted.plan.strategy,
    }
    if not attempts:
        attributes[names.CACHED] = True
    final = attempts[0].final if attempts else None
    if final is not None and admitted.rows[0].model.settings.engine == "embedding":
        attributes[names.GEN_AI_DIMENSIONS] = len(final.values) // 4
    return attributes


def _values_of(attempt: ModelAttempt) -> bytes:
    assert attempt.final is not None, "it has ended"
    return attempt.final.values


def _floats(values: bytes) -> list[float]:
    return array("f", values).tolist()


def _untraced(headers: Mapping[str, str]) -> Mapping[str, str]:
    """The same parent, of which nothing is recorded."""
    parent = headers.get(TRACEPARENT, "")
    return {TRACEPARENT: parent[:-3] + UNSAMPLED} if parent else {}


def _deadline_passed() -> DeadlinePassed:
    return DeadlinePassed("the deadline passed before all texts were computed")
