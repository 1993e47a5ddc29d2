"""Learns from answers that have ended: keeps their outcomes, and gives the same request to shadow models.

Shadows never delay an answer: they are runs of class bulk, sent after the caller has its answer. The
record of the request says why a shadow was dropped.
"""

import time
from dataclasses import dataclass, replace
from typing import Final

from gateway.admission.overload import SchedulingParams
from gateway.admission.prompts import prepare
from gateway.admission.request_context import RequestContext, fail_with
from gateway.records.agreement import agreement
from gateway.routing.learned.features import ends
from gateway.routing.router import SHADOW, drawn
from gateway.safety.findings import Action
from gateway.streaming.answer_stream import AnswerStream
from gateway.streaming.model_run import ModelRun, ResultCollector
from gateway.telemetry.request_record import RequestRecords
from gateway.upstream.runs import Upstream
from gateway.validation.requests import ValidRequest
from sluice.background import BackgroundTasks
from sluice.errors import SluiceError
from sluice.internal.v1.outcome_pb2 import Comparison, Outcome
from sluice.telemetry import names
from sluice.telemetry.tracing import headers_of
from sluice.v1.admin_pb2 import ShadowRun
from sluice.v1.inference_pb2 import FINISH_REASON_CONTENT_FILTER, ROUTE_STRATEGY_SAFETY
from sluice.wire.clock import duration, unix_ms

IN_FLIGHT_MAX: Final = 32
"""Shadows of one gateway that may run at once; more are dropped."""
LIMIT_S: Final = 60.0
"""Timeout of a shadow, in seconds."""
CLASS: Final = "bulk"
"""Shadows take what all others leave."""

IN_FLIGHT: Final = "in_flight"
"""Why a shadow was dropped; else the reason of an error in small letters."""
BLOCKED: Final = "safety_blocked"
"""Why a shadow was dropped: the safety policy ended its answer."""

TEXT_CHARS_MAX: Final = 16_384
"""Length of a stored prompt or answer; of a longer text both ends are kept, as the learned router reads it."""

_STEERING: Final = (Action.ROUTE, Action.BLOCK)


@dataclass(frozen=True)
class _Shadow:
    """One model that is given the request of `answered`; `record` describes it, `pair` is what a router compares."""

    context: RequestContext
    answered: ModelRun
    pair: tuple[str, str] | None
    outcome: Outcome | None
    run_id: str
    record: ShadowRun


