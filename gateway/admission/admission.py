"""Decides everything about a request before its task is sent.

`gateway.admission.arrivals` is the first half of admission: who calls, and how much arrives. `Admission.admit` is the
second, for valid requests to models, in this order:

1. A slot of its class for preparing it (`ClassLimiter.preparing`).
2. Its tenant's rates, tokens and costs; its reservation begins (`UsageAccounting.reserve`).
3. Overload: no model that may answer could do so in time (`OverloadControl.refuse_hopeless`). Before any work is done,
   because a refusal must be quick when most requests are refused.
4. Inspection by the safety policy (`PromptInspector`).
5. Routing, and the reservation of what the longest answer costs.
6. Prompts (`Preparation`), and the reservation of their tokens. If the chosen model has no room, again from 5.

Which limit refused a request is in the metadata of the error; docs/operate/limits.md lists them.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final

from gateway.admission.class_limiter import ClassLimiter
from gateway.admission.constraint_checks import ConstraintChecks
from gateway.admission.overload import Outlook, OverloadControl
from gateway.admission.policies import InForce
from gateway.admission.preparation import ContextFit, Preparation, contexts_of, is_replaceable
from gateway.admission.prompt_inspection import EntityReader, PromptInspector, passed
from gateway.admission.prompts import check_length, decode_now, encode
from gateway.admission.request_context import RequestContext
from gateway.admission.text_work import LOOP_COST, LoopTurns, TextThreads
from gateway.admission.usage import UsageAccounting
from gateway.identity.caller import Caller
from gateway.models.catalog import ServedModel
from gateway.models.tools import HERMES, arguments_of, grammar_of
from gateway.routing.features import Features
from gateway.routing.plan import Plan
from gateway.routing.router import RoutingState
from gateway.safety.inspector import RequestInspection
from gateway.validation.conversation import Conversation
from gateway.validation.requests import ValidRequest
from sluice.errors import BudgetSpent, InvalidRequest, SafetyBlocked, UnknownModel
from sluice.telemetry import names
from sluice.v1.inference_pb2 import ROUTE_STRATEGY_BUDGET, ROUTE_STRATEGY_SAFETY

BUDGET_RETRY_S: Final = 60.0
"""When to come back after a budget is spent, in seconds: its window moves by the minute."""
INSPECTING_MAX: Final = 8
"""Tenants whose long texts are inspected at the same time; others wait for one of them."""


class Admission:
    """The decisions of the gateway about requests.

    Attributes:
        in_force: The policies that requests take.
        preparation: Makes prompts.
    """

    def __init__(
        self,
        in_force: InForce,
        limiter: ClassLimiter,
        overload: OverloadControl,
        usage: UsageAccounting,
        preparation: Preparation,
        read_entities: EntityReader,
        turns: LoopTurns,
    ) -> None:
        """Decide with these parts.

        Args:
            in_force: The policies that requests take.
            limiter: Calls that run and are prepared.
            overload: Whether models can answer in time.
            usage: What tenants use.
            preparation: Makes prompts.
            read_entities: Asks token classifiers.
            turns: Turns of tenants for work on texts in the event loop.
        """
        self.in_force = in_force
        self.preparation = preparation
        self._limiter = limiter
        self._overload = overload
        self._usage = usage
        # One thread a tenant: inspection holds the interpreter, which the threads share with the event loop.
        self._inspecting = TextThreads("inspection", turns, INSPECTING_MAX, own=1)
        self._inspector = PromptInspector(read_entities, self._inspecting, preparation.threads)
        self._constraints = ConstraintChecks()

    def close(self) -> None:
        """Inspect and prepare nothing more."""
        self._inspecting.close()
        self.preparation.threads.close()
        self._constraints.close()

    # Limits of calls that are no request to a model.

    def counted_check(self, payer: Caller) -> AbstractContextManager[object]:
        """Count a call that no model answers, such as one to count tokens; see `TenantLimits.counted`."""
        return self._usage.limits.counted(self.in_force.policies.settings, payer)

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
        """Count a request of `payer` that is refused for its content; raise LimitReached if none is left."""
        self._usage.limits.enter(self.in_force.policies.settings, payer, computes=False)

    def limit_headers(self, payer: Caller) -> Mapping[str, str]:
        """Return the rates of a tenant as HTTP headers."""
        return self._usage.limits.headers(self.in_force.policies.settings, payer)

    # Requests to models.

    async def admit(self, context: RequestContext) -> None:
        """Decide everything about a request.

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
        async with self._limiter.preparing(request.priority_class, request.tenant):
            context.use(self.in_force.policies)
            settings = context.policies.settings
            reservation = self._usage.reserve(settings, request.caller)
            context.reservation = reservation
            with reservation:
                await self._decide(context)

    async def count(self, context: RequestContext) -> tuple[int, ServedModel]:
        """Return the tokens of a prompt, and the model whose tokenizer counted them: the named or the router's."""
        async with self._limiter.preparing(context.priority_class, context.tenant):
            context.use(self.in_force.policies)
            inspection = await self._inspector.find(context)
            context.conversation = passed(context.conversation, inspection)
            policies, features = context.policies, await self._features(context)
            model = policies.catalog[policies.router.plan(features).model]
            threads = self.preparation.threads
            tokens = await encode(context.conversation, model, threads, context.tenant)
        return len(tokens), model

    async def check(self, context: RequestContext) -> RequestInspection:
        """Return what the policy finds in the texts of a request that is not admitted."""
        async with self._limiter.preparing(context.priority_class, context.tenant):
            context.use(self.in_force.policies)
            return await self._inspector.find(context)

    async def _decide(self, context: RequestContext) -> None:
        """Decide about a request that its limits let in; raise as `admit`."""
        request, catalog, log = context.request, context.policies.catalog, context.log
        models = catalog.reading if request.model is None else (request.model,)
        self._overload.refuse_hopeless(models, context.scheduling, time.monotonic())
        if request.conversation.vocabulary:
            context.conversation = request.conversation = await self._decode(context)
        if context.to_prompts is None:
            check_length(request.conversation.texts, [catalog[model] for model in models])
        is_constrained = request.tools is not None or request.sampling.WhichOneof("constraint")
        # Servers that get messages compile the constraints themselves, and know other keywords.
        if is_constrained and not all(catalog[name].settings.takes_messages for name in models):
            await self._check_constraints(request)
        await self._inspector.inspect(context, log.step(names.SPAN_SAFETY))
        is_prompt = context.to_prompts is None and request.audio is None
        contexts = contexts_of(context) if is_prompt else None
        is_prepared = False
        while not is_prepared:  # until a model has room for the prompt
            await self._route(context, contexts)
            span = log.step(names.SPAN_TOKENIZE)
            is_prepared = await self.preparation.prepare_all(context, contexts)
        if log.recorded:
            tokens = sum(len(prompt.prompt_token_ids) for prompt in context.prompts)
            span.set_attribute(names.INPUT_TOKENS, tokens)
        log.step("")
        self._usage.hold(
            context.reservation,
            context.policies.settings,
            request.caller,
            [*context.prompts, *([context.second] if context.second else [])],
        )

    async def _decode(self, context: RequestContext) -> Conversation:
        """Return the conversation with the texts of the tokens that the caller sent; raise as `decode_now`."""
        conversation, catalog = context.conversation, context.policies.catalog
        work = partial(decode_now, conversation, catalog[conversation.vocabulary])
        if conversation.sent_tokens > LOOP_COST:
            return await self.preparation.threads.run(context.tenant, work)
        return work()

    async def _check_constraints(self, request: ValidRequest) -> None:
        """Raise InvalidRequest for a constraint that no worker could enforce."""
        for field, kind, text in _constraints_of(request):
            problem = await self._constraints.problem(kind, text, request.tenant)
            if problem is not None:
                raise InvalidRequest.of(field, problem)

    async def _route(self, context: RequestContext, contexts: ContextFit | None) -> None:
        """Set the plan of a request, and what the longest answer may cost in its reservation."""
        request, policies, log = context.request, context.policies, context.log
        log.step(names.SPAN_ROUTE)
        context.reservation.cost = (
            0.0  # its own estimate must not spend the budget that is asked for
        )
        plan = context.plan = await self._plan(context, contexts)
        log.routed(plan)
        cost = plan.route.candidates[0].cost
        if context.to_prompts is None and not request.sampling.max_tokens:
            model = policies.catalog[plan.model]
            cost += model.settings.cost(0, model.max_answer_tokens)
        context.reservation.cost = cost
        if contexts is None:
            _check_governed(plan, request.model)

    async def _plan(self, context: RequestContext, contexts: ContextFit | None) -> Plan:
        """Return where a request is routed; raise as `admit`."""
        request, policies = context.request, context.policies
        features = await self._features(context)
        now, outlooks = time.monotonic(), dict[str, Outlook]()

        def outlook(model: str) -> Outlook:
            if model not in outlooks:
                outlooks[model] = self._overload.outlook(model, context.scheduling, now)
            return outlooks[model]

        fits = _any_fits if contexts is None else contexts.fits
        state = RoutingState(
            wait_s=lambda model: outlook(model).wait_s,
            spent=lambda tenant: self._usage.spending.spent(tenant, now),
            soft_limit=partial(self._usage.limits.soft_limit, policies.settings),
            fits=fits,
        )
        plan = policies.router.plan(features, state)
        is_named = request.model not in (None, plan.model)
        if plan.route.strategy == ROUTE_STRATEGY_BUDGET and is_named:
            _check_budget(request, plan, fits)
        if contexts is not None and is_replaceable(plan) and not fits(plan.model):
            contexts.relax()
            plan = policies.router.plan(features, state)
        self._overload.check(plan, context.scheduling, outlook, fits)
        if request.resume:
            plan.cascade = None
        return plan

    async def _features(self, context: RequestContext) -> Features:
        """Return what the router looks at."""
        request, policies = context.request, context.policies
        conversation, verdict = context.conversation, context.inspection.verdict
        # A resumed answer continues on the model that its tokens came from.
        resumed = request.resume_model if request.resume else ""
        model = resumed or request.model
        tokens: Sequence[int] = ()
        is_routed = model is None and verdict.governed is None
        if is_routed and policies.router.needs_prompt_tokens and conversation.turns:
            default = policies.catalog[policies.catalog.default]
            tokens = await encode(conversation, default, self.preparation.threads, request.tenant)
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
            key=request.route_key or context.request_id,
        )


def _any_fits(_: str) -> bool:
    return True


def _check_budget(request: ValidRequest, plan: Plan, fits: Callable[[str], bool]) -> None:
    """Raise BudgetSpent if the model of the budget may not, or cannot, replace the one that the caller names."""
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


def _check_governed(plan: Plan, model: str | None) -> None:
    """Raise SafetyBlocked if the policy wants another model than the one that can do the work."""
    route = plan.route
    if model is not None and route.strategy == ROUTE_STRATEGY_SAFETY and plan.model != model:
        raise SafetyBlocked(
            f"{route.reason}, to {plan.model}, which cannot do the work of {model}",
            metadata={"rules": route.reason, "policy": ""},
        )


def _constraints_of(request: ValidRequest) -> Iterator[tuple[str, str, str]]:
    """Yield what the answer is constrained to: the field that says it, the kind, and the text."""
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
