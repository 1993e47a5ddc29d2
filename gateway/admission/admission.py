"""Decides everything about a request before its task is sent.

`gateway.admission.arrivals` is the first half of admission: who calls, and how much arrives. `Admission.admit` is the
second, for valid requests to models, in this order:

1. A slot of its class for preparing it (`ClassLimiter.preparing`).
2. Its tenant's rates, tokens and costs; its reservation begins (`TenantLimits.enter`).
3. Overload: no model that may answer could do so in time (`OverloadControl.refuse_hopeless`). Before any work is done,
   because a refusal must be quick when most requests are refused.
4. Checks of length and constraints; inspection by the safety policy.
5. Routing, and the reservation of what the longest answer costs.
6. Prompts (`Preparation`), and the reservation of their tokens. If the chosen model has no room, again from 5.

Which limit refused a request is in the metadata of the error; docs/operate/limits.md lists them.
"""

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Final

from gateway.admission import prompts
from gateway.admission.class_limiter import ClassLimiter
from gateway.admission.constraint_checks import ConstraintChecks
from gateway.admission.overload import Outlook, OverloadControl
from gateway.admission.policies import InForce
from gateway.admission.request_context import RequestContext
from gateway.admission.tenant_limits import TenantLimits
from gateway.admission.text_prompts import decode
from gateway.admission.turns import LoopTurns, TextThreads
from gateway.models.catalog import ServedModel
from gateway.routing.features import Features
from gateway.routing.router import Plan, RoutingState, price_of
from gateway.safety.findings import move_labels
from gateway.safety.guards.checks import Check, Decided
from gateway.safety.inspector import TOO_LONG, EntityResults, RequestInspection
from gateway.validation.conversation import USER, Conversation
from gateway.validation.requests import ValidRequest
from sluice.errors import BudgetSpent, InvalidRequest, SafetyBlocked
from sluice.telemetry import names
from sluice.v1.inference_pb2 import ROUTE_STRATEGY_BUDGET, ROUTE_STRATEGY_SAFETY

BUDGET_RETRY_S: Final = 60.0
"""When to come back after a budget is spent, in seconds: its window moves by the minute."""
INSPECTING_MAX: Final = 8
"""Tenants whose long texts are inspected at the same time; others wait for one of them."""

EntityReader = Callable[
    [RequestContext, Sequence[Check], Sequence[str]],
    Awaitable[tuple[EntityResults, Sequence[Decided]]],
]
"""Returns what token classifiers find in texts, and the decision of each check for the record."""


