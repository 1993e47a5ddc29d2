"""From a valid request to a task: inspect, route, tokenize, fit. One method a hop, in the order of the hops."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from opentelemetry.trace import Span

from gateway.admission.overload import OverloadControl, SchedulingParams
from gateway.admission.prompts import PreparedPrompt, encode, fit
from gateway.admission.usage import CurrentLoad, UsageAccounting
from gateway.models.catalog import Catalog, ServedModel
from gateway.records.record_builder import RecordBuilder
from gateway.routing.features import Features, Governed
from gateway.routing.plan import Plan
from gateway.routing.router import Idle, Router
from gateway.safety.dry_run import DryRun, Move, words_of
from gateway.safety.guards.checks import Guard
from gateway.safety.inspector import (
    InspectedText,
    Inspector,
    PromptVerdict,
    RequestInspection,
    verdict_on,
)
from gateway.safety.policy import Policy
from gateway.streaming.endings import Hops
from gateway.telemetry.spans import CallSpans, finding_attributes
from gateway.validation.conversation import Conversation, Turn, check_not_emptied
from gateway.validation.requests import ValidRequest
from gateway.validation.violations import FieldViolations
from sluice.errors import SafetyBlocked
from sluice.telemetry import names

WATCHED_ALTERNATIVES: Final = 2
"""Alternatives per token that a cascade's watch looks at."""
# Other calls get their turn of the loop between long texts.
_LONG_CHARS: Final = 16_384


@dataclass(frozen=True)
class AdmittedRequest:
    """A request with everything decided."""

    plan: Plan
    conversation: Conversation
    """As a model may see it."""
    scheduling: SchedulingParams
    first: PreparedPrompt
    second: PreparedPrompt | None
    """Where a cascade may go over to."""
    guards: tuple[Guard, ...]
    """The guard models of the policy."""
    policy: str
    """Its version."""
    prepare_for: Callable[[str], Awaitable[PreparedPrompt]]
    """What another model would be asked; raises as `Admission.admit`."""


@dataclass(frozen=True)
class SafetyOutcome:
    """What the safety layer makes of a request."""

    inspection: RequestInspection
    inspected: Sequence[InspectedText]
    verdict: PromptVerdict

    @property
    def policy(self) -> Policy:
        """The one that decided."""
        return self.inspection.policy

    @property
    def governed(self) -> Governed | None:
        """Who must answer, by the policy."""
        route = self.verdict.route
        if route is None or route.model is None:
            return None
        return Governed(route.model, route.rule)


