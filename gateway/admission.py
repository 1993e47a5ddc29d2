"""From a valid request to a task: inspect, route, tokenize, fit. One method a hop, in the order of the hops."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from opentelemetry.trace import Span

from gateway import prompts
from gateway.catalog import Catalog, ServedModel
from gateway.door.conversation import Conversation, Turn, check_not_emptied
from gateway.door.fit import fit
from gateway.door.requests import ValidRequest
from gateway.door.violations import Violations
from gateway.models import Directory
from gateway.routing.features import Features, count_numbers
from gateway.routing.router import Plan, Router
from gateway.safety.inspector import Finding, Inspector
from gateway.spans import CallSpans
from gateway.streams.endings import Hops
from sluice.errors import ModelUnavailable
from sluice.internal.v1.task_pb2 import Sampling
from sluice.telemetry import names

RETRY_AFTER_S: Final = 1.0


@dataclass(frozen=True)
class Admitted:
    """A request with everything decided."""

    plan: Plan
    model: ServedModel
    prompt_token_ids: list[int]
    sampling: Sampling


class Admission:
    """The decisions of the gateway, in order."""

    def __init__(
        self, catalog: Catalog, directory: Directory, inspector: Inspector, router: Router
    ) -> None:
        self.catalog = catalog
        self._directory = directory
        self._inspector = inspector
        self._router = router

    async def admit(self, request: ValidRequest, spans: CallSpans, hops: Hops) -> Admitted:
        """Decides everything; the times go into ``hops``.

        Raises:
            InvalidRequest, PromptTooLong: the model cannot take the prompt.
            ModelUnavailable: nobody serves the model now.
        """
        with _timed(spans, names.SPAN_SAFETY) as (span, hop):
            conversation = self._inspect(request.conversation, span)
        hops.safety_ms = hop.ms
        with _timed(spans, names.SPAN_ROUTE) as (span, hop):
            plan = await self._route(request, conversation, span)
        hops.route_ms = hop.ms
        model = self.catalog[plan.model]
        with _timed(spans, names.SPAN_TOKENIZE) as (span, hop):
            token_ids = await prompts.encode(conversation, model)
            span.set_attribute(names.GEN_AI_INPUT_TOKENS, len(token_ids))
            sampling = fit(request, model, len(token_ids))
        hops.tokenize_ms = hop.ms
        return Admitted(plan, model, token_ids, sampling)

    async def count(self, conversation: Conversation, name: str | None) -> tuple[int, ServedModel]:
        """Tokens of the prompt, and the model whose tokenizer counted."""
        conversation, _ = self._inspected(conversation)
        model = self.catalog[self._router.plan(await self._features(name, {}, conversation)).model]
        return len(await prompts.encode(conversation, model)), model

    def _inspect(self, conversation: Conversation, span: Span) -> Conversation:
        conversation, findings = self._inspected(conversation)
        if findings:
            span.set_attribute(names.FINDINGS, [finding.rule for finding in findings])
        return conversation

    def _inspected(self, conversation: Conversation) -> tuple[Conversation, list[Finding]]:
        results = [self._inspector.inspect(turn.content) for turn in conversation.turns]
        turns = tuple(
            Turn(turn.role, result.text)
            for turn, result in zip(conversation.turns, results, strict=True)
        )
        inspected = replace(conversation, turns=turns)
        found = Violations()
        check_not_emptied(inspected, found)
        found.raise_if_any()
        return inspected, [finding for result in results for finding in result.findings]

    async def _route(self, request: ValidRequest, conversation: Conversation, span: Span) -> Plan:
        features = await self._features(request.model, request.labels, conversation)
        plan = self._router.plan(features)
        span.set_attributes(
            {
                names.ROUTE_STRATEGY: plan.strategy,
                names.ROUTE_REASON: plan.reason,
                names.TIER: plan.tier,
                names.GEN_AI_RESPONSE_MODEL: plan.model,
            }
        )
        if not self._directory.load(plan.model, time.monotonic()).ready:
            raise ModelUnavailable(
                f"no worker serves {plan.model} now", retry_after_s=RETRY_AFTER_S
            )
        return plan

    async def _features(
        self, model: str | None, labels: Mapping[str, str], conversation: Conversation
    ) -> Features:
        if model is not None:
            return Features(model=model)
        tokens = 0
        if self._router.needs_prompt_tokens:
            tokens = len(await prompts.encode(conversation, self.catalog[self.catalog.default]))
        return Features(None, count_numbers(conversation.user_text), tokens, labels)


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