@dataclass(eq=False)
class Admission:
    """The decisions of the gateway about requests.

    Attributes:
        in_force: The policies that requests take.
        limiter: Calls that run and are prepared.
        overload: Whether models can answer in time.
        limits: What tenants may use, and have used.
        preparation: Makes prompts.
        read_entities: Asks token classifiers.
        turns: Turns of tenants for work on texts in the event loop.
    """

    in_force: InForce
    limiter: ClassLimiter
    overload: OverloadControl
    limits: TenantLimits
    preparation: prompts.Preparation
    read_entities: EntityReader
    turns: InitVar[LoopTurns]

    def __post_init__(self, turns: LoopTurns) -> None:
        # One thread a tenant: inspection holds the interpreter, which the threads share with the event loop.
        self._inspecting = TextThreads("inspection", turns, INSPECTING_MAX, own=1)
        self._constraints = ConstraintChecks()

    async def close(self) -> None:
        """Inspect and prepare nothing more."""
        self._inspecting.close()
        self.preparation.threads.close()
        await self._constraints.close()

    async def admit(self, context: RequestContext) -> None:
        """Decide everything about a request; the caller calls `release` at the end of the request.

        Raises:
            SafetyBlocked: The policy does not let the prompt through.
            InvalidRequest, PromptTooLong: The model cannot take the prompt.
            ModelUnavailable: No worker serves the model now.
            ExpectedLate: The answer would come after the deadline.
            Overloaded: A queue is full.
            LimitReached: A limit of its tenant or key is reached.
            BudgetSpent: The tenant has spent its budget, and names a model that costs more than that of the budget.
        """
        request = context.request
        async with self.limiter.preparing(request.priority_class, request.tenant):
            context.policies = self.in_force.policies
            context.rules = context.policies.overload
            context.is_limited = context.policies.has_limits or bool(request.caller.key_id)
            if context.is_limited and (settle := self.limits.enter(request.caller)):
                context.settles.append(settle)
            with self.releasing(context):
                await self._decide(context)

    @contextmanager
    def releasing(self, context: RequestContext) -> Iterator[None]:
        """Release what a request has reserved if the block ends with an error."""
        try:
            yield
        except BaseException as error:
            self.release(context, refusal=error)
            raise

    def release(
        self, context: RequestContext, used: int = 0, refusal: BaseException | None = None
    ) -> None:
        """End what a request has reserved of limits and budgets; a second call has no effect.

        Args:
            context: The request.
            used: Tokens that it has used.
            refusal: The error that ended it before a batcher had it.
        """
        self.limits.spending.release(context.tenant, context)
        while context.settles:
            context.settles.pop(0)(used, refusal)

    async def count(self, context: RequestContext) -> tuple[int, ServedModel]:
        """Return the tokens of a prompt, and the model whose tokenizer counted them: the named or the router's.

        Raises as `passed` and `prompts.encode`.
        """
        async with self.limiter.preparing(context.priority_class, context.tenant):
            context.policies = self.in_force.policies
            context.rules = context.policies.overload
            inspection = await self._find(context)
            context.conversation = passed(context.conversation, inspection)
            policies, features = context.policies, await self._features(context)
            model = policies.catalog[policies.router.plan(features).model]
            threads = self.preparation.threads
            tokens = await prompts.encode(context.conversation, model, threads, context.tenant)
        return len(tokens), model

    async def check(self, context: RequestContext) -> RequestInspection:
        """Return what the policy finds in the texts of a request that is not admitted."""
        async with self.limiter.preparing(context.priority_class, context.tenant):
            context.policies = self.in_force.policies
            context.rules = context.policies.overload
            return await self._find(context)

    async def _decide(self, context: RequestContext) -> None:
        """Decide about a request that its limits let in; raise as `admit`."""
        request, catalog, log = context.request, context.policies.catalog, context.log
        models = catalog.reading if request.model is None else (request.model,)
        self.overload.refuse_hopeless(models, context, time.monotonic())
        if request.conversation.vocabulary:
            vocabulary = catalog[request.conversation.vocabulary]
            context.conversation = request.conversation = await decode(
                request.conversation, vocabulary, self.preparation.threads, request.tenant
            )
        if context.to_prompts is None:
            prompts.check_length(request.conversation.texts, [catalog[model] for model in models])
        is_constrained = request.tools is not None or request.sampling.WhichOneof("constraint")
        # Servers that get messages compile the constraints themselves, and know other keywords.
        if is_constrained and not all(catalog[name].settings.takes_messages for name in models):
            await self._constraints.check(request)
        await self._inspect(context)
        is_prompt = context.to_prompts is None and request.audio is None
        contexts = prompts.ContextFit(context) if is_prompt else None
        is_prepared = False
        while not is_prepared:  # until a model has room for the prompt
            await self._route(context, contexts)
            span = log.step(names.SPAN_TOKENIZE)
            is_prepared = await self.preparation.prepare_all(context, contexts)
            # Its own estimate must not spend the budget that the next route asks for.
            if not is_prepared:
                self.limits.spending.release(context.tenant, context)
        if log.recorded:
            tokens = sum(len(prompt.prompt_token_ids) for prompt in context.prompts)
            span.set_attribute(names.INPUT_TOKENS, tokens)
        log.step("")
        self._reserve_longest(context)

    def _reserve_longest(self, context: RequestContext) -> None:
        """Reserve tokens and cost of the longest answers to the prompts of a request; raise LimitReached."""
        cost, total = 0.0, 0
        for prompt in context.prompts:
            tokens, answer_tokens = len(prompt.prompt_token_ids), prompt.sampling.max_tokens
            cost += price_of(prompt.model.settings, tokens, answer_tokens)
            total += tokens + answer_tokens
        self._reserve_cost(context, cost)
        if context.is_limited:
            model, payer = context.plan.model, context.request.caller
            if settle := self.limits.reserve(payer, model, total):
                context.settles.append(settle)

    def _reserve_cost(self, context: RequestContext, cost: float) -> None:
        """Reserve what a request may cost; nothing for models without prices."""
        if cost > 0:
            self.limits.spending.reserve(context.tenant, context, cost)

    # Inspection.

    async def _inspect(self, context: RequestContext) -> None:
        """Set the inspection of a request, and its conversation as a model may see it.

        Raises:
            SafetyBlocked: The policy does not let the prompt through.
            PromptTooLong: No model has room for the prompt.
            InvalidRequest: Nothing is left of a turn.
        """
        span = context.log.step(names.SPAN_SAFETY)
        inspection = await self._find(context)
        inspector = context.policies.inspector
        if inspector.dry_run is not None:
            rehearse = partial(inspector.rehearse, inspection)
            rehearsal = await self._inspecting.work_on(inspection.texts, context.tenant, rehearse)
            if moves := inspector.count(inspection, rehearsal):
                span.set_attribute(names.DRY_RUN, move_labels(moves))
        if inspection.blocked == (TOO_LONG,):
            await self._refuse_too_long(context)
        context.conversation = passed(context.conversation, inspection)

    async def _find(self, context: RequestContext) -> RequestInspection:
        """Return what the policy finds in the texts of a request, and set what later steps need of it."""
        texts, tenant = context.request.conversation.texts, context.tenant
        begin = partial(_begin, context)
        inspection = await self._inspecting.work_on(texts, tenant, begin)
        if guards := inspection.policy.prompt_readers:
            checks = [Check(number, guard) for number, guard in enumerate(guards, 1)]
            normalized = inspection.normalized
            entities, decided = await self.read_entities(context, checks, normalized)
            inspection.checks = tuple(decided)
            decide = partial(inspection.decide, entities)
            await self._inspecting.work_on(texts, tenant, decide)
        context.log.inspected(inspection)
        context.safety, context.governed = inspection.policy, inspection.governed
        context.placeholders = inspection.placeholders
        return inspection

    async def _refuse_too_long(self, context: RequestContext) -> None:
        """Raise PromptTooLong if the model has no room for the texts, of which one is too long to be inspected.

        The model is the named or the roomiest one. The error helps the caller more than the limit of the policy.
        """
        request, catalog = context.request, context.policies.catalog
        conversation = request.conversation
        roomiest = max(catalog.reading, key=lambda name: catalog[name].context_tokens)
        model = catalog[request.model or roomiest]
        if context.to_prompts is not None:
            work = partial(context.to_prompts, conversation, model)
            await self.preparation.threads.work_on(conversation.texts, request.tenant, work)
        elif request.audio is None:
            tokens = len(
                await prompts.encode(conversation, model, self.preparation.threads, request.tenant)
            )
            if tokens >= model.context_tokens:
                raise prompts.prompt_too_long(model, f"{tokens}", tokens)

    # Routing.

    async def _route(self, context: RequestContext, contexts: prompts.ContextFit | None) -> None:
        """Set the plan of a request, and reserve what the longest answer may cost; raise as `admit`."""
        request, policies, log = context.request, context.policies, context.log
        log.step(names.SPAN_ROUTE)
        plan = context.plan = await self._plan(context, contexts)
        log.routed(plan)
        cost = plan.costs.get(plan.model, 0.0)
        if context.to_prompts is None and not request.sampling.max_tokens:
            model = policies.catalog[plan.model]
            cost += price_of(model.settings, 0, model.max_answer_tokens)
        self._reserve_cost(context, cost)
        if contexts is None:  # the policy may want another model than the one that can do the work
            governed = plan.strategy == ROUTE_STRATEGY_SAFETY and plan.model != request.model
            if governed and request.model is not None:
                raise SafetyBlocked(
                    f"{plan.reason}, to {plan.model}, which cannot do the work of {request.model}",
                    metadata={"rules": plan.reason, "policy": ""},
                )

    async def _plan(self, context: RequestContext, contexts: prompts.ContextFit | None) -> Plan:
        """Return where a request is routed; raise as `admit`."""
        request, policies = context.request, context.policies
        features = await self._features(context)
        now, outlooks = time.monotonic(), dict[str, Outlook]()

        def wait_s(model: str) -> float:
            if model not in outlooks:
                outlooks[model] = self.overload.outlook(model, context, now)
            return outlooks[model].wait_s

        fits = contexts.fits if contexts is not None else lambda _: True
        state = RoutingState(
            wait_s=wait_s,
            spent=lambda tenant: self.limits.spending.spent(tenant, now),
            soft_limit=self.limits.soft_limit if policies.has_limits else None,
            fits=fits,
        )
        plan = policies.router.plan(features, state)
        is_named = request.model not in (None, plan.model)
        if plan.strategy == ROUTE_STRATEGY_BUDGET and is_named:
            _check_budget(request, plan, fits)
        if contexts is not None and prompts.is_replaceable(plan) and not fits(plan.model):
            contexts.relax()
            plan = policies.router.plan(features, state)
        problem = outlooks[plan.model].problem  # the router asks for the wait for each candidate
        if problem is not None and not self.overload.degrade(plan, problem, context, now, fits):
            raise problem
        if request.resume:
            plan.cascade = None
        return plan

    async def _features(self, context: RequestContext) -> Features:
        """Return what the router looks at."""
        request, policies = context.request, context.policies
        conversation = context.conversation
        # A resumed answer continues on the model that its tokens came from.
        resumed = request.resume_model if request.resume else ""
        model = resumed or request.model
        tokens: Sequence[int] = ()
        is_routed = model is None and context.governed is None
        if is_routed and policies.router.needs_prompt_tokens and conversation.turns:
            default = policies.catalog[policies.catalog.default]
            tokens = await prompts.encode(
                conversation, default, self.preparation.threads, request.tenant
            )
        return Features(
            model=model,
            text=conversation.user_text,
            last_turn=next(
                (turn.content for turn in reversed(conversation.turns) if turn.role == USER), None
            ),
            prompt_tokens=len(tokens),
            answer_tokens=request.sampling.max_tokens,
            labels=request.labels,
            tenant=request.tenant,
            findings=frozenset([rule for rule, _ in context.log.findings]),
            governed=context.governed,
            resumed=bool(resumed),
            key=request.route_key or context.request_id,
        )


