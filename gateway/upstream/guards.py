"""Guard models: one check by one of them, and the checks of a request beside its generation.

Every problem of a check is a `GuardFailure`, never an error: its prompts, its runs, its answer.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from gateway.admission.admission import blocked
from gateway.admission.request_context import PreparedPrompt, RequestContext
from gateway.admission.text_prompts import UNDRAWN
from gateway.admission.turns import TextThreads
from gateway.models.catalog import ServedModel
from gateway.models.tokenizer import Segment, TemplateRefused
from gateway.safety.findings import Action, Finding
from gateway.safety.guards import families
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
from gateway.safety.guards.families import Family, Message, Unparsable
from gateway.safety.inspector import EntityResults
from gateway.safety.output.windows import AnswerWindow
from gateway.streaming.answer_stream import AnswerStream
from gateway.streaming.model_run import ModelRun, ResultCollector
from gateway.upstream.runs import Upstream, spawn_beside
from gateway.validation.conversation import SYSTEM, TOOL, USER, Conversation
from gateway.validation.requests import WORKLOAD_LABEL
from sluice import errors
from sluice.internal.v1.task_pb2 import Sampling, Values
from sluice.telemetry import names
from sluice.telemetry.tracing import headers_of
from sluice.v1.inference_pb2 import SamplingParams

logger = logging.getLogger(__name__)

WORKLOAD: Final = "guard"
"""Workload of guard runs: their answers have similar lengths, unlike those to callers."""
SEGMENTS_MAX: Final = 32
"""Runs of one check by a classifier, whose context is short; a longer text is too long."""
READ_SEGMENTS_MAX: Final = 512
"""Runs of all texts of a prompt that a token classifier reads; more are too long."""
ALTERNATIVES_MIN: Final = 16
"""Least number of alternatives for a token of a guard's answer: a verdict's score is made of them."""

_T = TypeVar("_T")

_FAILURES: Final[Mapping[type[Exception], families.GuardFailure]] = {
    TimeoutError: families.GuardFailure.TIMEOUT,
    errors.DeadlinePassed: families.GuardFailure.TIMEOUT,
    errors.PromptTooLong: families.GuardFailure.TOO_LONG,
    TemplateRefused: families.GuardFailure.FAILED,
    Unparsable: families.GuardFailure.UNPARSABLE,
    errors.Overloaded: families.GuardFailure.OVERLOADED,
    errors.ExpectedLate: families.GuardFailure.OVERLOADED,
    errors.ModelUnavailable: families.GuardFailure.UNAVAILABLE,
    errors.TransportUnavailable: families.GuardFailure.UNAVAILABLE,
}


async def find_entities(
    upstream: Upstream, context: RequestContext, checks: Sequence[Check], texts: Sequence[str]
) -> tuple[EntityResults, list[Decided]]:
    """Return what token classifiers find in `texts`, and the decision of each check for the record."""

    async def read(check: Check) -> tuple[list[list[Finding]] | families.GuardFailure, Decided]:
        with _check_span(context, check) as span:
            runs = _CheckRuns(upstream, context, check, headers_of(span))
            outcome, cost = await runs.within_budget(runs.entities(texts))
            actions = entity_rules_of(check.guard, outcome)
            _set_outcome(span, actions)
            return outcome, Decided(check, actions, cost=cost)

    by_text: list[list[Finding]] = [[] for _ in texts]
    failed, decisions = list[tuple[str, Action]](), list[Decided]()
    for outcome, decided in await asyncio.gather(*map(read, checks)):
        decisions.append(decided)
        if isinstance(outcome, families.GuardFailure):
            failed += decided.actions
            continue
        for findings, added in zip(by_text, outcome, strict=True):
            findings += added
    return EntityResults(by_text, failed), decisions


@dataclass(eq=False)
class _CheckRuns:
    """The runs of one check; `headers`: their trace context."""

    upstream: Upstream
    context: RequestContext
    check: Check
    headers: Mapping[str, str]
    runs: Sequence[ModelRun] = ()
    began_at: float = field(default_factory=time.monotonic)

    async def within_budget(self, work: Awaitable[_T]) -> tuple[_T | families.GuardFailure, Cost]:
        """Return the result of `work`, if it comes in time, and what it cost."""
        outcome: _T | families.GuardFailure
        try:
            async with asyncio.timeout(self.check.guard.settings.budget_s):
                outcome = await work
        except Exception as error:  # the answer would wait for it
            outcome = _FAILURES.get(type(error), families.GuardFailure.FAILED)
            if not isinstance(error, (errors.SluiceError, *_FAILURES)):
                logger.exception("guard check of request %s failed", self.context.request_id)
        cost = sum(run.cost for run in self.runs)
        return outcome, Cost((time.monotonic() - self.began_at) * 1000, cost)

    async def verdict(self, turns: Sequence[Message]) -> families.GuardVerdict:
        """Return the verdict of a `Guard` on the conversation and the answer, over all of its runs."""
        model, guard = self._model(), self.check.guard
        assert isinstance(guard, Guard), "the others give no verdicts"
        texts = [self.check.answer, *(turn["content"] for turn in turns)]
        work = partial(prompts_of, guard.family, model, turns, self.check)
        prompts = await self._threads.work_on(texts, self.context.tenant, work)
        sampling = _sampling(guard.family, model)
        # Without the caller's stop strings, and with all alternatives.
        params = SamplingParams(logprobs=sampling.top_logprobs)
        prepared = [PreparedPrompt(model, prompt, sampling, None) for prompt in prompts]
        await self._compute(prepared, params)
        deltas = [run.transcript.whole(True, None)[0] for run in self.runs]
        verdicts = [
            guard.family.verdict(delta.text, [token.top for token in delta.logprobs])
            for delta in deltas
        ]
        flagged = [verdict for verdict in verdicts if verdict.flagged]
        scores = [verdict.score for verdict in verdicts if verdict.score is not None]
        categories = dict.fromkeys(name for verdict in flagged for name in verdict.categories)
        score = max(scores, default=None)
        return families.GuardVerdict(bool(flagged), tuple(categories), score)

    async def entities(self, texts: Sequence[str]) -> list[list[Finding]]:
        """Return what a token classifier finds in each text."""
        model, guard = self._model(), self.check.guard
        assert isinstance(guard, EntityGuard), "the others find no entities"
        work = partial(_segments, model, texts)
        segments = await self._threads.work_on(texts, self.context.tenant, work)
        if len(segments) > READ_SEGMENTS_MAX:
            raise errors.PromptTooLong("the texts have too many segments for the classifier")
        prompts = [segment.token_ids for _, segment in segments]
        prepared = [PreparedPrompt(model, ids, UNDRAWN, None, Values()) for ids in prompts]
        await self._compute(prepared, SamplingParams())
        findings: list[list[Finding]] = [[] for _ in texts]
        for (number, segment), run in zip(segments, self.runs, strict=True):
            findings[number] += guard.tags.findings(_labelled(segment, run))
        return findings

    @property
    def _threads(self) -> TextThreads:
        return self.upstream.preparation.threads

    def _model(self) -> ServedModel:
        name, overload = self.check.guard.settings.model, self.upstream.overload
        problem = overload.outlook(name, self.context, time.monotonic()).problem
        if problem is not None:
            raise problem
        return self.context.policies.catalog[name]

    async def _compute(self, prepared: Sequence[PreparedPrompt], sampling: SamplingParams) -> None:
        upstream, context, check = self.upstream, self.context, self.check
        labels = {WORKLOAD_LABEL: WORKLOAD}
        request = replace(context.request, labels=labels, sampling=sampling, tools=None)
        deadline = min(context.deadline, time.monotonic() + check.guard.settings.budget_s)
        # Classifiers of the prompt are counted apart.
        is_apart = isinstance(check.guard, EntityGuard) and not check.in_answer
        name = f"{context.request_id}-{'e' if is_apart else 'g'}{check.number}"
        runs = list[ModelRun]()
        for number, prompt in enumerate(prepared):
            run_id = f"{name}-{number}" if number else name
            runs.append(upstream.new_run(request, prompt, run_id, deadline))
            runs[-1].headers = self.headers

        def on_end(result: ResultCollector) -> None:
            upstream.record_end(context, result, time.monotonic())

        self.runs = runs
        await upstream.compute(runs, on_end)


def _check_span(context: RequestContext, check: Check) -> AbstractContextManager[Span]:
    attributes: dict[str, AttributeValue] = {
        names.GEN_AI_OPERATION: names.GUARDRAIL_OPERATION,
        names.GEN_AI_REQUEST_MODEL: check.guard.settings.model,
        names.GUARDRAIL_NAME: check.guard.name,
        names.GUARDRAIL_TARGET: "output" if check.in_answer else "input",
    }
    return context.log.child(names.SPAN_GUARD, attributes)


def _set_outcome(span: Span, actions: Sequence[tuple[str, Action]]) -> None:
    """Set the outcome of a check on its span."""
    pairs = [f"{rule}:{action.name.lower()}" for rule, action in actions]
    span.set_attribute(names.GUARDRAIL_OUTCOMES, pairs)


def _segments(model: ServedModel, texts: Sequence[str]) -> list[tuple[int, Segment]]:
    """Return the segments of all texts, each with the number of its text."""
    return [
        (number, segment)
        for number, text in enumerate(texts)
        if text.strip()
        for segment in model.tokenizer.segments(text, model.context_tokens)
    ]


def _labelled(segment: Segment, run: ModelRun) -> Iterator[LabelledToken]:
    """Yield the tokens of `segment` with the model's two numbers of each: its label and the probability."""
    assert run.final is not None, "it has ended"
    values = array("f", run.final.values)
    if len(values) != 2 * len(segment.token_ids):
        raise Unparsable
    for index, token in enumerate(segment.tokens, segment.lead):
        label, score = int(values[2 * index]), values[2 * index + 1]
        yield LabelledToken(token.start, token.end, token.word, label, score)