class Admission:
    """The decisions of the gateway, in order."""

    def __init__(
        self,
        catalog: Catalog,
        overload: OverloadControl,
        inspector: Inspector,
        router: Router,
        usage: UsageAccounting,
    ) -> None:
        self.catalog = catalog
        self._overload = overload
        self._inspector = inspector
        self._router = router
        self._usage = usage

    def use_router(self, router: Router) -> None:
        """Requests that come from now on are routed by ``router``."""
        self._router = router

    @property
    def dry_run(self) -> DryRun | None:
        """The counts of the policy under trial."""
        return self._inspector.dry_run

    async def admit(
        self, request: ValidRequest, spans: CallSpans, hops: Hops, record: RecordBuilder
    ) -> AdmittedRequest:
        """Decides everything; the times go into ``hops``, the decisions into ``record``.

        Raises:
            SafetyBlocked: the policy does not let the prompt through.
            InvalidRequest, PromptTooLong: the model cannot take the prompt.
            ModelUnavailable: nobody serves the model now.
            Overloaded: the answer would come after the deadline, or too much waits.
        """
        scheduling = SchedulingParams(
            request.priority_class, hops.arrived_at + request.timeout_s, request.allow_degraded
        )
        # Before any work is done for it: a refusal must be quick when most requests are refused.
        models = self.catalog.answering if request.model is None else (request.model,)
        self._overload.refuse_hopeless(models, scheduling, time.monotonic())
        with _timed(spans, names.SPAN_SAFETY) as (span, hop):
            conversation, safety = await self._inspect(request, span, record)
        hops.safety_ms = hop.ms
        with _timed(spans, names.SPAN_ROUTE) as (span, hop):
            # Who holds tokens goes on with the model that they came from.
            named = (request.resume and request.resume_model) or request.model or None
            features = await self._features(
                named, request.labels, request.tenant, conversation, safety
            )
            answer_tokens = request.sampling.max_tokens
            features = replace(features, answer_tokens=answer_tokens, key=record.request_id)
            plan = self._route(features, scheduling, span)
            if request.resume:
                plan = replace(plan, cascade=None)
            record.add_plan(plan)
        hops.route_ms = hop.ms
        with _timed(spans, names.SPAN_TOKENIZE) as (span, hop):
            first = await self._work(request, conversation, safety, plan.model)
            span.set_attribute(names.GEN_AI_INPUT_TOKENS, len(first.prompt_token_ids))
            second = await self._second(request, conversation, safety, plan, first)
        hops.tokenize_ms = hop.ms
        self.sent(first, request.priority_class)
        return AdmittedRequest(
            plan,
            conversation,
            scheduling,
            first,
            second,
            safety.inspection.guards,
            safety.policy.version,
            partial(self._governed, request, conversation, safety, scheduling),
        )

    def sent(self, prepared: PreparedPrompt, priority_class: str) -> None:
        """A task goes out now."""
        tokens = len(prepared.prompt_token_ids) + prepared.sampling.max_tokens
        self._overload.sent(prepared.model.name, priority_class, tokens, time.monotonic())

    async def _work(
        self, request: ValidRequest, conversation: Conversation, safety: SafetyOutcome, name: str
    ) -> PreparedPrompt:
        model = self.catalog[name]
        token_ids = await encode(conversation, model)
        sampling = fit(request, model, len(token_ids))
        inspect = partial(self._inspector.answer, safety.inspection, conversation.system_text)
        return PreparedPrompt(model, token_ids, sampling, inspect)

    async def _governed(
        self,
        request: ValidRequest,
        conversation: Conversation,
        safety: SafetyOutcome,
        scheduling: SchedulingParams,
        name: str,
    ) -> PreparedPrompt:
        """What the model that a guard's policy names is asked."""
        problem = self._overload.problem(name, scheduling, time.monotonic())
        if problem is not None:
            raise problem
        return await self._work(request, conversation, safety, name)

    async def _second(
        self,
        request: ValidRequest,
        conversation: Conversation,
        safety: SafetyOutcome,
        plan: Plan,
        first: PreparedPrompt,
    ) -> PreparedPrompt | None:
        """What the second model of a cascade would be asked: made now, so that going over waits for nothing."""
        if plan.cascade is None:
            return None
        second = await self._work(request, conversation, safety, plan.cascade.second)
        second.sampling.seed = first.sampling.seed
        # The first answer is watched by its log-probabilities, whether the caller wants them or not.
        first.sampling.logprobs = True
        first.sampling.top_logprobs = max(first.sampling.top_logprobs, WATCHED_ALTERNATIVES)
        return second

    async def count(
        self, conversation: Conversation, name: str | None, tenant: str
    ) -> tuple[int, ServedModel]:
        """Tokens of the prompt, and the model whose tokenizer counted."""
        texts = [turn.content for turn in conversation.turns]
        safety = await self.check(texts, {}, tenant)
        conversation = _passed(conversation, safety)
        features = await self._features(name, {}, tenant, conversation, safety)
        model = self.catalog[self._router.plan(features, Idle()).model]
        return len(await encode(conversation, model)), model

    async def check(
        self, texts: Sequence[str], labels: Mapping[str, str], tenant: str
    ) -> "SafetyOutcome":
        """What the safety layer makes of the texts of one request."""
        inspection = self._inspector.begin(tenant, labels, texts)
        inspected = []
        for result in inspection.results():
            inspected.append(result)
            if len(result.normalized) > _LONG_CHARS:
                await asyncio.sleep(0)
        return SafetyOutcome(inspection, inspected, verdict_on(inspected))

    async def _inspect(
        self, request: ValidRequest, span: Span, record: RecordBuilder
    ) -> tuple[Conversation, SafetyOutcome]:
        texts = [turn.content for turn in request.conversation.turns]
        safety = await self.check(texts, request.labels, request.tenant)
        _record(safety, span)
        seen = [result.text for result in safety.inspected]
        record.add_inspection(safety.policy.version, safety.verdict, texts, seen)
        await self._rehearse(safety, span)
        return _passed(request.conversation, safety), safety

    async def _rehearse(self, safety: SafetyOutcome, span: Span) -> None:
        """The policy under trial, if there is one, is tried on the same texts."""
        moves: Counter[Move] = Counter()
        for more in self._inspector.rehearse(safety.inspection, safety.inspected):
            moves += more
            await asyncio.sleep(0)
        if moves:
            span.set_attribute(names.DRY_RUN, words_of(moves))

    def _route(self, features: Features, scheduling: SchedulingParams, span: Span) -> Plan:
        now = time.monotonic()
        standing = CurrentLoad(self._usage, self._overload, scheduling.priority_class, now)
        plan = self._overload.choose(self._router.plan(features, standing), scheduling, now)
        span.set_attributes(
            {
                names.ROUTE_STRATEGY: plan.strategy,
                names.ROUTE_REASON: plan.reason,
                names.ROUTE_DEGRADED: plan.degraded,
                names.TIER: plan.tier,
                names.GEN_AI_RESPONSE_MODEL: plan.model,
            }
        )
        return plan

    async def _features(
        self,
        model: str | None,
        labels: Mapping[str, str],
        tenant: str,
        conversation: Conversation,
        safety: SafetyOutcome,
    ) -> Features:
        features = Features(
            model=model,
            text=conversation.user_text,
            labels=labels,
            tenant=tenant,
            findings=frozenset(rule for rule, _ in safety.verdict.taken),
            governed=safety.governed,
        )
        routed = model is None and features.governed is None
        if not routed or not self._router.needs_prompt_tokens:
            return features
        tokens = await encode(conversation, self.catalog[self.catalog.default])
        return replace(features, prompt_tokens=len(tokens))


