"""Inspects the prompt of a request by the safety policy, and refuses what that does not let through."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from opentelemetry.trace import Span

from gateway.admission.prompts import encode, prompt_too_long
from gateway.admission.request_context import RequestContext
from gateway.admission.text_work import TextThreads
from gateway.safety.actions import Action
from gateway.safety.dry_run import move_labels
from gateway.safety.findings import Finding
from gateway.safety.guards.checks import Check, Decided, EntityGuard
from gateway.safety.guards.families import GuardFailure
from gateway.safety.inspector import NO_ENTITIES, TOO_LONG, EntityResults, RequestInspection
from gateway.validation.conversation import Conversation
from sluice.errors import InvalidRequest, SafetyBlocked
from sluice.telemetry import names

EntityReader = Callable[
    [RequestContext, Check, Sequence[str]],
    Awaitable[tuple[Sequence[Sequence[Finding]] | GuardFailure, Decided]],
]
"""Returns the findings of the token classifier of a check in each text, and its decision for the
record; `GuardFailure` instead of findings if it gives no answer in time.
"""


class PromptInspector:
    """Inspects prompts, in the event loop or in threads."""

    def __init__(
        self, read_entities: EntityReader, inspecting: TextThreads, encoding: TextThreads
    ) -> None:
        """Let token classifiers read by `read_entities`; inspect and encode long texts in threads."""
        self._read_entities = read_entities
        self._inspecting = inspecting
        self._encoding = encoding

    async def inspect(self, context: RequestContext, span: Span) -> None:
        """Set the inspection of a request, and its conversation as a model may see it.

        Args:
            context: The request.
            span: The span of this step.

        Raises:
            SafetyBlocked: The policy does not let the prompt through.
            PromptTooLong: No model has room for the prompt.
            InvalidRequest: Nothing is left of a turn.
        """
        inspection = await self.find(context)
        context.log.inspected(inspection)
        inspector = context.policies.inspector
        if inspector.dry_run is not None:
            rehearse = partial(inspector.rehearse, inspection)
            tried = await self._inspecting.work_on(inspection.texts, context.tenant, rehearse)
            if moves := inspector.count(inspection.inspected, tried):
                span.set_attribute(names.DRY_RUN, move_labels(moves))
        if inspection.verdict.blocked == (TOO_LONG,):
            await self._refuse_too_long(context)
        context.conversation = passed(context.conversation, inspection)

    async def find(self, context: RequestContext) -> RequestInspection:
        """Return what the policy finds in the texts of a request, and set its inspection."""
        texts, tenant = context.request.conversation.texts, context.tenant
        begin = partial(_begin, context)
        inspection = await self._inspecting.work_on(texts, tenant, begin)
        context.inspection = inspection
        if guards := inspection.entity_guards:
            entities, inspection.checks = await self._find_entities(context, guards)
            decide = partial(inspection.decide, entities)
            await self._inspecting.work_on(texts, tenant, decide)
        return inspection

    async def _find_entities(
        self, context: RequestContext, guards: Sequence[EntityGuard]
    ) -> tuple[EntityResults, tuple[Decided, ...]]:
        """Return what the classifiers `guards` find in the prompt, and what is recorded of each."""
        texts = context.inspection.normalized
        checks = [Check(number, guard) for number, guard in enumerate(guards, 1)]
        readings = await asyncio.gather(
            *(self._read_entities(context, check, texts) for check in checks)
        )
        by_text: list[list[Finding]] = [[] for _ in texts]
        failed: list[tuple[str, Action]] = []
        for outcome, decided in readings:
            if isinstance(outcome, GuardFailure):
                failed += decided.taken
                continue
            for findings, added in zip(by_text, outcome, strict=True):
                findings += added
        return EntityResults(by_text, failed), tuple(decided for _, decided in readings)

    async def _refuse_too_long(self, context: RequestContext) -> None:
        """Raise PromptTooLong if no model has room for the texts, of which one is too long to be inspected.

        That helps the caller more than the limit of the policy.
        """
        request, catalog = context.request, context.policies.catalog
        conversation = request.conversation
        roomiest = max(catalog.reading, key=lambda name: catalog[name].context_tokens)
        model = catalog[request.model or roomiest]
        if context.to_prompts is not None:
            work = partial(context.to_prompts, conversation, model)
            await self._encoding.work_on(conversation.texts, request.tenant, work)
        elif request.audio is None:
            tokens = len(await encode(conversation, model, self._encoding, request.tenant))
            if tokens >= model.context_tokens:
                raise prompt_too_long(model, f"{tokens}", tokens)


def _begin(context: RequestContext) -> RequestInspection:
    """Return the inspection of a request; decided, unless token classifiers must read its texts first."""
    request = context.request
    inspection = context.policies.inspector.begin(
        request.tenant, request.labels, request.conversation.texts
    )
    if not inspection.entity_guards:
        inspection.decide(NO_ENTITIES)
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
    rules, version = inspection.verdict.blocked, inspection.policy.version
    if rules:
        raise blocked(rules, version)
    before, texts = conversation.texts, [result.text for result in inspection.inspected]
    if texts == before:
        return conversation
    if any(was.strip() and not text.strip() for was, text in zip(before, texts, strict=True)):
        raise InvalidRequest.of("input", "empty after redaction; send text that the policy allows")
    return conversation.with_texts(texts)
