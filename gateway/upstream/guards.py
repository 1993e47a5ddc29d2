"""Guard models: one question to one of them, and what a request asks them beside its generation.

Every problem of a question is a `GuardFailure`, never an error: its prompts, its rows, its answer.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Final, TypeVar

from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue
from typing_extensions import override

from gateway.admission.prompt_inspection import blocked
from gateway.admission.prompts import UNDRAWN, PreparedPrompt
from gateway.admission.request_context import RequestContext
from gateway.models.catalog import ServedModel
from gateway.models.tokenizer import Segment, TemplateRefused
from gateway.safety.actions import Action
from gateway.safety.findings import Finding
from gateway.safety.guards.checks import (
    Check,
    Checks,
    Cost,
    Decided,
    EntityGuard,
    Guard,
    entity_rules_of,
    rules_of,
)
from gateway.safety.guards.entities import LabelledToken
from gateway.safety.guards.families import (
    Family,
    GuardFailure,
    GuardVerdict,
    Message,
    Outcome,
    Unparsable,
)
from gateway.safety.output.windows import AnswerWindow
from gateway.streaming.answer import Answer
from gateway.streaming.row import Row
from gateway.streaming.transcript import Transcript
from gateway.upstream.rows import Beside, InternalRow, Upstream
from gateway.validation.conversation import SYSTEM, TOOL, USER, Conversation
from gateway.validation.requests import WORKLOAD_LABEL
from sluice.errors import (
    DeadlinePassed,
    ExpectedLate,
    ModelUnavailable,
    Overloaded,
    PromptTooLong,
    SluiceError,
    TransportUnavailable,
)
from sluice.internal.v1.task_pb2 import Sampling, Values
from sluice.telemetry import names
from sluice.telemetry.tracing import headers_of
from sluice.v1.inference_pb2 import SamplingParams

_log = logging.getLogger(__name__)

WORKLOAD: Final = "guard"
"""Answers of guards have similar lengths, unlike those to callers."""
SEGMENTS_MAX: Final = 32
"""Rows of one question to a classifier, whose context is short; a longer text is too long."""
READ_SEGMENTS_MAX: Final = 512
"""Rows of all texts of a prompt that a token classifier reads; more are too long."""
_ALTERNATIVES: Final = 16

_T = TypeVar("_T")

_FAILURES: Final[Mapping[type[Exception], GuardFailure]] = {
    TimeoutError: GuardFailure.TIMEOUT,
    DeadlinePassed: GuardFailure.TIMEOUT,
    PromptTooLong: GuardFailure.TOO_LONG,
    TemplateRefused: GuardFailure.FAILED,
    Unparsable: GuardFailure.UNPARSABLE,
    Overloaded: GuardFailure.OVERLOADED,
    ExpectedLate: GuardFailure.OVERLOADED,
    ModelUnavailable: GuardFailure.UNAVAILABLE,
    TransportUnavailable: GuardFailure.UNAVAILABLE,
}


async def ask(
    upstream: Upstream, about: RequestContext, check: Check, turns: Sequence[Message]
) -> tuple[Outcome, Cost]:
    """The verdict of a guard, within its time budget, and what it cost.

    ``turns``: of caller and model as the model may see them, the caller's last.
    """
    with _check_span(about, check) as span:
        question = _Question(upstream, about, check, headers_of(span))
        outcome, cost = await question.within_budget(question.verdict(turns))
        score = None if isinstance(outcome, GuardFailure) else outcome.score
        _set_outcome(span, rules_of(check.guard, outcome), score)
        return outcome, cost


async def read(
    upstream: Upstream, about: RequestContext, check: Check, texts: Sequence[str]
) -> tuple[list[list[Finding]] | GuardFailure, Decided]:
    """Return what a token classifier finds in `texts`; see `gateway.admission.prompt_inspection.EntityReader`."""
    with _check_span(about, check) as span:
        question = _Question(upstream, about, check, headers_of(span))
        outcome, cost = await question.within_budget(question.entities(texts))
        found = outcome if isinstance(outcome, GuardFailure) else [*chain.from_iterable(outcome)]
        taken = entity_rules_of(check.guard, found)
        _set_outcome(span, taken)
        return outcome, Decided(check, taken, cost=cost)


class _Question:
    """The rows of one check; ``headers``: their trace context."""

    def __init__(
        self, upstream: Upstream, about: RequestContext, check: Check, headers: Mapping[str, str]
    ) -> None:
        self._upstream = upstream
        self._about = about
        self._check = check
        self._headers = headers
        self._attempts: Sequence[Row] = ()
        self._begun = time.monotonic()

    async def within_budget(self, work: Awaitable[_T]) -> tuple[_T | GuardFailure, Cost]:
        """The result of ``work``, if it comes in time, and what it cost."""
        outcome: _T | GuardFailure
        try:
            async with asyncio.timeout(self._check.guard.settings.budget_s):
                outcome = await work
        except Exception as error:  # the answer would wait for it
            outcome = _FAILURES.get(type(error), GuardFailure.FAILED)
            if not isinstance(error, (SluiceError, *_FAILURES)):
                _log.exception("request %s: a check failed", self._about.request_id)
        cost = sum(attempt.cost for attempt in self._attempts)
        return outcome, Cost((time.monotonic() - self._begun) * 1000, cost)

    async def verdict(self, turns: Sequence[Message]) -> GuardVerdict:
        """The verdict of a guard that gives some."""
        model, guard = self._model(), self._check.guard
        assert isinstance(guard, Guard), "the others give no verdicts"
        texts = [self._check.answer, *(turn["content"] for turn in turns)]
        work = partial(prompts_of, guard.family, model, turns, self._check)
        prompts = await self._tokenized(texts, work)
        sampling = _sampling(guard.family, model)
        # Without the caller's stop strings, and with all alternatives.
        asked = SamplingParams(logprobs=sampling.top_logprobs)
        prepared = [PreparedPrompt(model, prompt, sampling, None) for prompt in prompts]
        answered = await self._compute(prepared, asked)
        return _worst([_verdict_of(guard.family, one.transcript) for one in answered])

    async def entities(self, texts: Sequence[str]) -> list[list[Finding]]:
        """What a token classifier finds in each text."""
        model, guard = self._model(), self._check.guard
        assert isinstance(guard, EntityGuard), "the others find no entities"
        segments = await self._tokenized(texts, partial(_segments, model, texts))
        if len(segments) > READ_SEGMENTS_MAX:
            raise PromptTooLong("the texts have too many segments for the classifier")
        prepared = [
            PreparedPrompt(model, segment.token_ids, UNDRAWN, None, Values())
            for _, segment in segments
        ]
        answered = await self._compute(prepared, SamplingParams())
        found: list[list[Finding]] = [[] for _ in texts]
        for (place, segment), attempt in zip(segments, answered, strict=True):
            found[place] += guard.tags.findings(_labelled(segment, attempt))
        return found

    def _model(self) -> ServedModel:
        model = self._about.policies.catalog[self._check.guard.settings.model]
        problem = self._upstream.overload.outlook(
            model.name, self._about.scheduling, time.monotonic()
        ).problem
        if problem is not None:
            raise problem
        return model

    async def _tokenized(self, texts: Sequence[str], work: Callable[[], _T]) -> _T:
        """Do ``work`` on ``texts``, in a thread when they are long."""
        threads = self._upstream.preparation.threads
        return await threads.work_on(texts, self._about.tenant, work)

    async def _compute(
        self, prepared: Sequence[PreparedPrompt], sampling: SamplingParams
    ) -> list[Row]:
        upstream, about = self._upstream, self._about
        request = replace(
            about.request, labels={WORKLOAD_LABEL: WORKLOAD}, sampling=sampling, tools=None
        )
        deadline = min(about.deadline, time.monotonic() + self._check.guard.settings.budget_s)
        rows = [
            InternalRow(upstream, request, one, self._row_id(number), deadline, self._headers)
            for number, one in enumerate(prepared)
        ]
        self._attempts = [row.attempt for row in rows]
        try:
            # Cancelled together: without an answer about one segment there is none about the text.
            await InternalRow.answer(*rows)
        finally:
            now = time.monotonic()
            for row in rows:
                upstream.usage.record_stream(about.scheduling, row.result, now)
        return [row.attempt for row in rows]

    def _row_id(self, number: int) -> str:
        """The name of the ``number``-th row."""
        # Classifiers of the prompt are counted apart.
        apart = isinstance(self._check.guard, EntityGuard) and not self._check.in_answer
        kind = "e" if apart else "g"
        name = f"{self._about.request_id}-{kind}{self._check.number}"
        return f"{name}-{number}" if number else name


def _check_span(about: RequestContext, check: Check) -> AbstractContextManager[Span]:
    attributes: dict[str, AttributeValue] = {
        names.GEN_AI_OPERATION: names.GUARDRAIL_OPERATION,
        names.GEN_AI_REQUEST_MODEL: check.guard.settings.model,
        names.GUARDRAIL_NAME: check.guard.name,
        names.GUARDRAIL_TARGET: "output" if check.in_answer else "input",
    }
    return about.log.child(names.SPAN_GUARD, attributes)


def _set_outcome(
    span: Span, taken: Sequence[tuple[str, Action]], score: float | None = None
) -> None:
    """Says on the span of a check what came of it."""
    action = max(action for _, action in taken)
    span.set_attribute(names.GUARDRAIL_ACTION, action.name.lower())
    pairs = [f"{rule}:{action.name.lower()}" for rule, action in taken]
    span.set_attribute(names.GUARDRAIL_OUTCOMES, pairs)
    if score is not None:
        span.set_attribute(names.GUARDRAIL_SCORE, score)


def _segments(model: ServedModel, texts: Sequence[str]) -> list[tuple[int, Segment]]:
    """The segments of all texts, each with the number of its text."""
    return [
        (place, segment)
        for place, text in enumerate(texts)
        if text.strip()
        for segment in model.tokenizer.segments(text, model.context_tokens)
    ]


def _labelled(segment: Segment, attempt: Row) -> Iterator[LabelledToken]:
    """The tokens of ``segment`` with what the model said of each: two numbers, its label and the probability."""
    assert attempt.final is not None, "it has ended"
    values = array("f", attempt.final.values)
    if len(values) != 2 * len(segment.token_ids):
        raise Unparsable
    for place, token in enumerate(segment.tokens, segment.lead):
        label, score = int(values[2 * place]), values[2 * place + 1]
        yield LabelledToken(token.start, token.end, token.word, label, score)


def prompts_of(
    family: Family, model: ServedModel, turns: Sequence[Message], check: Check
) -> list[list[int]]:
    """The prompts of the rows, each of which fits the guard's context."""
    tokens_max = model.context_tokens - family.answer_tokens
    if family.labels:
        asked = "\n".join(turn["content"] for turn in turns if turn["role"] == "user")
        text = check.answer if check.in_answer else asked
        prompts = model.tokenizer.segments(text, tokens_max)
        if len(prompts) > SEGMENTS_MAX:
            raise PromptTooLong("the text has too many segments for the guard")
        return [segment.token_ids for segment in prompts]
    messages = family.messages(turns, check.answer)
    if model.tokenizer.template is None:
        prompt = model.tokenizer.encode_text("\n".join(turn["content"] for turn in messages))
    else:
        prompt = model.tokenizer.encode_chat(messages, family.variables)
    if len(prompt) > tokens_max:
        raise PromptTooLong("the conversation does not fit into the context of the guard")
    return [prompt]


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


