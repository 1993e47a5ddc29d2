"""A cascade of one request: what `gateway.streaming.ticket.Cascade` asks, answered from the state of the gateway."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

from gateway.admission.overload import OverloadControl
from gateway.admission.pipeline import AdmittedRequest
from gateway.admission.prompts import PreparedPrompt, encode_now, fit
from gateway.admission.usage import UsageAccounting
from gateway.records.record_builder import RecordBuilder
from gateway.routing.cascade.limit import EscalationLimiter
from gateway.routing.cascade.monitor import AnswerMonitor
from gateway.streaming.leg import Leg
from gateway.streaming.stream import Stream
from gateway.telemetry.drift import DriftMonitor
from gateway.upstream.tasks import leg_of
from gateway.validation.conversation import Turn
from gateway.validation.requests import ValidRequest
from sluice.errors import SluiceError
from sluice.settings.routing import CascadeRoute

HINT = "{prompt}\n\nA draft of an answer, which may be wrong:\n{draft}"


@dataclass(frozen=True)
class Cascading:
    """What all cascades of a gateway share."""

    overload: OverloadControl
    usage: UsageAccounting
    escalations: EscalationLimiter
    drift: DriftMonitor


class Escalation:
    """`gateway.streaming.ticket.Cascade` of one request."""

    def __init__(
        self,
        shared: Cascading,
        request: ValidRequest,
        admitted: AdmittedRequest,
        record: RecordBuilder,
        stall_s: float,
        send: Callable[[Stream, Leg, PreparedPrompt], None],
    ) -> None:
        """``send`` publishes the task of a second row."""
        assert admitted.plan.cascade is not None
        assert admitted.second is not None
        route = admitted.plan.cascade
        self.holds = route.mode == "hold" or not request.accept_replace
        self.together = route.start == "together"
        self.watch = AnswerMonitor(
            route,
            admitted.conversation.user_text,
            wants_json=request.sampling.HasField("json_schema"),
            predictor=admitted.plan.answer_predictor,
        )
        self._shared = shared
        self._request = request
        self._admitted = admitted
        self._prepared = admitted.second
        self._route: CascadeRoute = route
        self._record = record
        # A row that begins anew needs another name: JetStream drops a task whose name it knows.
        self._row_ids = (f"{record.request_id}-{number}" for number in count(2))
        self._stall_s = stall_s
        self._send = send
        self._attempt = shared.escalations.started(request.tenant)

    def refusal(self, now: float, *, ahead: bool) -> str:
        """See `Cascade.refusal`."""
        reason = "" if self._attempt.escalated else self._too_much(ahead)
        if reason:
            return reason
        problem = self._shared.overload.problem(self._route.second, self._admitted.scheduling, now)
        return "" if problem is None else problem.message

    def second(self, draft: str, now: float) -> Leg:
        """See `Cascade.second`."""
        self._attempt.escalated = True
        if self._route.hint:
            self._prepared = self._hinted(draft)
        return leg_of(self._request, self._prepared, next(self._row_ids), (), self._stall_s, now)

    def launch(self, stream: Stream, leg: Leg) -> None:
        """See `Cascade.launch`."""
        self._send(stream, leg, self._prepared)

    def unneeded(self) -> None:
        """See `Cascade.unneeded`."""
        self._attempt.escalated = False

    def ended(self) -> None:
        """See `Cascade.ended`."""
        score, plan = self.watch.score, self._admitted.plan
        if score is not None:
            self._shared.drift.scored(score)
            self._record.add_plan(replace(plan, scores=(*plan.scores, score)))

    def _too_much(self, ahead: bool) -> str:
        """Which bound of the cascade is reached."""
        route, tenant = self._route, self._request.tenant
        if not self._attempt.may_escalate(route.max_share):
            return f"{tenant} has gone over with {route.max_share:.0%} of its latest requests"
        if self._cost(ahead) > (route.max_cost or float("inf")):
            return f"{route.second} would cost more than is left of {route.max_cost:g}"
        return ""

    def _cost(self, ahead: bool) -> float:
        """Of both legs, the second one's answer at its longest; ``ahead``: the first one's too."""
        facts, first = self._shared.usage.models, self._admitted.first
        prepared = self._prepared
        tokens = first.sampling.max_tokens if ahead else self.watch.tokens
        return facts[first.model.name].cost(len(first.prompt_token_ids), tokens) + facts[
            prepared.model.name
        ].cost(len(prepared.prompt_token_ids), prepared.sampling.max_tokens)

    def _hinted(self, draft: str) -> PreparedPrompt:
        """The second model's prompt with the draft in its prompt; without it where it does not fit."""
        conversation, prepared = self._admitted.conversation, self._prepared
        *before, last = conversation.turns
        text = HINT.format(prompt=last.content, draft=draft)
        hinted = replace(conversation, turns=(*before, Turn(last.role, text)))
        try:
            token_ids = encode_now(hinted, prepared.model)
            sampling = fit(self._request, prepared.model, len(token_ids))
        except SluiceError:
            return prepared
        sampling.seed = prepared.sampling.seed
        return replace(prepared, prompt_token_ids=token_ids, sampling=sampling)
