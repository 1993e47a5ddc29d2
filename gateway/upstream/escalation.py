"""The cascade of one request, decided by the limits and the load of the gateway."""

from dataclasses import replace

from typing_extensions import override

from gateway.admission.pipeline import AdmittedRequest
from gateway.admission.prompts import PreparedPrompt, encode_now, fit
from gateway.routing.cascade.limit import EscalationLimiter
from gateway.routing.cascade.monitor import AnswerMonitor
from gateway.streaming.attempt import ModelAttempt
from gateway.streaming.cascade_state import Cascade
from gateway.upstream.rows import Upstream
from sluice.errors import SluiceError

HINT = "{prompt}\n\nA draft of an answer, which may be wrong:\n{draft}"


class Escalation(Cascade):
    """Implements `gateway.streaming.cascade_state.Cascade` for one request."""

    def __init__(
        self, upstream: Upstream, limiter: EscalationLimiter, context: AdmittedRequest
    ) -> None:
        request, route, second = context.request, context.plan.cascade, context.second
        assert route is not None
        assert second is not None
        self._route = route
        self.holds = route.mode == "hold" or not request.accept_replace
        self.monitor = AnswerMonitor(
            route,
            context.conversation.user_text,
            wants_json=request.sampling.HasField("json_schema") and request.tools is None,
            predictor=context.plan.answer_predictor,
        )
        self._upstream = upstream
        self._context = context
        self._prepared = second
        self._attempt = limiter.started(request.tenant)

    @override
    def refusal(self, now: float) -> str:
        if reason := self._limit_reached():
            return reason
        problem = self._upstream.overload.problem(self._route.second, self._context, now)
        return "" if problem is None else problem.message

    @override
    def start(self, draft: str, now: float) -> ModelAttempt:
        self._attempt.escalated = True
        if self._route.hint and draft:
            self._prepared = self._with_hint(draft)
        upstream, context = self._upstream, self._context
        attempt = upstream.new_attempt(context.request, self._prepared, f"{context.request_id}-2")
        upstream.send(context, attempt, self._prepared)
        return attempt

    def _limit_reached(self) -> str:
        """Which limit of the cascade is reached, if one is."""
        route, tenant = self._route, self._context.request.tenant
        if not self._attempt.may_escalate(route.max_share):
            return f"{tenant} has escalated {route.max_share:.0%} of its latest requests"
        if self._cost() > (route.max_cost or float("inf")):
            return f"{route.second} would cost more than is left of {route.max_cost:g}"
        return ""

    def _cost(self) -> float:
        """Of both attempts, the second answer at its longest."""
        facts, first = self._upstream.usage.models, self._context.first
        prepared, tokens = self._prepared, self.monitor.tokens
        return facts[first.model.name].cost(len(first.prompt_token_ids), tokens) + facts[
            prepared.model.name
        ].cost(len(prepared.prompt_token_ids), prepared.sampling.max_tokens)

    def _with_hint(self, draft: str) -> PreparedPrompt:
        """The second model's prompt with the draft in it; without it where it does not fit."""
        conversation, prepared = self._context.conversation, self._prepared
        *before, last = conversation.turns
        text = HINT.format(prompt=last.content, draft=draft)
        with_hint = replace(conversation, turns=(*before, replace(last, content=text)))
        try:
            token_ids = encode_now(with_hint, prepared.model)
            sampling = fit(self._context.request, prepared.model, len(token_ids))
        except SluiceError:
            return prepared
        sampling.seed = prepared.sampling.seed
        return replace(prepared, prompt_token_ids=token_ids, sampling=sampling)
