"""From a valid request to a task in three hops: inspect, route, tokenize."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final

from opentelemetry.trace import Span

from gateway.admission.constraint_checks import ConstraintChecks
from gateway.admission.contexts import ContextFit
from gateway.admission.overload import OverloadControl, SchedulingParams
from gateway.admission.policies import InForce, Policies
from gateway.admission.prompts import (
    PreparedPrompt,
    check_length,
    decode_now,
    encode,
    prepare,
    prompt_too_long,
)
from gateway.admission.text_work import LOOP_COST, LoopTurns, TextThreads
from gateway.admission.usage import UsageAccounting
from gateway.identity.caller import Caller
from gateway.identity.resume_token import ResumeKey, ResumeToken
from gateway.models.catalog import ServedModel
from gateway.models.tools import HERMES, arguments_of, grammar_of
from gateway.routing.budget import Reservation
from gateway.routing.features import Features
from gateway.routing.plan import Plan
from gateway.routing.router import CHARS_PER_TOKEN
from gateway.safety.actions import Action
from gateway.safety.dry_run import move_labels
from gateway.safety.findings import Finding
from gateway.safety.guards.checks import Check, Decided, EntityGuard
from gateway.safety.guards.families import Failure
from gateway.safety.inspector import (
    NO_ENTITIES,
    TOO_LONG,
    FoundEntities,
    RequestInspection,
)
from gateway.telemetry.request_log import RequestLog
from gateway.validation.conversation import Conversation
from gateway.validation.requests import ValidRequest
from sluice.errors import (
    BudgetSpent,
    InvalidRequest,
    PromptTooLong,
    SafetyBlocked,
    UnknownModel,
)
from sluice.telemetry import names
from sluice.v1.inference_pb2 import (
    ROUTE_STRATEGY_BUDGET,
    ROUTE_STRATEGY_PINNED,
    ROUTE_STRATEGY_SAFETY,
    Route,
    Started,
)

BUDGET_RETRY_S: Final = 60.0
"""The window of a budget moves by the minute, seconds."""
INSPECTING_MAX: Final = 8
"""Tenants whose long texts are inspected at the same time; the others wait for one of them to be done."""


class AdmittedRequest(SchedulingParams):
    """A valid request, and all that is decided about it. `Admission` alone fills it in, step by step.

    It is what the answer is for (`gateway.streaming.answer.AnsweredRequest`).

    Attributes:
        policies: by which everything is decided, taken once.
        request: as it was sent.
        log: what happens to it; ``timings`` is its.
        request_id: its name.
        key: its idempotency key; empty without one.
        fingerprint: equal for equal requests.
        with_logprobs: whether the caller wants log-probabilities.
        conversation: as a model may see it.
        inspection: of its texts, by the policy in force.
        rows: the prompts: one, or of a request about texts one for each text, pair or answer, in order.
        second: for the second model of a cascade.
        reservation: what it may cost; released when the request ends.
    """

    policies: Policies
    inspection: RequestInspection
    plan: Plan
    rows: Sequence[PreparedPrompt]
    reservation: Reservation

    def __init__(
        self, request: ValidRequest, log: RequestLog, resume_key: ResumeKey | None = None
    ) -> None:
        """``resume_key``: of the tokens that callers resume with; None: there is no answer."""
        super().__init__(
            request.priority_class,
            log.arrived_at + request.timeout_s,
            request.allow_degraded,
            request.tenant,
            log.arrived_at,
            workload=request.workload,
            prompt_tokens=sum(map(len, request.conversation.texts)) // CHARS_PER_TOKEN
            + request.conversation.sent_tokens,
            min_tokens=request.sampling.min_tokens,
            max_tokens=request.sampling.max_tokens,
        )
        self.request = request
        self.log = log
        self.timings = log.timings
        self.request_id = log.request_id
        self.key = request.key
        self.fingerprint = request.fingerprint
        self.with_logprobs = request.sampling.HasField("logprobs")
        self.conversation = request.conversation
        self.second: PreparedPrompt | None = None
        self._resume_key = resume_key

    @property
    def first(self) -> PreparedPrompt:
        """The prompt of the model that is asked first."""
        return self.rows[0]

    def started(self) -> Started:
        """The first event of its answer."""
        plan, route, first = self.plan, self.plan.route, self.first
        return Started(
            request_id=self.log.request_id,
            trace_id=self.log.trace_id,
            model=plan.model,
            route=Route(
                tier=plan.tier,
                strategy=route.strategy,
                reason=route.reason,
                degraded=route.degraded,
            ),
            seed=first.sampling.seed,
            prompt_tokens=len(first.prompt_token_ids),
        )

    def resume_token(self, model: str) -> ResumeToken:
        """The resume token of an answer of ``model``: tokens of one version of it are not continued by another."""
        assert self._resume_key is not None, "it has an answer"
        both, sampling = (self.first, self.second), self.first.sampling
        names_of = {one.model.name: one.model.settings.task_name for one in both if one}
        seed = sampling.seed if sampling.temperature > 0 else 0
        return self._resume_key.token(self.fingerprint, names_of.get(model, model), seed)


RowsOf = Callable[[Conversation, ServedModel], Sequence[PreparedPrompt]]
"""The rows of a request about texts, by the texts as a model may see them."""


EntityReader = Callable[
    [AdmittedRequest, Check, Sequence[str]],
    Awaitable[tuple[Sequence[Sequence[Finding]] | Failure, Decided]],
]
"""What the token classifier of a check finds in each text, and what is recorded of it; without an answer in time a
`Failure`."""


class Admission:
    """The decisions of the gateway about a request, in order.

    Attributes:
        in_force: the policies that requests take.
        entities: asks token classifiers; set once there is a way to send rows.
        threads: in which long texts become tokens.
    """

    entities: EntityReader

    def __init__(
        self, in_force: InForce, overload: OverloadControl, usage: UsageAccounting
    ) -> None:
        self.in_force = in_force
        self._overload = overload
        self._usage = usage
        turns = LoopTurns(LOOP_COST)
        # One thread a tenant: inspection holds the interpreter, which the threads share with the event loop.
        self._inspections = TextThreads("inspection", turns, INSPECTING_MAX, own=1)
        self.threads = TextThreads("encoding", turns)
        self._constraints = ConstraintChecks()

    def counted_check(self, payer: Caller) -> AbstractContextManager[object]:
        """Count a request that a model does not see, such as one to count tokens, as `TenantLimits.counted` does."""
        return self._usage.limits.counted(self.in_force.policies.settings, payer, computes=False)

    @contextmanager
    def refusals_counted(self, payer: Caller) -> Iterator[None]:
        """Count a request whose validation, in the block, refuses it for its content.

        Raises:
            LimitReached: No request is left of its limits.
        """
        try:
            yield
        except (InvalidRequest, UnknownModel):
            self.count_refused(payer)
            raise

    def count_refused(self, payer: Caller) -> None:
        """Count a request of ``payer`` that is refused for its content; raise LimitReached where none is left."""
        self._usage.limits.enter(self.in_force.policies.settings, payer, computes=False)

    def limit_headers(self, payer: Caller) -> Mapping[str, str]:
        """The rates of a tenant as headers of HTTP."""
        return self._usage.limits.headers(self.in_force.policies.settings, payer)

    def close(self) -> None:
        """Nothing is inspected any more."""
        self._inspections.close()
        self.threads.close()
        self._constraints.close()

    async def admit(self, incoming: AdmittedRequest, rows_of: RowsOf | None = None) -> None:
        """Decides everything about a request. ``rows_of``: it is about texts, each of which is a row.

        Raises:
            SafetyBlocked: the policy does not let the prompt through.
            InvalidRequest, PromptTooLong: the model cannot take the prompt.
            ModelUnavailable: no worker serves the model now.
            ExpectedLate: the answer would come after the deadline.
            Overloaded: the queue is full.
            LimitReached: of its tenant, its key, or the tenant's use of the model.
            BudgetSpent: the tenant has spent its budget, and names a model that costs more than that of the budget.
        """
        request, policies = incoming.request, self.in_force.policies
        incoming.policies, incoming.rules = policies, policies.overload
        # Before any work is done for it: a refusal must be quick when most requests are refused.
        with self._usage.limits.counted(policies.settings, request.caller) as take_back:
            await self._decide(incoming, rows_of)
        incoming.reservation.take_back = take_back

    async def _decide(self, incoming: AdmittedRequest, rows_of: RowsOf | None) -> None:
        """Decide about a request that its limits let in; raise as `admit`."""
        request, catalog = incoming.request, incoming.policies.catalog
        models = catalog.reading if request.model is None else (request.model,)
        self._overload.refuse_hopeless(models, incoming, time.monotonic())
        if request.conversation.vocabulary:
            incoming.conversation = request.conversation = await self._decode(incoming)
        if rows_of is None:
            check_length(request.conversation.texts, [catalog[model] for model in models])
        # Servers that get messages compile the constraints themselves, and know other keywords.
        if (request.tools is not None or request.sampling.WhichOneof("constraint")) and not all(
            catalog[model].settings.takes_messages for model in models
        ):
            await self._check_constraints(request)
        log = incoming.log
        await self._inspect(incoming, rows_of, log.hop(names.SPAN_SAFETY))
        contexts = _contexts_of(incoming) if rows_of is None and request.audio is None else None
        while not await self._try_route(incoming, rows_of, contexts):
            pass  # the model had no room: now that is known

    async def _decode(self, incoming: AdmittedRequest) -> Conversation:
        """Return the conversation with the texts of the tokens that the caller sent; raise as `decode_now`."""
        conversation, catalog = incoming.conversation, incoming.policies.catalog
        work = partial(decode_now, conversation, catalog[conversation.vocabulary])
        if conversation.sent_tokens > LOOP_COST:
            return await self.threads.run(incoming.tenant, work)
        return work()

    async def _try_route(
        self, incoming: AdmittedRequest, rows_of: RowsOf | None, contexts: ContextFit | None
    ) -> bool:
        """Route and tokenize the request; return False when the model that it was routed to has no room for it."""
        request, policies, log = incoming.request, incoming.policies, incoming.log
        log.hop(names.SPAN_ROUTE)
        incoming.plan = await self._route(incoming, contexts)
        log.routed(incoming.plan)
        cost = incoming.plan.route.candidates[0].cost
        if rows_of is None and not request.sampling.max_tokens:
            model = policies.catalog[incoming.plan.model]
            cost += model.settings.cost(0, model.max_answer_tokens)  # the longest that it may be
        # Until it ends it is part of what its tenant has spent.
        incoming.reservation = self._usage.spending.reserve(request.tenant, cost)
        with incoming.reservation:
            if rows_of is not None or request.audio is not None:
                _check_governed(incoming.plan, request.model)
            span = log.hop(names.SPAN_TOKENIZE)
            if not await self._tokenize(incoming, rows_of, contexts):
                incoming.reservation.release()
                return False
            if log.recorded:
                span.set_attribute(
                    names.INPUT_TOKENS,
                    sum(len(row.prompt_token_ids) for row in incoming.rows),
                )
            log.hop("")
            self._usage.hold_longest(
                policies.settings,
                incoming.reservation,
                request.caller,
                *incoming.rows,
                incoming.second,
            )
        return True

    async def count(self, incoming: AdmittedRequest) -> tuple[int, ServedModel]:
        """Tokens of the prompt, and the model, the named one or the router's, whose tokenizer counted them."""
        incoming.conversation = _passed(incoming.conversation, await self.check(incoming))
        features = await self._features(incoming)
        policies = incoming.policies
        model = policies.catalog[policies.router.plan(features).model]
        tokens = await encode(incoming.conversation, model, self.threads, incoming.request.tenant)
        return len(tokens), model

    async def check(self, incoming: AdmittedRequest) -> RequestInspection:
        """Inspects the texts of a request that is not admitted."""
        incoming.policies = self.in_force.policies
        incoming.rules = incoming.policies.overload
        return await self._check(incoming)

    async def _check(self, incoming: AdmittedRequest) -> RequestInspection:
        request, texts = incoming.request, incoming.request.conversation.texts
        inspector, tenant = incoming.policies.inspector, request.tenant

        def begin() -> RequestInspection:
            inspection = inspector.begin(tenant, request.labels, texts)
            if not inspection.entity_guards:
                inspection.decide(NO_ENTITIES)
            return inspection

        inspection = await self._inspections.work_on(texts, tenant, begin)
        incoming.inspection = inspection
        if guards := inspection.entity_guards:
            entities, inspection.checks = await self._find_entities(incoming, guards)
            decide = partial(inspection.decide, entities)
            await self._inspections.work_on(texts, tenant, decide)
        return inspection

    async def _find_entities(
        self, incoming: AdmittedRequest, guards: Sequence[EntityGuard]
    ) -> tuple[FoundEntities, tuple[Decided, ...]]:
        """What the classifiers ``guards`` find in the prompt, and what is recorded of each."""
        texts = incoming.inspection.normalized
        readings = await asyncio.gather(
            *(
                self.entities(incoming, Check(number, guard), texts)
                for number, guard in enumerate(guards, 1)
            )
        )
        by_text: list[list[Finding]] = [[] for _ in texts]
        failed: list[tuple[str, Action]] = []
        for outcome, decided in readings:
            if isinstance(outcome, Failure):
                failed += decided.taken
                continue
            for found, mine in zip(by_text, outcome, strict=True):
                found += mine
        return FoundEntities(by_text, failed), tuple(decided for _, decided in readings)

    async def _check_constraints(self, request: ValidRequest) -> None:
        """Raise InvalidRequest for a constraint that no worker could enforce."""
        for field, kind, text in _constraints_of(request):
            problem = await self._constraints.problem(kind, text, request.tenant)
            if problem is not None:
                raise InvalidRequest.of(field, problem)

    async def _inspect(self, incoming: AdmittedRequest, rows_of: RowsOf | None, span: Span) -> None:
        inspection = await self._check(incoming)
        incoming.log.inspected(inspection)
        inspector = incoming.policies.inspector
        if inspector.dry_run is not None:
            rehearse = partial(inspector.rehearse, inspection)
            tried = await self._inspections.work_on(inspection.texts, incoming.tenant, rehearse)
            if moves := inspector.count(inspection.inspected, tried):
                span.set_attribute(names.DRY_RUN, move_labels(moves))
        if inspection.verdict.blocked == (TOO_LONG,):
            await self._refuse_too_long(incoming, rows_of)
        incoming.conversation = _passed(incoming.conversation, inspection)

    async def _refuse_too_long(self, incoming: AdmittedRequest, rows_of: RowsOf | None) -> None:
        """Raise PromptTooLong where no model has room for the texts, of which one is too long to be inspected.

        That helps the caller more than the limit of the policy.
        """
        request, catalog = incoming.request, incoming.policies.catalog
        conversation, named = request.conversation, request.model
        model = catalog[named or max(catalog.reading, key=lambda one: catalog[one].context_tokens)]
        if rows_of is not None:
            work = partial(rows_of, conversation, model)
            await self.threads.work_on(conversation.texts, request.tenant, work)
        elif request.audio is None:
            tokens = len(await encode(conversation, model, self.threads, request.tenant))
            if tokens >= model.context_tokens:
                raise prompt_too_long(model, f"{tokens}", tokens)

    async def _route(self, incoming: AdmittedRequest, contexts: ContextFit | None) -> Plan:
        request, policies = incoming.request, incoming.policies
        features = await self._features(incoming)
        now = time.monotonic()
        fits = _any_fits if contexts is None else contexts.fits
        make = partial(
            policies.router.plan,
            features,
            wait_s=lambda model: self._overload.wait_s(model, incoming, now),
            spent=lambda tenant: self._usage.spending.spent(tenant, now),
            soft_limit=partial(self._usage.limits.soft_limit, policies.settings),
            fits=fits,
        )
        plan = make()
        is_named = request.model not in (None, plan.model)
        if plan.route.strategy == ROUTE_STRATEGY_BUDGET and is_named:
            _check_budget(request, plan, fits)
        if contexts is not None and _is_replaceable(plan) and not fits(plan.model):
            contexts.relax()
            plan = make()
        self._overload.check(plan, incoming, now, fits)
        if request.resume:
            plan.cascade = None
        return plan

    async def _features(self, incoming: AdmittedRequest) -> Features:
        """What the router looks at."""
        request, policies = incoming.request, incoming.policies
        conversation, verdict = incoming.conversation, incoming.inspection.verdict
        # A resumed answer continues on the model that its tokens came from.
        resumed = request.resume_model if request.resume else ""
        model = resumed or request.model
        tokens: Sequence[int] = ()
        routed = model is None and verdict.governed is None
        if routed and policies.router.needs_prompt_tokens and conversation.turns:
            default = policies.catalog[policies.catalog.default]
            tokens = await encode(conversation, default, self.threads, request.tenant)
        return Features(
            model=model,
            text=conversation.user_text,
            last_turn=conversation.last_user_text,
            prompt_tokens=len(tokens),
            answer_tokens=request.sampling.max_tokens,
            labels=request.labels,
            tenant=request.tenant,
            findings=frozenset([rule for rule, _ in verdict.taken]),
            governed=verdict.governed,
            resumed=bool(resumed),
            key=request.route_key or incoming.request_id,
        )

    async def _tokenize(
        self, incoming: AdmittedRequest, rows_of: RowsOf | None, contexts: ContextFit | None
    ) -> bool:
        """The prompts, also that of a cascade's second model, so that an escalation does not wait for it.

        Returns False where the model that the gateway has chosen has no room for the request.
        """
        plan = incoming.plan
        if rows_of is not None:
            model = incoming.policies.catalog[incoming.plan.model]
            work = partial(rows_of, incoming.conversation, model)
            texts = incoming.conversation.texts
            incoming.rows = await self.threads.work_on(texts, incoming.request.tenant, work)
            return True
        if contexts is None or not _is_replaceable(plan):
            first: PreparedPrompt | None = await self._prepare(incoming, plan.model)
        else:
            first = await self._prepare_fitting(incoming, plan.model, contexts)
        if first is None:
            return False
        incoming.rows = (first,)
        if plan.cascade is not None and contexts is not None:
            incoming.second = await self._prepare_fitting(incoming, plan.cascade.second, contexts)
            if incoming.second is None:
                return False
            incoming.second.sampling.seed = first.sampling.seed
            # The first answer is judged by its log-probabilities, whether the caller wants them or not.
            first.sampling.logprobs = True
        return True

    async def _prepare_fitting(
        self, incoming: AdmittedRequest, model: str, contexts: ContextFit
    ) -> PreparedPrompt | None:
        """As `_prepare`; None where ``model`` has no room for prompt and answer, which ``contexts`` knows then."""
        try:
            prepared = await self._prepare(incoming, model)
        except PromptTooLong as error:
            contexts.note(model, int(error.metadata["prompt_tokens"]))
            return None
        contexts.note(model, len(prepared.prompt_token_ids))
        return prepared if contexts.fits(model) else None

    async def _prepare(self, incoming: AdmittedRequest, model: str) -> PreparedPrompt:
        """The prompt for ``model``: for tokens that the caller holds for the version that they came from."""
        request, conversation = incoming.request, incoming.conversation
        catalog, inspector = incoming.policies.catalog, incoming.policies.inspector
        version = catalog.version(model, request.resume_version)
        if (
            version is not catalog[model]
            and not self._overload.loads.load(version.settings.task_name, time.monotonic()).ready
        ):
            raise InvalidRequest.of(
                "resume.resume_token",
                "is of a version of the model that was replaced: ask again without resume",
            )
        inspect = partial(inspector.answer, incoming.inspection, conversation.system_text)
        return await prepare(request, conversation, version, inspect, self.threads)

    async def prepare_fallback(
        self, incoming: AdmittedRequest, model: str
    ) -> PreparedPrompt | None:
        """Return the prompt of an admitted request for the fallback ``model``; None where it cannot take it."""
        try:
            return await self._prepare_fitting(incoming, model, _contexts_of(incoming))
        except InvalidRequest:  # such as tools that its chat template does not know
            return None

    async def prepare_for(self, incoming: AdmittedRequest, model: str) -> PreparedPrompt:
        """The prompt of an admitted request for the model that a guard's policy names; raises as `admit`."""
        problem = self._overload.problem(model, incoming, time.monotonic())
        if problem is not None:
            raise problem
        return await self._prepare(incoming, model)