def prompts_of(
    family: Family, model: ServedModel, turns: Sequence[Message], check: Check
) -> list[list[int]]:
    """Return the prompts of the runs, each of which fits the guard's context.

    Raises:
        PromptTooLong: The conversation does not fit, or the text has too many segments.
        TemplateRefused: The guard's chat template does not take the conversation.
    """
    tokens_max = model.context_tokens - family.answer_tokens
    if family.labels:
        prompt_text = "\n".join(turn["content"] for turn in turns if turn["role"] == "user")
        text = check.answer if check.in_answer else prompt_text
        prompts = model.tokenizer.segments(text, tokens_max)
        if len(prompts) > SEGMENTS_MAX:
            raise errors.PromptTooLong("the text has too many segments for the guard")
        return [segment.token_ids for segment in prompts]
    messages = family.messages(turns, check.answer)
    if model.tokenizer.template is None:
        prompt = model.tokenizer.encode_text("\n".join(turn["content"] for turn in messages))
    else:
        prompt = model.tokenizer.encode_chat(messages, family.variables)
    if len(prompt) > tokens_max:
        raise errors.PromptTooLong("the conversation does not fit into the context of the guard")
    return [prompt]


def _sampling(family: Family, model: ServedModel) -> Sampling:
    return Sampling(
        max_tokens=family.answer_tokens,
        temperature=0.0,
        top_p=1.0,
        repetition_penalty=1.0,
        logprobs=True,
        top_logprobs=max(ALTERNATIVES_MIN, min(32, len(model.tokenizer.labels))),
        stop_token_ids=sorted(model.tokenizer.stop_token_ids),
    )


