"""One question to one guard model: its prompts, its rows, its verdict. Every problem is a `Failure`, never an error."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.admission.prompts import PreparedPrompt
from gateway.models.catalog import ServedModel
from gateway.models.tokenizer import TemplateRefused
from gateway.safety.guards.checks import Check
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
from gateway.streaming.attempt import ModelAttempt
from gateway.streaming.transcript import Transcript
from gateway.upstream.rows import InternalRow, RequestContext, Upstream
from gateway.validation.requests import WORKLOAD_LABEL
from sluice.errors import (
    DeadlinePassed,
    ModelUnavailable,
    Overloaded,
    SluiceError,
    TransportUnavailable,
)
from sluice.internal.v1.task_pb2 import Sampling
from sluice.v1.inference_pb2 import SamplingParams

WORKLOAD: Final = "guard"
"""Answers of guards have similar lengths, unlike those to callers."""
SEGMENTS_MAX: Final = 32
"""Rows of one question to a classifier, whose context is short; a longer text is too long."""
_THREAD_CHARS: Final = 8192
_ALTERNATIVES: Final = 16

_FAILURES: Final[tuple[tuple[type[SluiceError], Failure], ...]] = (
    (DeadlinePassed, Failure.TIMEOUT),
    (Overloaded, Failure.OVERLOADED),
    (ModelUnavailable, Failure.UNAVAILABLE),
    (TransportUnavailable, Failure.UNAVAILABLE),
)


@dataclass(frozen=True)
class Question:
    """A check, and the request that it is about.

    Attributes:
        turns: of caller and model as the model may see them, the caller's last.
        headers: trace context of its rows.
    """

    check: Check
    context: RequestContext
    turns: Sequence[Message]
    headers: Mapping[str, str]

    def row_id(self, number: int) -> str:
        """The name of its ``number``-th row."""
        name = f"{self.context.request_id}-g{self.check.number}"
        return f"{name}-{number}" if number else name


class _NoVerdict(Exception):
    def __init__(self, failure: Failure) -> None:
        self.failure = failure


@dataclass(frozen=True)
class GuardClient:
    """Asks guards."""

    upstream: Upstream

    async def ask(self, question: Question) -> tuple[Outcome, float]:
        """The outcome, within the guard's time budget, and what it cost."""
        attempts: list[ModelAttempt] = []
        outcome: Outcome
        try:
            async with asyncio.timeout(question.check.guard.settings.budget_s):
                outcome = await self._verdict(question, attempts)
        except TimeoutError:
            outcome = Failure.TIMEOUT
        except _NoVerdict as none:
            outcome = none.failure
        return outcome, sum(self.upstream.usage.cost(attempt) for attempt in attempts)

    async def _verdict(self, question: Question, attempts: list[ModelAttempt]) -> GuardVerdict:
        guard, scheduling = question.check.guard, question.context.admitted.scheduling
        model = self.upstream.admission.catalog[guard.settings.model]
        problem = self.upstream.overload.problem(model.name, scheduling, time.monotonic())
        if problem is not None:
            raise _NoVerdict(_failure_of(problem))
        prompts = await _prompts_of(question, model)
        # Cancelled together: without a verdict on one segment there is none on the text.
        answers = [
            asyncio.ensure_future(self._answer(question, model, prompt, number, attempts))
            for number, prompt in enumerate(prompts)
        ]
        try:
            said = await asyncio.gather(*answers)
        finally:
            for answer in answers:
                answer.cancel()
        try:
            return _worst([guard.family.reader.read(one) for one in said])
        except Unparsable:
            raise _NoVerdict(Failure.UNPARSABLE) from None

    async def _answer(
        self,
        question: Question,
        model: ServedModel,
        prompt: list[int],
        number: int,
        attempts: list[ModelAttempt],
    ) -> Said:
        guard, context = question.check.guard, question.context
        sampling = _sampling(guard.family, model)
        # Without the caller's stop strings, and with all alternatives.
        request = replace(
            context.request,
            labels={WORKLOAD_LABEL: WORKLOAD},
            sampling=SamplingParams(logprobs=sampling.top_logprobs),
        )
        prepared = PreparedPrompt(model, prompt, sampling, None)
        deadline = min(context.deadline, time.monotonic() + guard.settings.budget_s)
        row = InternalRow(self.upstream, request, prepared, question.row_id(number), deadline)
        attempts.append(row.attempt)
        try:
            await row.answer(question.headers)
        except SluiceError as error:
            raise _NoVerdict(_failure_of(error)) from error
        finally:
            self.upstream.usage.record_stream(request.tenant, row.stream, time.monotonic())
        return _said(row.attempt.transcript)


async def _prompts_of(question: Question, model: ServedModel) -> list[list[int]]:
    """The prompts of the rows, each of which fits the guard's context."""
    chars = sum(len(turn["content"]) for turn in question.turns) + len(question.check.answer)
    if chars > _THREAD_CHARS:
        return await asyncio.to_thread(_prompts_now, question, model)
    return _prompts_now(question, model)


def _prompts_now(question: Question, model: ServedModel) -> list[list[int]]:
    check, tokenizer = question.check, model.tokenizer
    family = check.guard.family
    tokens_max = model.context_tokens - family.answer_tokens
    if family.classifies:
        prompts = tokenizer.segments(_text_to_classify(question), tokens_max)
        if len(prompts) > SEGMENTS_MAX:
            raise _NoVerdict(Failure.TOO_LONG)
        return prompts
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
    delta = transcript.visible.delta(0, with_logprobs=True)
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
