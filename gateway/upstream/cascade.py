"""The cascade of one request: monitors the first model's answer, and escalates to the second when it is in doubt.

Before the commit point nothing of the first answer has been promised to the caller. The answer commits after
``commit_tokens`` tokens without doubt, or at its end when nothing is found in it. The checks of a whole answer need no
model; a policy names them: ``checks: [finished, json, sums]``. To add one, write a function of `WholeAnswer` and enter
it into `CHECKS` under its name.

How much a cascade may cost is bounded by the share of a tenant's latest requests that use the second model. The running
ones are not counted: escalated requests run longer, so a quarter of all requests can be half of the running ones.
"""

import json
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from typing_extensions import override

from gateway.admission.pipeline import AdmittedRequest
from gateway.admission.prompts import PreparedPrompt, encode_now, fit
from gateway.routing.learned.arithmetic import Sum, sums
from gateway.routing.prediction import LearnedHead, Prediction
from gateway.streaming.answer import Decision, SecondModel
from gateway.streaming.row import Row
from gateway.upstream.rows import Upstream
from sluice.errors import SluiceError
from sluice.internal.v1.frame_pb2 import Logprobs
from sluice.settings.routing import CascadeRoute

HINT: Final = "{prompt}\n\nA draft of an answer, which may be wrong:\n{draft}"
DECIDE_TOKENS: Final = 4
"""A mean of fewer tokens is not compared."""
WINDOW: Final = 100
"""Latest requests of a tenant that are counted."""
ALWAYS_ALLOWED: Final = 10
"""Escalations in the window that are allowed at any share: a share of few requests means little."""
TENANTS_MAX: Final = 4096
"""Beyond it the tenant that was idle for longest is dropped."""


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that ended before its commit point."""

    text: str
    truncated: bool
    """Whether it ran out of tokens."""
    wants_json: bool


Check = Callable[[WholeAnswer], str]
"""Says why the answer is in doubt, in one sentence without any text of it; empty: it found nothing."""


def finished(answer: WholeAnswer) -> str:
    """Doubts an answer that ran out of tokens."""
    return "the answer is unfinished" if answer.truncated else ""


def is_json(answer: WholeAnswer) -> str:
    """Doubts an answer that is not one JSON value, where the request asked for JSON."""
    if not answer.wants_json:
        return ""
    try:
        json.loads(answer.text)
    except ValueError:
        return "the answer is not JSON"
    return ""


def sums_add_up(answer: WholeAnswer) -> str:
    """Doubts an answer with an equation that does not hold, such as "2 + 2 = 5".

    Whole numbers must agree exactly; with decimals or a division, rounding is accepted. What cannot be evaluated is
    accepted.
    """
    wrong = any(_wrong(one) for one in sums(answer.text))
    return "a sum in the answer does not add up" if wrong else ""


CHECKS: Final[Mapping[str, Check]] = {
    "finished": finished,
    "json": is_json,
    "sums": sums_add_up,
}
"""By name."""


class CascadeRequest:
    """One request of a cascade.

    Attributes:
        escalated: the second model is working on it, or answered it.
    """

    def __init__(self, recent: deque["CascadeRequest"]) -> None:
        self.escalated = False
        self._recent = recent

    def may_escalate(self, share: float) -> bool:
        """Whether the second model may start, with at most ``share`` of the tenant's latest requests using it."""
        escalated = sum(request.escalated for request in self._recent)
        return escalated + 1 <= max(ALWAYS_ALLOWED, share * len(self._recent))


class EscalationLimiter:
    """The latest requests of each tenant."""

    def __init__(self) -> None:
        self._recent: OrderedDict[str, deque[CascadeRequest]] = OrderedDict()

    def started(self, tenant: str) -> CascadeRequest:
        """A request of a cascade starts."""
        recent = self._recent.setdefault(tenant, deque(maxlen=WINDOW))
        self._recent.move_to_end(tenant)
        if len(self._recent) > TENANTS_MAX:
            self._recent.popitem(last=False)
        request = CascadeRequest(recent)
        recent.append(request)
        return request