def _verdict_of(family: Family, transcript: Transcript) -> GuardVerdict:
    said, _ = transcript.whole(True, None)
    return family.verdict(said.text, [token.top for token in said.logprobs])


def _worst(verdicts: Sequence[GuardVerdict]) -> GuardVerdict:
    """Of the segments of one text."""
    flagged = [one for one in verdicts if one.flagged]
    scores = [one.score for one in verdicts if one.score is not None]
    categories = dict.fromkeys(name for one in flagged for name in one.categories)
    return GuardVerdict(bool(flagged), tuple(categories), max(scores, default=None))


class GuardRunner(Beside):
    """Implements `gateway.streaming.answer.Guards` for one request.

    Attributes:
        checks: which are due, and their outcomes.
    """

    def __init__(self, upstream: Upstream, context: RequestContext) -> None:
        super().__init__()
        self.checks = Checks(context.inspection.compiled.guards)
        self._upstream = upstream
        self._context = context
        self._turns = _turns(context.conversation)

    def check_prompt(self, answer: Answer) -> None:
        """Starts the checks of the prompt; the row of the answer is on its way already."""
        self._start(answer, self.checks.begin())
        answer.verdict_passed(time.monotonic())

    def check_answer(self, answer: Answer, *, ended: bool) -> None:
        """The answer of ``answer`` has grown, or ended; it is `Guards.check_answer`."""
        attempt = answer.current
        due = self.checks.produced(attempt.completion_tokens, lambda: attempt.raw_text, ended)
        self._start(answer, due)
        window = attempt.next_window()
        if window is not None:
            self.spawn(answer, partial(self._read, answer, attempt, window))

    @override
    def close(self) -> None:
        self.checks.close()
        super().close()

    def _start(self, answer: Answer, due: list[Check]) -> None:
        for check in due:
            self.spawn(answer, partial(self._ask, answer, check))

    async def _read(self, answer: Answer, attempt: Row, window: AnswerWindow) -> None:
        """Token classifiers read the next part of the answer."""
        decided, found = await self._entities(attempt, window)
        now = time.monotonic()
        blocking = [rule for one in decided if one.action is Action.BLOCK for rule in one.rules]
        if answer.current is attempt and blocking:
            answer.block(tuple(blocking), now)
            return
        answer.settle(attempt, window, found, now)
        self._continue(answer)

    async def _entities(
        self, attempt: Row, window: AnswerWindow
    ) -> tuple[list[Decided], list[Finding]]:
        """What is recorded of each classifier, and all that they found in ``window``."""
        context, guards = self._context, self._context.inspection.compiled.answer_readers
        checks = [self.checks.reading(one, attempt.completion_tokens) for one in guards]
        readings = await asyncio.gather(
            *(read(self._upstream, context, check, [window.text]) for check in checks)
        )
        decided = [one for _, one in readings]
        self.checks.decided += decided
        outcomes = [outcome for outcome, _ in readings if not isinstance(outcome, GuardFailure)]
        return decided, [found for outcome in outcomes for found in outcome[0]]

    async def _ask(self, answer: Answer, check: Check) -> None:
        outcome, cost = await ask(self._upstream, self._context, check, self._turns)
        decided = self.checks.decide(check, outcome, cost)
        if decided is None:
            return
        if decided.action is Action.BLOCK and check.in_answer:
            answer.block(decided.rules, time.monotonic())
        elif decided.action is Action.BLOCK:
            raise blocked(decided.rules, self._context.inspection.policy.version)
        elif decided.action is Action.ROUTE:
            await self._reroute(answer, decided)
        else:
            self._continue(answer)

    async def _reroute(self, answer: Answer, decided: Decided) -> None:
        model = decided.check.guard.settings.action.model
        assert model is not None, "a route has a model"
        answer.commit()
        if answer.current.model == model:
            self.checks.followed(decided.check)
            self._continue(answer)
            return
        prepared = await self._upstream.preparation.prepare_governed(self._context, model)
        row_id = f"{answer.request_id}-r{decided.check.number}"
        attempt = self._upstream.new_row(self._context.request, prepared, row_id)
        self.checks.followed(decided.check)
        if answer.reroute(attempt, ", ".join(decided.rules)):
            self._upstream.send(self._context, attempt, prepared)

    def _continue(self, answer: Answer) -> None:
        if not answer.ended and not answer.holding:
            self.check_answer(answer, ended=answer.row_ended)  # it may have grown meanwhile
        answer.verdict_passed(time.monotonic())


def _turns(conversation: Conversation) -> list[Message]:
    """The turns for guards: without the operator's own message. Results of tools are input, as the user's turns are."""
    turns: list[Message] = []
    for turn in conversation.turns:
        if turn.role == TOOL and turns and turns[-1]["role"] == USER:
            turns[-1] = {"role": USER, "content": f"{turns[-1]['content']}\n{turn.content}"}
        elif turn.role != SYSTEM:
            role = USER if turn.role == TOOL else turn.role
            turns.append({"role": role, "content": turn.content})
    return turns