def _check_budget(request: ValidRequest, plan: Plan, fits: Callable[[str], bool]) -> None:
    """Raise BudgetSpent if the model of the budget may not, or cannot, replace the one that the caller names."""
    if not fits(plan.model):
        remedy = "which has no room for the request; shorten it, or try again later"
    elif not request.allow_degraded:
        remedy = "which still answers; name that one, or set allow_degraded"
    else:
        return
    raise BudgetSpent(
        f"{plan.reason}: {request.model} costs more than {plan.model}, {remedy}",
        retry_after_s=BUDGET_RETRY_S,
    )


def _begin(context: RequestContext) -> RequestInspection:
    """Return the inspection of a request; decided, unless token classifiers must read its texts first."""
    request = context.request
    policy = context.policies.inspector.choose(request.tenant, request.labels)
    inspection = RequestInspection(policy, request.conversation.texts)
    if not policy.prompt_readers:
        inspection.decide()
    return inspection


def blocked(rules: Sequence[str], version: str) -> SafetyBlocked:
    """Return the error of a prompt that `rules` of a policy block."""
    return SafetyBlocked(
        f"the safety policy {version} blocks the prompt: {', '.join(rules)}",
        metadata={"rules": ",".join(rules), "policy": version},
    )


def passed(conversation: Conversation, inspection: RequestInspection) -> Conversation:
    """Return the conversation as a model may see it.

    Raises:
        SafetyBlocked: The policy blocks it.
        InvalidRequest: Nothing is left of a turn.
    """
    rules, version = inspection.blocked, inspection.policy.version
    if rules:
        raise blocked(rules, version)
    before, texts = conversation.texts, inspection.edited
    if texts == before:
        return conversation
    if any(was.strip() and not text.strip() for was, text in zip(before, texts, strict=True)):
        raise InvalidRequest.of("input", "empty after redaction; send text that the policy allows")
    return conversation.with_texts(texts)