def _passed(conversation: Conversation, safety: SafetyOutcome) -> Conversation:
    """The conversation as a model may see it.

    Raises:
        SafetyBlocked: it may not.
        InvalidRequest: nothing is left of a turn.
    """
    rules, version = safety.verdict.blocked, safety.policy.version
    if rules:
        raise SafetyBlocked(
            f"the safety policy {version} blocks the prompt: {', '.join(rules)}",
            metadata={"rules": ",".join(rules), "policy": version},
        )
    turns = tuple(
        Turn(turn.role, result.text)
        for turn, result in zip(conversation.turns, safety.inspected, strict=True)
    )
    inspected = replace(conversation, turns=turns)
    found = FieldViolations()
    check_not_emptied(inspected, found)
    found.raise_if_any()
    return inspected


def _record(safety: SafetyOutcome, span: Span) -> None:
    span.set_attribute(names.SAFETY_POLICY, safety.policy.version)
    for name, value in finding_attributes(safety.verdict.taken).items():
        span.set_attribute(name, value)


@dataclass
class _Hop:
    ms: float = 0.0


@contextmanager
def _timed(spans: CallSpans, name: str) -> Iterator[tuple[Span, _Hop]]:
    """The span of a hop, and what it took once it is over."""
    hop, start = _Hop(), time.monotonic()
    with spans.hop(name) as span:
        yield span, hop
    hop.ms = (time.monotonic() - start) * 1000
