"""One question to one guard model: its prompts, rows and answer. Every problem is a `Failure`, never an error."""

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue
from typing_extensions import override

from gateway.admission.pipeline import AdmittedRequest, EntityReader, Reading
from gateway.admission.prompts import UNDRAWN, PreparedPrompt
from gateway.models.catalog import ServedModel
from gateway.models.tokenizer import Segment, TemplateRefused
from gateway.safety.actions import Action
from gateway.safety.findings import Finding
from gateway.safety.guards.checks import Check, Cost, EntityGuard, Guard
from gateway.safety.guards.entities import LabelledToken
from gateway.safety.guards.families import (
    Failure,
    Family,
    GuardVerdict,
    Message,
    Option,
    Outcome,
    Said,
    Unparsable,
)
from gateway.streaming.row import Row
from gateway.streaming.transcript import Transcript
from gateway.upstream.rows import InternalRow, Upstream
from gateway.validation.requests import WORKLOAD_LABEL
from sluice.errors import (
    DeadlinePassed,
    ModelUnavailable,
    Overloaded,
    SluiceError,
    TransportUnavailable,
)
from sluice.internal.v1.task_pb2 import Sampling, Values
from sluice.telemetry import names
from sluice.telemetry.tracing import headers_of
from sluice.v1.inference_pb2 import SamplingParams

WORKLOAD: Final = "guard"
"""Answers of guards have similar lengths, unlike those to callers."""
SEGMENTS_MAX: Final = 32
"""Rows of one question to a classifier, whose context is short; a longer text is too long."""
READ_SEGMENTS_MAX: Final = 512
"""Rows of all texts of a prompt that a token classifier reads; more are too long."""
_THREAD_CHARS: Final = 8192
_ALTERNATIVES: Final = 16

_T = TypeVar("_T")

_FAILURES: Final[tuple[tuple[type[SluiceError], Failure], ...]] = (
    (DeadlinePassed, Failure.TIMEOUT),
    (Overloaded, Failure.OVERLOADED),
    (ModelUnavailable, Failure.UNAVAILABLE),
    (TransportUnavailable, Failure.UNAVAILABLE),
)


@dataclass(frozen=True)
class Question:
    """A check by a guard that gives verdicts, and the request that it is about.

    Attributes:
        turns: of caller and model as the model may see them, the caller's last.
        headers: trace context of its rows.
    """

    check: Check
    about: AdmittedRequest
    turns: Sequence[Message]
    headers: Mapping[str, str]

    @property
    def guard(self) -> Guard:
        """The one that is asked."""
        assert isinstance(self.check.guard, Guard), "the others give no verdicts"
        return self.check.guard


class _NoVerdict(Exception):
    def __init__(self, failure: Failure) -> None:
        self.failure = failure


@dataclass(frozen=True)
class _Rows:
    """The rows of one check.

    Attributes:
        attempts: those that were opened, in order.
    """

    about: AdmittedRequest
    check: Check
    headers: Mapping[str, str]
    attempts: list[Row]

    def row_id(self, number: int) -> str:
        """The name of the ``number``-th."""
        reads = isinstance(self.check.guard, EntityGuard)
        kind = ("w" if self.check.in_answer else "e") if reads else "g"
        name = f"{self.about.request_id}-{kind}{self.check.number}"
        return f"{name}-{number}" if number else name


