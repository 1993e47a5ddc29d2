"""Makes the prompts of a request: tokens and sampling parameters for the model that it is routed to.

Prompt and answer together must fit into a model's context. How many tokens a prompt has is known only once a model's
tokenizer has encoded it. Until then its characters give a lower bound (`ContextFit`), so a model that may fit is tried,
and the request is routed again if it does not.
"""

import math
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

from gateway.admission.overload import OverloadControl
from gateway.admission.prompts import PreparedPrompt, prepare, prompt_too_long
from gateway.admission.request_context import RequestContext
from gateway.admission.text_work import TextThreads
from gateway.models.catalog import Catalog
from gateway.routing.plan import Plan
from sluice.errors import InvalidRequest, PromptTooLong
from sluice.v1.inference_pb2 import ROUTE_STRATEGY_PINNED, ROUTE_STRATEGY_SAFETY

MIN_ANSWER_TOKENS: Final = 16
"""Room for an answer whose length the caller does not limit, in tokens: fewer are rarely an answer."""


class ContextFit:
    """What is known of the room that each model has for one request."""

    def __init__(
        self,
        catalog: Catalog,
        texts: Sequence[str],
        max_tokens: int,
        excluded: Collection[str] = (),
    ) -> None:
        """Know nothing but the size of the texts.

        Args:
            catalog: The models.
            texts: Texts of the prompt, as models may see them.
            max_tokens: Longest answer; 0 if the caller names no limit.
            excluded: Models that answer only where the request or the policy names them.
        """
        self._catalog = catalog
        self._chars = sum(map(len, texts))
        self._max_tokens = max_tokens
        self._excluded = excluded
        self._tokens: dict[str, int] = {}
        """Length of the prompt, by the models that have encoded it."""
        self._roomiest = ""
        """The model that answers although it has less room than wanted, because no other has more."""

    def fits(self, model: str) -> bool:
        """Return whether `model` may have room for the prompt and the answer that is wanted."""
        if model not in self._catalog.reading or model in self._excluded:
            return False
        wanted = min(self._max_tokens or MIN_ANSWER_TOKENS, self._catalog[model].max_answer_tokens)
        return self._room(model) >= (1 if model == self._roomiest else wanted)

    def note(self, model: str, prompt_tokens: int) -> None:
        """Record that the prompt has `prompt_tokens` tokens of `model`."""
        self._tokens[model] = prompt_tokens

    def relax(self) -> None:
        """Accept a shorter answer, of the model with the most room, when no model has room for the one wanted.

        Raises:
            PromptTooLong: no model has room for a single token of an answer; names the largest context.
        """
        candidates = [name for name in self._catalog.reading if name not in self._excluded]
        self._roomiest = max(candidates, key=self._room)
        if self._room(self._roomiest) < 1:
            raise self._too_long(candidates)

    def _too_long(self, candidates: Sequence[str]) -> PromptTooLong:
        largest = max(candidates, key=lambda name: self._catalog[name].context_tokens)
        tokens, is_exact = self._least_tokens(largest), largest in self._tokens
        if is_exact:
            tokens = self._tokens[largest]
        size = f"{tokens}" if is_exact else f"at least {tokens}"
        return prompt_too_long(self._catalog[largest], size, tokens)

    def _room(self, model: str) -> int:
        """Return the most tokens that an answer of `model` may have."""
        tokens = self._tokens.get(model, self._least_tokens(model))
        return self._catalog[model].context_tokens - tokens

    def _least_tokens(self, model: str) -> int:
        return math.ceil(self._chars / self._catalog[model].tokenizer.token_chars_max)


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
