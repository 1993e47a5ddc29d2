"""From a valid request to a task in three hops: inspect, route, tokenize."""

import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, TypeVar

from opentelemetry.trace import Span

from gateway.admission.constraint_checks import ConstraintChecks
from gateway.admission.entities import Asker, EntityReader, find_entities
from gateway.admission.overload import OverloadControl, SchedulingParams
from gateway.admission.prompts import PreparedPrompt, check_length, encode, is_long, prepare
from gateway.admission.tenant_threads import TenantThreads
from gateway.admission.usage import CurrentLoad, UsageAccounting
from gateway.models.catalog import Catalog, ServedModel
from gateway.records.record_builder import RecordBuilder
from gateway.routing.budget import Reservation
from gateway.routing.features import Features, Governed
from gateway.routing.plan import BUDGET, SAFETY, Plan
from gateway.routing.router import NoLoad, Router
from gateway.safety.dry_run import move_labels
from gateway.safety.guards.checks import Decided, EntityGuard, Guard
from gateway.safety.inspector import (
    NO_ENTITIES,
    FoundEntities,
    InspectedText,
    Inspector,
    PromptVerdict,
    RequestInspection,
    verdict_on,
)
from gateway.safety.policy import Policy
from gateway.streaming.lifecycle import RequestTimings
from gateway.telemetry.spans import CallSpans, finding_attributes
from gateway.tools.formats import HERMES
from gateway.tools.grammar import arguments_of, grammar_of
from gateway.validation.conversation import Conversation
from gateway.validation.requests import ValidRequest
from sluice.errors import BudgetSpent, InvalidRequest, SafetyBlocked
from sluice.telemetry import names

WATCHED_ALTERNATIVES: Final = 2
"""Alternatives per token that the decision of a cascade looks at."""
BUDGET_RETRY_S: Final = 60.0
"""The window of a budget moves by the minute, seconds."""
_T = TypeVar("_T")
_Hop = Literal["safety_ms", "route_ms", "tokenize_ms"]


@dataclass(frozen=True)
class IncomingRequest:
    """A valid request on its way through the gateway, and what is said about it.

    Attributes:
        record: the decisions.
        spans: of its call.
        timings: of its hops.
    """

    request: ValidRequest
    record: RecordBuilder
    spans: CallSpans
    timings: RequestTimings

    @property
    def request_id(self) -> str:
        """The name of the request."""
        return self.record.request_id

    @contextmanager
    def hop(self, name: str, hop: _Hop) -> Iterator[Span]:
        """The span of a hop; its duration goes into the timings."""
        start = time.monotonic()
        if self.spans.recorded:
            with self.spans.hop(name) as span:
                yield span
        else:
            yield self.spans.unseen
        setattr(self.timings, hop, (time.monotonic() - start) * 1000)


@dataclass(frozen=True)
class AdmittedRequest:
    """A request with all decisions made.

    Attributes:
        conversation: as a model may see it.
        second: for the second model of a cascade.
        guards: the guard models of the policy.
        entity_guards: its token classifiers that read answers.
        policy: version of the policy.
        reservation: what it may cost; released when the request ends.
        prepare_for: prepares the prompt for the model that a guard's policy names; raises as `Admission.admit`.
    """

    plan: Plan
    conversation: Conversation
    scheduling: SchedulingParams
    first: PreparedPrompt
    second: PreparedPrompt | None
    guards: tuple[Guard, ...]
    entity_guards: tuple[EntityGuard, ...]
    policy: str
    reservation: Reservation
    prepare_for: Callable[[str], Awaitable[PreparedPrompt]]


@dataclass(frozen=True)
class AdmittedTexts:
    """A request about texts, each of which is a row, with all decisions made.

    Attributes:
        rows: one for each text, pair or answer, in order.
        reservation: as in `AdmittedRequest`.
    """

    plan: Plan
    scheduling: SchedulingParams
    rows: Sequence[PreparedPrompt]
    reservation: Reservation