def _check_budget(request: ValidRequest, plan: Plan, fits: Callable[[str], bool]) -> None:
    """Raise BudgetSpent where the model of the budget may not, or cannot, replace the one that the caller names."""
    if not fits(plan.model):
        remedy = "which has no room for the request; shorten it, or try again later"
    elif not request.allow_degraded:
        remedy = "which still answers; name that one, or set allow_degraded"
    else:
        return
    raise BudgetSpent(
        f"{plan.route.reason}: {request.model} costs more than {plan.model}, {remedy}",
        retry_after_s=BUDGET_RETRY_S,
    )


def _any_fits(_: str) -> bool:
    return True


def _contexts_of(incoming: AdmittedRequest) -> ContextFit:
    """Return what is known of the room for a prompt; guard models answer only where somebody names them."""
    compiled, routing = incoming.inspection.compiled, incoming.policies.settings.routing
    guards = {one.settings.model for one in compiled.guards}
    guards -= {name for _, name in routing.all_models()} if guards else set()
    return ContextFit(
        incoming.policies.catalog,
        incoming.conversation.texts,
        incoming.request.sampling.max_tokens,
        guards,
    )


def _is_replaceable(plan: Plan) -> bool:
    """Return whether the gateway chose the model: not the caller, the tokens it resumes with, or the safety policy."""
    named = plan.route.strategy in (ROUTE_STRATEGY_PINNED, ROUTE_STRATEGY_SAFETY)
    return plan.route.degraded or not named


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


