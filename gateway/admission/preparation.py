"""Makes the prompts of a request: tokens and sampling parameters for the model that it is routed to."""

import time
from collections.abc import Sequence
from functools import partial

from gateway.admission.contexts import ContextFit
from gateway.admission.overload import OverloadControl
from gateway.admission.prompts import PreparedPrompt, prepare
from gateway.admission.request_context import RequestContext
from gateway.admission.text_work import TextThreads
from gateway.routing.plan import Plan
from sluice.errors import InvalidRequest, PromptTooLong
from sluice.v1.inference_pb2 import ROUTE_STRATEGY_PINNED, ROUTE_STRATEGY_SAFETY


class Preparation:
    """Prepares prompts.

    Attributes:
        threads: Threads in which long texts become tokens.
    """

    def __init__(self, overload: OverloadControl, threads: TextThreads) -> None:
        """Ask `overload` whether the version of a model is served."""
        self._overload = overload
        self.threads = threads

    async def prepare_all(self, context: RequestContext, contexts: ContextFit | None) -> bool:
        """Set the prompts of a routed request, and that of a cascade's second model, so that no escalation waits.

        Args:
            context: The request.
            contexts: What is known of the room in the contexts of models; None for texts and audio.

        Returns:
            False if the model that the gateway has chosen has no room for the request.
        """
        plan = context.plan
        if context.to_prompts is not None:
            context.prompts = await self._of_texts(context)
            return True
        if contexts is None or not is_replaceable(plan):
            first: PreparedPrompt | None = await self._prepare(context, plan.model)
        else:
            first = await self._prepare_fitting(context, plan.model, contexts)
        if first is None:
            return False
        context.prompts = (first,)
        if plan.cascade is not None and contexts is not None:
            context.second = await self._prepare_fitting(context, plan.cascade.second, contexts)
            if context.second is None:
                return False
            context.second.sampling.seed = first.sampling.seed
            # The first answer is judged by its log-probabilities, whether the caller wants them or not.
            first.sampling.logprobs = True
        return True

    async def prepare_fallback(self, context: RequestContext, model: str) -> PreparedPrompt | None:
        """Return the prompt of an admitted request for the fallback `model`; None if that cannot take it."""
        try:
            return await self._prepare_fitting(context, model, contexts_of(context))
        except InvalidRequest:  # such as tools that its chat template does not know
            return None

    async def prepare_governed(self, context: RequestContext, model: str) -> PreparedPrompt:
        """Return the prompt of an admitted request for the model that a guard's policy names.

        Raises:
            ModelUnavailable, ExpectedLate: The model cannot answer in time.
            InvalidRequest, PromptTooLong: The model cannot take the prompt.
        """
        outlook = self._overload.outlook(model, context.scheduling, time.monotonic())
        if outlook.problem is not None:
            raise outlook.problem
        return await self._prepare(context, model)

    async def _of_texts(self, context: RequestContext) -> Sequence[PreparedPrompt]:
        """Return a prompt for each text."""
        assert context.to_prompts is not None, "it is about texts"
        model = context.policies.catalog[context.plan.model]
        work = partial(context.to_prompts, context.conversation, model)
        return await self.threads.work_on(context.conversation.texts, context.tenant, work)

    async def _prepare_fitting(
        self, context: RequestContext, model: str, contexts: ContextFit
    ) -> PreparedPrompt | None:
        """Return the prompt for `model`; None, and note it in `contexts`, if prompt and answer have no room there."""
        try:
            prepared = await self._prepare(context, model)
        except PromptTooLong as error:
            contexts.note(model, int(error.metadata["prompt_tokens"]))
            return None
        contexts.note(model, len(prepared.prompt_token_ids))
        return prepared if contexts.fits(model) else None

    async def _prepare(self, context: RequestContext, model: str) -> PreparedPrompt:
        """Return the prompt for `model`, of the version that the caller's tokens came from if it resumes."""
        request, conversation = context.request, context.conversation
        catalog, inspector = context.policies.catalog, context.policies.inspector
        version = catalog.version(model, request.resume_version)
        if (
            version is not catalog[model]
            and not self._overload.loads.load(version.settings.task_name, time.monotonic()).ready
        ):
            raise InvalidRequest.of(
                "resume.resume_token",
                "is of a version of the model that was replaced: ask again without resume",
            )
        inspect = partial(inspector.answer, context.inspection, conversation.system_text)
        return await prepare(request, conversation, version, inspect, self.threads)


def contexts_of(context: RequestContext) -> ContextFit:
    """Return what is known of the room for a prompt; guard models answer only if a request names them."""
    compiled, routing = context.inspection.compiled, context.policies.settings.routing
    guards = {guard.settings.model for guard in compiled.guards}
    guards -= {name for _, name in routing.all_models()} if guards else set()
    return ContextFit(
        context.policies.catalog,
        context.conversation.texts,
        context.request.sampling.max_tokens,
        guards,
    )


def is_replaceable(plan: Plan) -> bool:
    """Return whether the gateway chose the model: not the caller, the tokens it resumes with, or the safety policy."""
    named = plan.route.strategy in (ROUTE_STRATEGY_PINNED, ROUTE_STRATEGY_SAFETY)
    return plan.route.degraded or not named
