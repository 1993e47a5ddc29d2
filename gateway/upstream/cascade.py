"""The cascade of one request: monitors the first model's answer, and escalates to the second when it is in doubt.

Before the commit point nothing of the first answer has been promised to the caller. The answer commits after
`commit_tokens` tokens without doubt, or at its end when nothing is found in it. The checks of a whole answer need no
model; a policy names them: `checks: [finished, json, sums]`. To add one, write a function of `WholeAnswer` and enter
it into `CHECKS` under its name.

How much a cascade may cost is bounded by the share of a tenant's latest requests that use the second model. The running
ones are not counted: escalated requests run longer, so a quarter of all requests can be half of the running ones.

A hint is the first model's draft in the second model's prompt. It is treated like any text that a model is to read:

1. Only what the output rules leave of it is used. Placeholders stay: the second model sees no more than the first.
2. The rules for prompts inspect it. A draft that they would change, route or block is not shown.
3. It is a part of the last user turn, encoded like any message: special tokens in it are plain text, and nothing in it
   is rendered as a template.

An escalation never fails because of its hint: without room, or where a rule above forbids it, the second model gets the
prompt alone, and the record says why.
"""

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.admission.prompts import encode_now, fit
from gateway.admission.request_context import PreparedPrompt, RequestContext
from gateway.admission.turns import TURN_COST
from gateway.routing.learned.arithmetic import sums
from gateway.routing.learned.model import LearnedHead
from gateway.safety.inspector import RequestInspection
from gateway.streaming.answer_stream import AnswerStream
from gateway.streaming.model_run import AcceptedFrame, ModelRun, finish_reason_of
from gateway.upstream.runs import Upstream
from gateway.validation.conversation import USER
from sluice.errors import SluiceError
from sluice.internal.v1.frame_pb2 import Logprobs
from sluice.settings.routing import DRAFT, CascadeRoute
from sluice.v1.admin_pb2 import RouterScore
from sluice.v1.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP

DECIDE_TOKENS: Final = 4
"""Least number of tokens whose mean log-probability is compared."""
WINDOW: Final = 100
"""Latest requests of a tenant that its share of escalations is of."""
ALWAYS_ALLOWED: Final = 10
"""Escalations in the window that are allowed at any share: a share of few requests means little."""
ENCODED_CHARS: Final = 8192
"""Longer prompts are not encoded again for a hint; a message counts as `TURN_COST` characters beside its text."""
TENANTS_MAX: Final = 4096
"""Tenants that are remembered; the one that was idle for longest is dropped."""


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that ended before its commit point."""

    text: str
    truncated: bool
    """Whether it ran out of tokens."""
    wants_json: bool


Check = Callable[[WholeAnswer], str]
"""Return why the answer is in doubt, in one sentence without any text of it; empty: it is not."""


def finished(answer: WholeAnswer) -> str:
    """Doubt an answer that ran out of tokens."""
    return "the answer is unfinished" if answer.truncated else ""


def is_json(answer: WholeAnswer) -> str:
    """Doubt an answer that is not one JSON value, where the request asked for JSON."""
    if not answer.wants_json:
        return ""
    try:
        json.loads(answer.text)
    except ValueError:
        return "the answer is not JSON"
    return ""


def sums_add_up(answer: WholeAnswer) -> str:
    """Doubt an answer with an equation that does not hold, such as "2 + 2 = 5".

    Whole numbers must agree exactly; with decimals or a division, rounding is accepted. What cannot be evaluated is
    accepted.
    """
    for equation in sums(answer.text):
        is_wrong = equation.is_wrong
        if "/" not in equation.operators and all(map(float.is_integer, equation.operands)):
            is_wrong = equation.value is not None and equation.value != equation.stated
        if is_wrong:
            return "a sum in the answer does not add up"
    return ""


CHECKS: Final[Mapping[str, Check]] = {
    "finished": finished,
    "json": is_json,
    "sums": sums_add_up,
}
"""The checks that a policy can name."""


@dataclass(eq=False)
class CascadeRequest:
    """One request of a cascade.

    Attributes:
        recent: the latest ones of its tenant.
        escalated: the second model is working on it, or answered it.
    """

    recent: deque["CascadeRequest"]
    escalated: bool = False

    def may_escalate(self, share: float) -> bool:
        """Return whether the second model may start, with at most `share` of the latest requests using it."""
        escalated = sum(request.escalated for request in self.recent)
        return escalated + 1 <= max(ALWAYS_ALLOWED, share * len(self.recent))


class EscalationLimiter:
    """The latest requests of each tenant."""

    def __init__(self) -> None:
        self._recent: OrderedDict[str, deque[CascadeRequest]] = OrderedDict()

    def started(self, tenant: str) -> CascadeRequest:
        """Add a request of a cascade."""
        recent = self._recent.setdefault(tenant, deque(maxlen=WINDOW))
        self._recent.move_to_end(tenant)
        if len(self._recent) > TENANTS_MAX:
            self._recent.popitem(last=False)
        request = CascadeRequest(recent)
        recent.append(request)
        return request


@dataclass(eq=False)
class AnswerMonitor:
    """Monitors one answer to `prompt`.

    Attributes:
        predictor: decides about a whole answer that all else accepts.
        reason: why it is in doubt, one sentence without any text of the answer; empty: it is not.
        committed: it is promised to the caller.
        tokens: received until it was decided.
        score: what `predictor` predicted, once it was used.
    """

    route: CascadeRoute
    prompt: str
    wants_json: bool
    predictor: LearnedHead | None = None
    reason: str = ""
    committed: bool = False
    score: RouterScore | None = None
    tokens: int = 0
    _logprob: float = 0.0

    @property
    def decided(self) -> bool:
        """Whether it is committed or in doubt."""
        return self.committed or bool(self.reason)

    def push(self, logprobs: Sequence[Logprobs]) -> None:
        """Add the next tokens."""
        for token in logprobs:
            self.tokens += 1
            self._logprob += token.logprob
            if self.tokens >= DECIDE_TOKENS:
                self.reason = self._low_confidence()
                self.committed = not self.reason and self.tokens >= self.route.commit_tokens
            if self.decided:
                return

    def end(self, text: str, *, truncated: bool) -> None:
        """Check an answer that ended before its commit point; `truncated`: it ran out of tokens."""
        self.reason = self._doubt(WholeAnswer(text, truncated, self.wants_json))
        self.committed = not self.reason

    def _low_confidence(self) -> str:
        mean, least = self._logprob / self.tokens, self.route.min_logprob
        if mean >= least:
            return ""
        return f"mean log-probability {mean:.4g} of {self.tokens} tokens is below {least:g}"

    def _doubt(self, answer: WholeAnswer) -> str:
        """Return the first doubt: by the checks in the order of the policy, the confidence, the prediction."""
        for name in self.route.checks:
            if reason := CHECKS[name](answer):
                return reason
        if self.tokens and (reason := self._low_confidence()):
            return reason
        if self.predictor is None:
            return ""
        prediction = self.predictor.predict(self.prompt, answer.text)
        self.score = prediction.score
        return prediction.reason if prediction.strong else ""


class Cascade(AnswerMonitor):
    """The monitor of a request's first answer, and the second model, which starts within the gateway's limits.

    Attributes:
        holds: whether nothing of the first answer is shown before its commit point.
    """

    def __init__(
        self, upstream: Upstream, limiter: EscalationLimiter, context: RequestContext
    ) -> None:
        request, route = context.request, context.plan.cascade
        assert route is not None
        super().__init__(
            route,
            context.conversation.user_text,
            wants_json=request.sampling.HasField("json_schema") and request.tools is None,
            predictor=context.plan.answer_predictor,
        )
        self.holds = route.mode == "hold" or not request.accept_replace
        self._upstream = upstream
        self._context = context
        _, self._prepared = context.prompts
        self._request = limiter.started(request.tenant)

    def next_run(
        self, stream: AnswerStream, accepted: AcceptedFrame, now: float
    ) -> ModelRun | None:
        """Return the run of the second model, already sent, if the first answer is in doubt and that one may start.

        Else return None, and commit `stream` to the first answer once that is decided.
        """
        run = stream.current
        text = run.transcript
        if text.contradicted or text.blocked:
            return None
        self.push(accepted.logprobs)
        reason = None if run.final is None else finish_reason_of(run.final.end)
        if not self.decided and (run.is_stopped or reason is not None):
            text.end()
            if not run.is_unread:
                text.close(truncated=reason != FINISH_REASON_STOP)
            # As callers see it, or as the model gave it while it is not decided.
            is_truncated = reason == FINISH_REASON_LENGTH and not run.is_stopped
            self.end(text.text if text.closed else run.raw_text, truncated=is_truncated)
        if self.reason:
            refusal = self._refusal(now)
            if not refusal:
                run.escalation_reason = self.reason
                return self._start(run)
            run.kept_reason = f"{self.reason}; {refusal}"
            self.committed = True
        if self.committed:
            stream.commit()
        return None

    def _start(self, first: ModelRun) -> ModelRun:
        self._request.escalated = True
        upstream, context, prepared = self._upstream, self._context, self._prepared
        hint_tokens, dropped = 0, ""
        if self.route.hint is not None:
            try:
                prepared, hint_tokens = add_hint(context, prepared, first, self.route.hint)
            except HintDropped as reason:
                dropped = str(reason)
        run_id = f"{context.request_id}-2"
        run = upstream.new_run(context.request, prepared, run_id, context.deadline)
        run.hint_tokens, run.hint_dropped = hint_tokens, dropped
        upstream.send(context, run)
        return run

    def _refusal(self, now: float) -> str:
        """Return why the second model may not start now; empty: it may."""
        route, tenant = self.route, self._context.request.tenant
        if not self._request.may_escalate(route.max_share):
            return f"{tenant} has escalated {route.max_share:.0%} of its latest requests"
        outlook = self._upstream.overload.outlook(route.second, self._context, now)
        return "" if outlook.problem is None else outlook.problem.message


class HintDropped(Exception):
    """The second model does not see the draft; says why, without any text of it."""


def add_hint(
    context: RequestContext, prepared: PreparedPrompt, run: ModelRun, template: str
) -> tuple[PreparedPrompt, int]:
    """Put the draft of `run` into the prompt `prepared` of the second model; return that and the tokens added.

    Raises:
        HintDropped: the prompt stays as it is.
    """
    draft = _inspected(context, _filtered(run))
    # At the end of the last turn, which must be the user's.
    *before_last, last = context.conversation.turns
    if context.conversation.raw or last.role != USER:
        raise HintDropped("only a user's message has a place for it")
    note = template.replace(DRAFT, draft)
    turns = (*before_last, replace(last, content=f"{last.content}\n\n{note}"))
    conversation = replace(context.conversation, turns=turns)
    if sum(len(text) + TURN_COST for text in conversation.texts) > ENCODED_CHARS:
        raise HintDropped("the prompt is too long to be encoded again beside other calls")
    model = prepared.model
    try:
        token_ids = encode_now(conversation, model)
        sampling = fit(context.request, model, len(token_ids))
    except SluiceError as error:
        raise HintDropped(f"{model.name} has no room for it") from error
    before = prepared.sampling.max_tokens
    # Half of the answer's room where the caller leaves its length to the model, else all that was asked for.
    needed = before if context.request.sampling.max_tokens else before // 2
    if sampling.max_tokens < needed:
        raise HintDropped(f"{model.name} has no room for it beside the answer")
    sampling.seed = prepared.sampling.seed
    added = len(token_ids) - len(prepared.prompt_token_ids)
    return replace(prepared, prompt_token_ids=token_ids, sampling=sampling), added


def _filtered(run: ModelRun) -> str:
    """Return the draft as the output rules leave it."""
    if run.is_unread:
        raise HintDropped("token classifiers have not read all of it")
    if run.output is None:
        return run.raw_text
    decision = run.output.review()
    if decision.blocked:
        raise HintDropped(f"the safety policy blocks it: {', '.join(decision.blocked)}")
    return decision.text


def _inspected(context: RequestContext, draft: str) -> str:
    """Return the draft normalized, if the rules for prompts leave it as it is."""
    request = context.request
    policy = context.policies.inspector.choose(request.tenant, request.labels)
    inspection = RequestInspection(policy, [draft])
    inspection.decide()
    (text,) = inspection.edited
    routed = inspection.route is not None
    if inspection.blocked or routed or inspection.edited != inspection.normalized:
        rules = sorted({rule for rule, _ in inspection.counts})
        raise HintDropped(f"the safety policy for prompts does not pass it: {', '.join(rules)}")
    if not text.strip():
        raise HintDropped("it is empty")
    return text