def _check_governed(plan: Plan, model: str | None) -> None:
    """Raises SafetyBlocked where the policy wants another model than the one that can do what is asked."""
    route = plan.route
    if model is not None and route.strategy == ROUTE_STRATEGY_SAFETY and plan.model != model:
        raise SafetyBlocked(
            f"{route.reason}, to {plan.model}, which cannot do the work of {model}",
            metadata={"rules": route.reason, "policy": ""},
        )


def blocked(rules: Sequence[str], version: str) -> SafetyBlocked:
    """What a caller hears whose prompt a policy blocks."""
    return SafetyBlocked(
        f"the safety policy {version} blocks the prompt: {', '.join(rules)}",
        metadata={"rules": ",".join(rules), "policy": version},
    )


def _passed(conversation: Conversation, inspection: RequestInspection) -> Conversation:
    """The conversation as a model may see it.

    Raises:
        SafetyBlocked: the policy blocks it.
        InvalidRequest: nothing is left of a turn.
    """
    rules, version = inspection.verdict.blocked, inspection.policy.version
    if rules:
        raise blocked(rules, version)
    before, texts = conversation.texts, [result.text for result in inspection.inspected]
    if texts == before:
        return conversation
    if any(was.strip() and not text.strip() for was, text in zip(before, texts, strict=True)):
        raise InvalidRequest.of("input", "is empty once what must not stay is removed")
    return conversation.with_texts(texts)