@dataclass(frozen=True)
class GuardClient(EntityReader):
    """Asks guards; also a `gateway.admission.pipeline.EntityReader`."""

    upstream: Upstream

    async def ask(self, question: Question) -> tuple[Outcome, float]:
        """The outcome, within the guard's time budget, and what it cost."""
        rows = _Rows(question.about, question.check, question.headers, [])
        return await self._within_budget(rows, partial(self._verdict, question, rows))

    @override
    async def read(self, about: AdmittedRequest, check: Check, texts: Sequence[str]) -> Reading:
        with check_span(about, check) as span:
            start = time.monotonic()
            rows = _Rows(about, check, headers_of(span), [])
            outcome, cost = await self._within_budget(rows, partial(self._found, rows, texts))
            reading = Reading(outcome, Cost((time.monotonic() - start) * 1000, cost))
            set_outcome(span, reading.taken(check))
            return reading

    async def _within_budget(
        self, rows: _Rows, work: Callable[[], Awaitable[_T]]
    ) -> tuple[_T | Failure, float]:
        outcome: _T | Failure
        try:
            async with asyncio.timeout(rows.check.guard.settings.budget_s):
                outcome = await work()
        except TimeoutError:
            outcome = Failure.TIMEOUT
        except _NoVerdict as none:
            outcome = none.failure
        return outcome, sum(attempt.cost for attempt in rows.attempts)

    async def _verdict(self, question: Question, rows: _Rows) -> GuardVerdict:
        guard, model = question.guard, self._model(rows)
        prompts = await self._prompts_of(question, model)
        sampling = _sampling(guard.family, model)
        # Without the caller's stop strings, and with all alternatives.
        asked = SamplingParams(logprobs=sampling.top_logprobs)
        prepared = [PreparedPrompt(model, prompt, sampling, None) for prompt in prompts]
        answered = await self._compute(rows, prepared, asked)
        try:
            return _worst([guard.family.reader.read(_said(one.transcript)) for one in answered])
        except Unparsable:
            raise _NoVerdict(Failure.UNPARSABLE) from None

    async def _found(self, rows: _Rows, texts: Sequence[str]) -> list[list[Finding]]:
        model, guard = self._model(rows), rows.check.guard
        assert isinstance(guard, EntityGuard), "the others find no entities"
        segments = await self._segments_of(texts, model, rows.about.request.tenant)
        if len(segments) > READ_SEGMENTS_MAX:
            raise _NoVerdict(Failure.TOO_LONG)
        prepared = [
            PreparedPrompt(model, segment.token_ids, UNDRAWN, None, Values())
            for _, segment in segments
        ]
        answered = await self._compute(rows, prepared, SamplingParams())
        found: list[list[Finding]] = [[] for _ in texts]
        for (place, segment), attempt in zip(segments, answered, strict=True):
            found[place] += guard.tags.findings(_labelled(segment, attempt))
        return found

    def _model(self, rows: _Rows) -> ServedModel:
        model = rows.about.policies.catalog[rows.check.guard.settings.model]
        problem = self.upstream.overload.problem(model.name, rows.about, time.monotonic())
        if problem is not None:
            raise _NoVerdict(_failure_of(problem))
        return model

    async def _compute(
        self, rows: _Rows, prepared: Sequence[PreparedPrompt], sampling: SamplingParams
    ) -> list[Row]:
        # Cancelled together: without an answer about one segment there is none about the text.
        answers = [
            asyncio.ensure_future(self._answer(rows, one, sampling, number))
            for number, one in enumerate(prepared)
        ]
        try:
            return await asyncio.gather(*answers)
        finally:
            for answer in answers:
                answer.cancel()

    async def _answer(
        self, rows: _Rows, prepared: PreparedPrompt, sampling: SamplingParams, number: int
    ) -> Row:
        about, budget_s = rows.about, rows.check.guard.settings.budget_s
        request = replace(
            about.request, labels={WORKLOAD_LABEL: WORKLOAD}, sampling=sampling, tools=None
        )
        deadline = min(about.deadline, time.monotonic() + budget_s)
        row = InternalRow(self.upstream, request, prepared, rows.row_id(number), deadline)
        rows.attempts.append(row.attempt)
        try:
            await row.answer(rows.headers)
        except SluiceError as error:
            raise _NoVerdict(_failure_of(error)) from error
        finally:
            self.upstream.usage.record_stream(about, row.result, time.monotonic())
        return row.attempt

    async def _segments_of(
        self, texts: Sequence[str], model: ServedModel, tenant: str
    ) -> list[tuple[int, Segment]]:
        """The segments of all texts, each with the number of its text."""

        def segments() -> list[tuple[int, Segment]]:
            return [
                (place, segment)
                for place, text in enumerate(texts)
                if text.strip()
                for segment in model.tokenizer.segments(text, model.context_tokens)
            ]

        long = sum(map(len, texts)) > _THREAD_CHARS
        run = self.upstream.admission.threads.run
        return await run(tenant, segments) if long else segments()

    async def _prompts_of(self, question: Question, model: ServedModel) -> list[list[int]]:
        """The prompts of the rows, each of which fits the guard's context."""
        chars = sum(len(turn["content"]) for turn in question.turns) + len(question.check.answer)
        if chars > _THREAD_CHARS:
            run = self.upstream.admission.threads.run
            return await run(question.about.request.tenant, partial(_prompts_now, question, model))
        return _prompts_now(question, model)