PrepareTexts = Callable[[Conversation, ServedModel], Sequence[PreparedPrompt]]
"""The rows of a request, by its texts as a model may see them."""


@dataclass(frozen=True)
class SafetyOutcome:
    """What the safety layer decided about the texts of a request."""

    inspection: RequestInspection
    entities: FoundEntities
    inspected: Sequence[InspectedText]
    verdict: PromptVerdict
    checks: Sequence[Decided] = ()
    """Of token classifiers."""

    @property
    def policy(self) -> Policy:
        """The policy that decided."""
        return self.inspection.policy

    @property
    def governed(self) -> Governed | None:
        """The model that must answer by the policy, if it names one."""
        route = self.verdict.route
        if route is None or route.model is None:
            return None
        return Governed(route.model, route.rule)


@dataclass(frozen=True)
class _InspectedPrompt:
    """A conversation as a model may see it, with the outcome of its inspection."""

    conversation: Conversation
    safety: SafetyOutcome


@dataclass(frozen=True)
class _Decided:
    """A request that is inspected and routed; as in `AdmittedRequest`."""

    prompt: _InspectedPrompt
    plan: Plan
    scheduling: SchedulingParams
    reservation: Reservation


class Admission:
    """The decisions of the gateway about a request, in order.

    Attributes:
        router: replaced when the routing policies are reloaded.
        entities: asks token classifiers; set once there is a way to send rows.
        threads: in which long texts become tokens.
    """

    entities: EntityReader

    def __init__(
        self,
        catalog: Catalog,
        overload: OverloadControl,
        inspector: Inspector,
        router: Router,
        usage: UsageAccounting,
    ) -> None:
        self.catalog = catalog
        self.inspector = inspector
        self.router = router
        self._overload = overload
        self._usage = usage
        # One thread: it shares the interpreter with the event loop, and takes half of it at most.
        self._inspections = TenantThreads("inspection", 1)
        self.threads = TenantThreads("encoding")
        self._constraints = ConstraintChecks()

    def close(self) -> None:
        """Nothing is inspected any more."""
        self._inspections.close()
        self.threads.close()
        self._constraints.close()

    async def admit(self, incoming: IncomingRequest) -> AdmittedRequest:
        """Decides everything; times and decisions go into ``incoming``.

        Raises:
            SafetyBlocked: the policy does not let the prompt through.
            InvalidRequest, PromptTooLong: the model cannot take the prompt.
            ModelUnavailable: no worker serves the model now.
            Overloaded: the answer would come after the deadline, or the queue is full.
            LimitReached: of its tenant, its key, or the tenant's use of the model.
            BudgetSpent: the tenant has spent its budget, and names a model that costs more than that of the budget.
        """
        request, decided = incoming.request, await self._decide(incoming, one_prompt=True)
        prompt, plan, reservation = decided.prompt, decided.plan, decided.reservation
        with reservation.released_on_error():
            if request.audio is not None:
                _check_governed(plan, request.model)
            with incoming.hop(names.SPAN_TOKENIZE, "tokenize_ms") as span:
                first = await self._prepare(request, prompt, plan.model)
                span.set_attribute(names.GEN_AI_INPUT_TOKENS, len(first.prompt_token_ids))
                second = await self._prepare_second(request, prompt, plan, first)
            self._usage.hold_longest(reservation, request.caller, first, second)
        return AdmittedRequest(
            plan,
            prompt.conversation,
            decided.scheduling,
            first,
            second,
            prompt.safety.inspection.guards,
            prompt.safety.inspection.answer_readers,
            prompt.safety.policy.version,
            reservation,
            partial(self._prepare_governed, request, prompt, decided.scheduling),
        )

    async def admit_texts(self, incoming: IncomingRequest, prepare: PrepareTexts) -> AdmittedTexts:
        """As `admit`, of a request whose texts ``prepare`` makes a row each; raises as that."""
        decided = await self._decide(incoming, one_prompt=False)
        plan, conversation = decided.plan, decided.prompt.conversation
        with decided.reservation.released_on_error():
            _check_governed(plan, incoming.request.model)
            with incoming.hop(names.SPAN_TOKENIZE, "tokenize_ms") as span:
                work = partial(prepare, conversation, self.catalog[plan.model])
                long = is_long([turn.content for turn in conversation.turns])
                tenant = incoming.request.tenant
                rows = await self.threads.run(tenant, work) if long else work()
                tokens = sum(len(row.prompt_token_ids) for row in rows)
                span.set_attribute(names.GEN_AI_INPUT_TOKENS, tokens)
            self._usage.hold_longest(decided.reservation, incoming.request.caller, *rows)
        return AdmittedTexts(plan, decided.scheduling, rows, decided.reservation)

    async def _decide(self, incoming: IncomingRequest, *, one_prompt: bool) -> _Decided:
        """Inspects and routes. ``one_prompt``: all texts together must fit a context, with an answer."""
        request = incoming.request
        router = self.router  # one version of the policies for all of the request
        scheduling = SchedulingParams(
            request.priority_class,
            incoming.timings.arrived_at + request.timeout_s,
            request.allow_degraded,
            request.tenant,
        )
        # Before any work is done for it: a refusal must be quick when most requests are refused.
        self._usage.limits.enter(request.caller)
        models = self.catalog.reading if request.model is None else (request.model,)
        self._overload.refuse_hopeless(models, scheduling, time.monotonic())
        if one_prompt:
            texts = request.conversation.texts
            check_length(texts, [self.catalog[model] for model in models])
        await self._check_constraint(request)
        with incoming.hop(names.SPAN_SAFETY, "safety_ms") as span:
            asker = Asker(request, incoming.request_id, scheduling, incoming.spans)
            prompt = await self._inspect(asker, span, incoming.record)
        with incoming.hop(names.SPAN_ROUTE, "route_ms") as span:
            plan = await self._route(router, incoming, prompt, scheduling, span)
        unnamed = one_prompt and not request.sampling.max_tokens
        longest = self.catalog[plan.model].max_answer_tokens if unnamed else 0
        reservation = self._usage.reserve(request.tenant, plan, longest)
        return _Decided(prompt, plan, scheduling, reservation)

    def sent(self, prepared: PreparedPrompt, priority_class: str) -> None:
        """A task is published now."""
        tokens = len(prepared.prompt_token_ids) + prepared.sampling.max_tokens
        self._overload.sent(prepared.model.name, priority_class, tokens, time.monotonic())

    async def count(
        self, conversation: Conversation, name: str | None, asker: Asker
    ) -> tuple[int, ServedModel]:
        """Tokens of the prompt, and the model whose tokenizer counted them."""
        tenant = asker.request.tenant
        safety = await self.check(asker)
        prompt = _InspectedPrompt(_passed(conversation, safety), safety)
        features = await self._features(self.router, prompt, name, {}, tenant)
        model = self.catalog[self.router.plan(features, NoLoad()).model]
        return len(await encode(prompt.conversation, model, self.threads, tenant)), model

    async def check(self, asker: Asker) -> SafetyOutcome:
        """Inspects the texts of a request."""
        request, texts = asker.request, asker.request.conversation.texts
        begin = partial(self.inspector.begin, request.tenant, request.labels, texts)
        inspection = await self._run(request.tenant, begin, texts)
        entities = NO_ENTITIES
        checks: tuple[Decided, ...] = ()
        if inspection.entity_guards:
            entities, checks = await find_entities(self.entities, inspection, asker)
        return await self._run(
            request.tenant, partial(_decide, inspection, entities, checks), texts
        )

    async def _run(self, tenant: str, work: Callable[[], _T], texts: Sequence[str]) -> _T:
        """Does ``work`` on ``texts``: in the thread when they are long, so that the event loop runs other calls."""
        if not is_long(texts):
            return work()
        return await self._inspections.run(tenant, work)

    async def _check_constraint(self, request: ValidRequest) -> None:
        """Raises InvalidRequest for a constraint that no worker could enforce."""
        for field, kind, text in _constraints_of(request):
            problem = await self._constraints.problem(kind, text, request.tenant)
            if problem is not None:
                raise InvalidRequest.of(field, problem)

    async def _inspect(self, asker: Asker, span: Span, record: RecordBuilder) -> _InspectedPrompt:
        conversation = asker.request.conversation
        safety = await self.check(asker)
        taken = finding_attributes(safety.verdict.taken)
        span.set_attributes({names.SAFETY_POLICY: safety.policy.version, **taken})
        seen = [result.text for result in safety.inspected]
        record.add_inspection(
            safety.policy.version, safety.verdict, conversation.texts, seen, safety.checks
        )
        await self._rehearse(safety, asker.request.tenant, span)
        return _InspectedPrompt(_passed(conversation, safety), safety)

    async def _rehearse(self, safety: SafetyOutcome, tenant: str, span: Span) -> None:
        """Tries the dry-run policy, if there is one, on the same texts."""
        rehearse = partial(self.inspector.rehearse, safety.inspection, safety.entities)
        tried = await self._run(tenant, rehearse, safety.inspection.texts)
        moves = self.inspector.count(safety.inspected, tried)
        if moves:
            span.set_attribute(names.DRY_RUN, move_labels(moves))

    async def _route(
        self,
        router: Router,
        incoming: IncomingRequest,
        prompt: _InspectedPrompt,
        scheduling: SchedulingParams,
        span: Span,
    ) -> Plan:
        request = incoming.request
        # A resumed answer continues on the model that its tokens came from.
        named = (request.resume and request.resume_model) or request.model or None
        features = replace(
            await self._features(router, prompt, named, request.labels, request.tenant),
            resumed=bool(request.resume and request.resume_model),
            answer_tokens=request.sampling.max_tokens,
            key=request.route_key or incoming.request_id,
        )
        now = time.monotonic()
        load = CurrentLoad(self._usage, self._overload, request.priority_class, now, request.tenant)
        plan = router.plan(features, load)
        if (
            plan.strategy == BUDGET
            and not request.allow_degraded
            and request.model not in (None, plan.model)
        ):
            raise BudgetSpent(
                f"{plan.reason}: {request.model} costs more than {plan.model}, which still answers; name that one, or"
                " set allow_degraded",
                retry_after_s=BUDGET_RETRY_S,
            )
        plan = self._overload.choose(plan, scheduling, now)
        span.set_attributes(
            {
                names.ROUTE_STRATEGY: plan.strategy,
                names.ROUTE_REASON: plan.reason,
                names.ROUTE_DEGRADED: plan.degraded,
                names.TIER: plan.tier,
                names.GEN_AI_RESPONSE_MODEL: plan.model,
            }
        )
        if request.resume:
            plan = replace(plan, cascade=None)
        incoming.record.add_plan(plan)
        return plan

    async def _features(
        self,
        router: Router,
        prompt: _InspectedPrompt,
        model: str | None,
        labels: Mapping[str, str],
        tenant: str,
    ) -> Features:
        safety = prompt.safety
        features = Features(
            model=model,
            text=prompt.conversation.user_text,
            labels=labels,
            tenant=tenant,
            findings=frozenset(rule for rule, _ in safety.verdict.taken),
            governed=safety.governed,
        )
        routed = model is None and features.governed is None
        if not routed or not router.needs_prompt_tokens:
            return features
        default = self.catalog[self.catalog.default]
        tokens = await encode(prompt.conversation, default, self.threads, tenant)
        return replace(features, prompt_tokens=len(tokens))

    async def _prepare(
        self, request: ValidRequest, prompt: _InspectedPrompt, model: str
    ) -> PreparedPrompt:
        conversation, inspection = prompt.conversation, prompt.safety.inspection
        inspect = partial(self.inspector.answer, inspection, conversation.system_text)
        version = self._version(request, model)
        return await prepare(request, conversation, version, inspect, self.threads)

    def _version(self, request: ValidRequest, model: str) -> ServedModel:
        """The version of ``model`` that answers: for tokens that the caller holds the one that they came from."""
        served = self.catalog.version(model, request.resume_version)
        if served is not self.catalog[model] and not self._overload.serves(
            served.settings.task_name, time.monotonic()
        ):
            raise InvalidRequest.of(
                "resume.resume_token",
                "is of a version of the model that was replaced: ask again without resume",
            )
        return served

    async def _prepare_second(
        self, request: ValidRequest, prompt: _InspectedPrompt, plan: Plan, first: PreparedPrompt
    ) -> PreparedPrompt | None:
        """For the second model of a cascade; prepared now, so that an escalation does not wait for it."""
        if plan.cascade is None:
            return None
        second = await self._prepare(request, prompt, plan.cascade.second)
        second.sampling.seed = first.sampling.seed
        # The first answer is judged by its log-probabilities, whether the caller wants them or not.
        first.sampling.logprobs = True
        first.sampling.top_logprobs = max(first.sampling.top_logprobs, WATCHED_ALTERNATIVES)
        return second

    async def _prepare_governed(
        self,
        request: ValidRequest,
        prompt: _InspectedPrompt,
        scheduling: SchedulingParams,
        model: str,
    ) -> PreparedPrompt:
        problem = self._overload.problem(model, scheduling, time.monotonic())
        if problem is not None:
            raise problem
        return await self._prepare(request, prompt, model)