class ShadowRunner:
    """Runs shadows; the one owner of those that are in flight.

    Attributes:
        in_flight_max: See `IN_FLIGHT_MAX`.
        limit_s: See `LIMIT_S`.
    """

    def __init__(self, upstream: Upstream, records: RequestRecords) -> None:
        self._upstream = upstream
        self._records = records
        self._running = BackgroundTasks()
        self.in_flight_max, self.limit_s = IN_FLIGHT_MAX, LIMIT_S

    async def close(self) -> None:
        """Cancel the shadows in flight."""
        await self._running.close()

    def ended(self, context: RequestContext, stream: AnswerStream) -> None:
        """Keep the outcome of a request that has just ended, and start its shadows."""
        plan, routing, current = context.plan, context.policies.settings.routing, stream.current
        policy, outcomes = routing.policies.get(plan.policy, routing), routing.outcomes
        pair, outcome = policy.pair or outcomes.pair, None
        is_governed = plan.strategy == ROUTE_STRATEGY_SAFETY
        if is_governed or not (pair or policy.shadows) or not learnable(context.request, stream):
            return
        if pair and current.model in pair and context.tenant in outcomes.tenants:
            outcome = outcome_of(context, pair, stream)
            self._records.store.write_outcome(outcome)
        trials = drawn(policy.shadows, current.model, stream.request_id, SHADOW)
        for number, trial in enumerate(trials, 1):
            run_id = f"{stream.request_id}-s{number}"
            record = ShadowRun(model=trial.model)
            shadow = _Shadow(context, current, pair, outcome, run_id, record)
            if len(self._running) < self.in_flight_max:
                self._running.spawn(self._run(shadow))
            else:
                record.dropped = IN_FLIGHT
                self._add_record(shadow)

    async def _run(self, shadow: _Shadow) -> None:
        async def fail(error: SluiceError) -> None:
            shadow.record.dropped = error.reason.lower()

        await fail_with(self._answer(shadow), fail, shadow.run_id)
        self._add_record(shadow)

    async def _answer(self, shadow: _Shadow) -> None:
        """Compute the shadow's answer and compare it with that of the caller."""
        upstream, context, record = self._upstream, shadow.context, shadow.record
        began_at = time.monotonic()
        scheduling = SchedulingParams(CLASS, began_at + self.limit_s, rules=context.rules)
        upstream.overload.refuse_hopeless([record.model], scheduling, began_at)

        def on_end(result: ResultCollector) -> None:
            now, run = time.monotonic(), result.current
            # The result counts for the breaker, but not against the tenant's budget: it did not ask for this.
            upstream.overload.record_result(context, run, result.error, now)
            record.prompt_tokens = run.prompt_tokens
            record.completion_tokens = run.completion_tokens
            record.cost = run.cost
            record.duration.CopyFrom(duration((now - began_at) * 1000))

        attributes = {names.GEN_AI_REQUEST_MODEL: record.model, names.PRIORITY_CLASS: CLASS}
        with context.log.child(names.SPAN_SHADOW, attributes) as span:
            # The same conversation and sampling parameters, for another model.
            model = context.policies.catalog[record.model]
            request = replace(context.request, priority_class=CLASS)
            prepared = await prepare(context, request, model, upstream.preparation.threads)
            prepared.sampling.seed = context.seed
            run = upstream.new_run(request, prepared, shadow.run_id, scheduling.deadline)
            run.headers = headers_of(span)
            (result,) = await upstream.compute([run], on_end)
            if blocked(result):
                record.dropped = BLOCKED
                return
            record.agreement = agreement(shadow.answered.raw_text, run.raw_text)
            span.set_attribute(names.SHADOW_AGREEMENT, record.agreement)
        outcome = shadow.outcome
        # Routers compare their two models, and learn nothing of others.
        if outcome is not None and {shadow.answered.model, record.model} == set(shadow.pair or ()):
            outcome.comparison.CopyFrom(Comparison(agreement=record.agreement, shadow=True))
            if outcome.strong_answered:
                _keep_answer(outcome, run)
            self._records.store.write_outcome(outcome)

    def _add_record(self, shadow: _Shadow) -> None:
        """Add a shadow that answered, or was dropped, to the record of the request, which ended before."""
        log = shadow.context.log
        log.shadows = [*log.shadows, shadow.record]
        self._records.ended(log)


def learnable(request: ValidRequest, stream: AnswerStream) -> bool:
    """Return whether an answer that has ended may be used for learning.

    It must be complete and not resumed, and no guard may have blocked or rerouted it.
    """
    finished, checks = stream.finished, stream.checks
    if finished is None or request.resume or blocked(stream):
        return False
    return checks is None or all(check.action not in _STEERING for check in checks.decided)


def blocked(result: ResultCollector) -> bool:
    """Return whether the safety policy ended the answer."""
    return result.reason == FINISH_REASON_CONTENT_FILTER


def outcome_of(context: RequestContext, pair: tuple[str, str], stream: AnswerStream) -> Outcome:
    """Return the outcome of a `learnable` answer of one of the `pair`, with the prompt as the models saw it."""
    outcome = Outcome(
        request_id=stream.request_id,
        tenant=context.tenant,
        workload=context.request.workload,
        answered_unix_ms=unix_ms(),
        policy=context.plan.policy,
        weak_model=pair[0],
        strong_model=pair[1],
        strong_answered=stream.current.model == pair[1],
        prompt=ends(context.conversation.user_text, TEXT_CHARS_MAX),
    )
    if outcome.strong_answered:
        _compare_draft(outcome, stream)
    else:
        _keep_answer(outcome, stream.current)
    return outcome


def _compare_draft(outcome: Outcome, stream: AnswerStream) -> None:
    """Compare the weak model's draft with the answer of a cascade that escalated; a cut-off draft scores 0."""
    others = (run for run in stream.runs if run is not stream.current)
    draft = next((run for run in others if run.model == outcome.weak_model), None)
    if draft is None or stream.current.hint_tokens:
        return  # an answer that was written with the draft in sight says nothing about it
    is_complete = draft.transcript.closed
    score = agreement(draft.raw_text, stream.current.raw_text) if is_complete else 0.0
    outcome.comparison.CopyFrom(Comparison(agreement=score))
    if is_complete:
        _keep_answer(outcome, draft)


def _keep_answer(outcome: Outcome, run: ModelRun) -> None:
    """Keep an answer unless the safety policy found something in it."""
    output = run.output
    if output is None or not output.review().actions:
        outcome.weak_answer = ends(run.raw_text, TEXT_CHARS_MAX)