class GuardRunner:
    """Runs the checks of one request beside its answer.

    Attributes:
        checks: which are due, and their outcomes.
    """

    def __init__(self, upstream: Upstream, context: RequestContext) -> None:
        self.checks = Checks(context.safety.guards)
        self._upstream = upstream
        self._context = context
        self._turns = _turns(context.conversation)

    def check_prompt(self, stream: AnswerStream) -> None:
        """Start the checks of the prompt; the run of the answer is on its way already."""
        self._start(stream, self.checks.begin())
        stream.pass_verdict(time.monotonic())

    def check_answer(self, stream: AnswerStream, has_ended: bool) -> None:
        """Start the checks that are due, now that the answer has grown or ended."""
        run = stream.current
        due = self.checks.produced(run.completion_tokens, lambda: run.raw_text, has_ended)
        self._start(stream, due)
        window = run.next_window()
        if window is not None:
            spawn_beside(stream, partial(self._classify, stream, run, window))

    def _start(self, stream: AnswerStream, due: list[Check]) -> None:
        for check in due:
            spawn_beside(stream, partial(self._check, stream, check))

    async def _classify(self, stream: AnswerStream, run: ModelRun, window: AnswerWindow) -> None:
        """Let token classifiers read the next part of the answer."""
        context, upstream = self._context, self._upstream
        guards = context.safety.answer_readers
        checks = [self.checks.reading(guard, run.completion_tokens) for guard in guards]
        entities, decided = await find_entities(upstream, context, checks, [window.text])
        self.checks.decided += decided
        blocking = [check for check in decided if check.action is Action.BLOCK]
        rules = [rule for check in blocking for rule in check.rules]
        now = time.monotonic()
        if stream.current is run and rules:
            stream.block(tuple(rules), now)
            return
        stream.settle(run, window, entities.by_text[0], now)
        self._continue(stream)

    async def _check(self, stream: AnswerStream, check: Check) -> None:
        context = self._context
        with _check_span(context, check) as span:
            runs = _CheckRuns(self._upstream, context, check, headers_of(span))
            outcome, cost = await runs.within_budget(runs.verdict(self._turns))
            _set_outcome(span, rules_of(check.guard, outcome))
        decided = self.checks.decide(check, outcome, cost)
        if decided is None:
            return
        if decided.action is Action.BLOCK and check.in_answer:
            stream.block(decided.rules, time.monotonic())
        elif decided.action is Action.BLOCK:
            raise blocked(decided.rules, self._context.safety.version)
        elif decided.action is Action.ROUTE:
            await self._reroute(stream, decided)
        else:
            self._continue(stream)

    async def _reroute(self, stream: AnswerStream, decided: Decided) -> None:
        model = decided.check.guard.settings.action.model
        assert model is not None, "a route has a model"
        stream.commit()
        if stream.current.model == model:
            self.checks.followed(decided.check)
            self._continue(stream)
            return
        context, upstream = self._context, self._upstream
        problem = upstream.overload.outlook(model, context, time.monotonic()).problem
        if problem is not None:
            raise problem
        prepared = await upstream.preparation.prepare_for(context, model)
        assert prepared is not None, "no room is asked for"
        run_id = f"{stream.request_id}-r{decided.check.number}"
        run = upstream.new_run(context.request, prepared, run_id, context.deadline)
        self.checks.followed(decided.check)
        if stream.reroute(run, ", ".join(decided.rules)):
            upstream.send(context, run)

    def _continue(self, stream: AnswerStream) -> None:
        if not stream.has_ended and not stream.is_held:
            self.check_answer(stream, stream.has_run_ended)  # it may have grown meanwhile
        stream.pass_verdict(time.monotonic())


def _turns(conversation: Conversation) -> list[Message]:
    """Return the turns for guards, without the operator's own message.

    Results of tools are input, as the user's turns are.
    """
    turns: list[Message] = []
    for turn in conversation.turns:
        if turn.role == TOOL and turns and turns[-1]["role"] == USER:
            turns[-1] = {"role": USER, "content": f"{turns[-1]['content']}\n{turn.content}"}
        elif turn.role != SYSTEM:
            role = USER if turn.role == TOOL else turn.role
            turns.append({"role": role, "content": turn.content})
    return turns