def _constraints_of(request: ValidRequest) -> Iterator[tuple[str, str, str]]:
    """What the answer is constrained to: the field that says it, the kind, the text."""
    sampling, tools = request.sampling, request.tools
    kind = sampling.WhichOneof("constraint")
    if kind is not None:
        yield f"sampling.{kind}", kind, getattr(sampling, kind)
    if tools is not None and tools.constrained:
        for i, tool in enumerate(tools.tools):
            if tool in tools.callable and (tools.forced or tool.strict):
                schema = json.dumps(arguments_of(tool))
                yield f"tools[{i}].parameters", "json_schema", schema
        # All formats have the same schemas; their sum has a limit of its own.
        yield "tools", "grammar", grammar_of(HERMES, tools)


def _decide(
    inspection: RequestInspection, entities: FoundEntities, checks: Sequence[Decided]
) -> SafetyOutcome:
    inspected = list(inspection.results(entities))
    verdict = verdict_on(inspected, entities.failed)
    return SafetyOutcome(inspection, entities, inspected, verdict, checks)


def _check_governed(plan: Plan, model: str | None) -> None:
    """Raises SafetyBlocked where the policy wants another model than the one that can do what is asked."""
    if model is not None and plan.strategy == SAFETY and plan.model != model:
        raise SafetyBlocked(
            f"{plan.reason}, to {plan.model}, which cannot do the work of {model}",
            metadata={"rules": plan.reason, "policy": ""},
        )


def _passed(conversation: Conversation, safety: SafetyOutcome) -> Conversation:
    """The conversation as a model may see it.

    Raises:
        SafetyBlocked: the policy blocks it.
        InvalidRequest: nothing is left of a turn.
    """
    rules, version = safety.verdict.blocked, safety.policy.version
    if rules:
        raise SafetyBlocked(
            f"the safety policy {version} blocks the prompt: {', '.join(rules)}",
            metadata={"rules": ",".join(rules), "policy": version},
        )
    before, texts = conversation.texts, [result.text for result in safety.inspected]
    if any(was.strip() and not text.strip() for was, text in zip(before, texts, strict=True)):
        raise InvalidRequest.of("input", "is empty once what must not stay is removed")
    return conversation if texts == before else conversation.with_texts(texts)