@contextmanager
def check_span(about: AdmittedRequest, check: Check) -> Iterator[Span]:
    """The span of a check."""
    attributes: dict[str, AttributeValue] = {
        names.GEN_AI_OPERATION: names.GUARDRAIL_OPERATION,
        names.GEN_AI_REQUEST_MODEL: check.guard.settings.model,
        names.GUARDRAIL_NAME: check.guard.name,
        names.GUARDRAIL_TARGET: "output" if check.in_answer else "input",
    }
    with about.log.child(names.SPAN_GUARD, attributes) as span:
        yield span


def set_outcome(
    span: Span, taken: Sequence[tuple[str, Action]], score: float | None = None
) -> None:
    """Says on the span of a check what came of it."""
    action = max(action for _, action in taken)
    span.set_attribute(names.GUARDRAIL_ACTION, action.name.lower())
    pairs = [f"{rule}:{action.name.lower()}" for rule, action in taken]
    span.set_attribute(names.GUARDRAIL_OUTCOMES, pairs)
    if score is not None:
        span.set_attribute(names.GUARDRAIL_SCORE, score)


def _labelled(segment: Segment, attempt: Row) -> Iterator[LabelledToken]:
    """The tokens of ``segment`` with what the model said of each: two numbers, its label and the probability."""
    assert attempt.final is not None, "it has ended"
    values = array("f", attempt.final.values)
    if len(values) != 2 * len(segment.token_ids):
        raise _NoVerdict(Failure.UNPARSABLE)
    for place, token in enumerate(segment.tokens, segment.lead):
        label, score = int(values[2 * place]), values[2 * place + 1]
        yield LabelledToken(token.start, token.end, token.word, label, score)


def _prompts_now(question: Question, model: ServedModel) -> list[list[int]]:
    check, tokenizer, family = question.check, model.tokenizer, question.guard.family
    tokens_max = model.context_tokens - family.answer_tokens
    if family.classifies:
        prompts = tokenizer.segments(_text_to_classify(question), tokens_max)
        if len(prompts) > SEGMENTS_MAX:
            raise _NoVerdict(Failure.TOO_LONG)
        return [segment.token_ids for segment in prompts]
    prompt = _chat_prompt(family.messages(question.turns, check.answer), family, model)
    if len(prompt) > tokens_max:
        raise _NoVerdict(Failure.TOO_LONG)
    return [prompt]


def _text_to_classify(question: Question) -> str:
    if question.check.in_answer:
        return question.check.answer
    return "\n".join(turn["content"] for turn in question.turns if turn["role"] == "user")


def _chat_prompt(messages: Sequence[Message], family: Family, model: ServedModel) -> list[int]:
    if model.tokenizer.template is None:
        return model.tokenizer.encode_text("\n".join(turn["content"] for turn in messages))
    try:
        return model.tokenizer.encode_chat(messages, family.variables)
    except TemplateRefused:
        raise _NoVerdict(Failure.FAILED) from None


def _sampling(family: Family, model: ServedModel) -> Sampling:
    return Sampling(
        max_tokens=family.answer_tokens,
        temperature=0.0,
        top_p=1.0,
        repetition_penalty=1.0,
        logprobs=True,
        top_logprobs=max(_ALTERNATIVES, min(32, len(model.tokenizer.labels))),
        stop_token_ids=sorted(model.tokenizer.stop_token_ids),
    )


def _said(transcript: Transcript) -> Said:
    delta = transcript.delta(0, with_logprobs=True)
    if delta is None:
        return Said("")
    tokens = [
        [Option(one.token_id, one.text, one.logprob) for one in token.top]
        for token in delta.logprobs
    ]
    return Said(transcript.text, tokens)


def _worst(verdicts: Sequence[GuardVerdict]) -> GuardVerdict:
    """Of the segments of one text."""
    flagged = [one for one in verdicts if one.flagged]
    scores = [one.score for one in verdicts if one.score is not None]
    categories = dict.fromkeys(name for one in flagged for name in one.categories)
    return GuardVerdict(bool(flagged), tuple(categories), max(scores, default=None))


def _failure_of(error: SluiceError) -> Failure:
    kinds = (failure for kind, failure in _FAILURES if isinstance(error, kind))
    return next(kinds, Failure.FAILED)