class AnswerMonitor:
    """Monitors one answer.

    Attributes:
        reason: why it is in doubt, one sentence without any text of the answer.
        tokens: received so far.
        score: what ``predictor`` predicted, once it was asked.
    """

    def __init__(
        self,
        route: CascadeRoute,
        prompt: str,
        *,
        wants_json: bool,
        predictor: LearnedHead | None = None,
    ) -> None:
        self.reason = ""
        self.score: Prediction | None = None
        self.tokens = 0
        self._route = route
        self._prompt = prompt
        self._wants_json = wants_json
        self._predictor = predictor
        self._logprob = 0.0
        self._margin = 1.0

    @property
    def mean_logprob(self) -> float:
        """Of the tokens so far."""
        return self._logprob / self.tokens if self.tokens else 0.0

    def push(self, logprobs: Sequence[Logprobs]) -> Decision:
        """Takes the next tokens."""
        for one in logprobs:
            self.tokens += 1
            self._logprob += one.logprob
            self._margin = min(self._margin, _margin(one))
            decision = self._by_confidence()
            if decision is not Decision.PENDING:
                return decision
        return Decision.PENDING

    def end(self, text: str, *, truncated: bool) -> Decision:
        """The answer ended before its commit point; ``truncated``: it ran out of tokens."""
        self.reason = self._doubt(WholeAnswer(text, truncated, self._wants_json))
        return Decision.ESCALATE if self.reason else Decision.COMMIT

    def _by_confidence(self) -> Decision:
        if self.tokens < DECIDE_TOKENS:
            return Decision.PENDING
        self.reason = self._low_confidence()
        if self.reason:
            return Decision.ESCALATE
        done = self.tokens >= self._route.commit_tokens
        return Decision.COMMIT if done else Decision.PENDING

    def _low_confidence(self) -> str:
        route = self._route
        if self.mean_logprob < route.min_logprob:
            return (
                f"mean log-probability {self.mean_logprob:.2f} of {self.tokens} tokens"
                f" is below {route.min_logprob:g}"
            )
        if self._margin < route.min_margin:
            return (
                f"a token was only {self._margin:.2f} ahead of the next, below {route.min_margin:g}"
            )
        return ""

    def _doubt(self, answer: WholeAnswer) -> str:
        """Checks in the order of the policy, then confidence, then the prediction; the first doubt counts."""
        for name in self._route.checks:
            if reason := CHECKS[name](answer):
                return reason
        if self.tokens and (reason := self._low_confidence()):
            return reason
        return "" if self._predictor is None else self._predicted(self._predictor, answer.text)

    def _predicted(self, predictor: LearnedHead, text: str) -> str:
        prediction = predictor.predict(self._prompt, text)
        self.score = prediction
        return prediction.reason if prediction.strong else ""


class Cascade(AnswerMonitor, SecondModel):
    """The monitor of a request's first answer, and the second model, which starts within the gateway's limits."""

    def __init__(
        self, upstream: Upstream, limiter: EscalationLimiter, context: AdmittedRequest
    ) -> None:
        request, route, second = context.request, context.plan.cascade, context.second
        assert route is not None
        assert second is not None
        super().__init__(
            route,
            context.conversation.user_text,
            wants_json=request.sampling.HasField("json_schema") and request.tools is None,
            predictor=context.plan.answer_predictor,
        )
        self.holds = route.mode == "hold" or not request.accept_replace
        self._upstream = upstream
        self._context = context
        self._prepared = second
        self._request = limiter.started(request.tenant)

    @override
    def refusal(self, now: float) -> str:
        if reason := self._limit_reached():
            return reason
        problem = self._upstream.overload.problem(self._route.second, self._context, now)
        return "" if problem is None else problem.message

    @override
    def start(self, draft: str) -> Row:
        self._request.escalated = True
        if self._route.hint and draft:
            self._prepared = self._with_hint(draft)
        upstream, context = self._upstream, self._context
        attempt = upstream.new_row(context.request, self._prepared, f"{context.request_id}-2")
        upstream.send(context, attempt, self._prepared)
        return attempt

    def _limit_reached(self) -> str:
        """Which limit of the cascade is reached, if one is."""
        route, tenant = self._route, self._context.request.tenant
        if not self._request.may_escalate(route.max_share):
            return f"{tenant} has escalated {route.max_share:.0%} of its latest requests"
        if self._cost() > (route.max_cost or float("inf")):
            return f"{route.second} would cost more than is left of {route.max_cost:g}"
        return ""

    def _cost(self) -> float:
        """Of both attempts, the second answer at its longest."""
        first, second = self._context.first, self._prepared
        return first.model.facts.cost(
            len(first.prompt_token_ids), self.tokens
        ) + second.model.facts.cost(len(second.prompt_token_ids), second.sampling.max_tokens)

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


def _margin(one: Logprobs) -> float:
    """Probability of the drawn token minus that of the best other one."""
    others = one.top_logprobs[:2]
    if not others:
        return 1.0
    runner_up = others[0] if not math.isclose(others[0], one.logprob, abs_tol=1e-6) else None
    if runner_up is None:
        runner_up = others[1] if len(others) > 1 else -math.inf
    return math.exp(one.logprob) - math.exp(runner_up)


def _wrong(one: Sum) -> bool:
    whole = "/" not in one.operators and all(number.is_integer() for number in one.operands)
    return one.value is not None and one.value != one.stated if whole else one.wrong
