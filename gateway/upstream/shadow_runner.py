"""Learns from answers that have ended: keeps their outcomes, and gives the same request to shadow models.

Shadows never delay an answer: they are rows of class bulk, sent after the caller has its answer. The
record of the request says why a shadow was dropped.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from gateway.admission.call import fail_with
from gateway.admission.overload import SchedulingParams
from gateway.admission.prompts import prepare
from gateway.admission.request_context import RequestContext
from gateway.records.agreement import agreement
from gateway.routing.learned.features import ends
from gateway.routing.rules import SHADOW, drawn
from gateway.safety.actions import Action
from gateway.streaming.answer import Answer
from gateway.streaming.row import Row
from gateway.streaming.row_result import RowResult
from gateway.telemetry.drift import DriftMonitor
from gateway.telemetry.request_record import RequestRecords
from gateway.upstream.rows import InternalRow, Upstream
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
"""Shadows of one gateway that may run at once."""
LIMIT_S: Final = 60.0
"""Longest time for the answer of a shadow, seconds."""
CLASS: Final = "bulk"

IN_FLIGHT: Final = "in_flight"
"""Why a shadow was dropped; else the reason of an error in small letters."""
BLOCKED: Final = "safety_blocked"

TEXT_CHARS_MAX: Final = 16_384
"""Of a prompt or an answer; of a longer text both ends are kept, as the learned router reads it."""

_STEERING: Final = (Action.ROUTE, Action.BLOCK)


@dataclass(frozen=True)
class _Shadow:
    """One model that is given the request of ``answered``; ``run`` is filled in, ``pair`` is what a router compares."""

    context: RequestContext
    answered: Row
    pair: tuple[str, str] | None
    outcome: Outcome | None
    row_id: str
    run: ShadowRun


class ShadowRunner:
    """Runs shadows; the one owner of those that are in flight."""

    def __init__(self, upstream: Upstream, records: RequestRecords, drift: DriftMonitor) -> None:
        self._upstream = upstream
        self._records = records
        self._drift = drift
        self._running = BackgroundTasks()

    async def close(self) -> None:
        """Cancels the shadows in flight."""
        await self._running.close()

    def ended(self, context: RequestContext, answer: Answer) -> None:
        """Keeps the outcome of a request that has just ended, and starts its shadows."""
        plan, routing, current = context.plan, context.policies.settings.routing, answer.current
        policy, kept = routing.policies.get(plan.policy, routing), routing.outcomes
        pair, outcome = policy.pair or kept.pair, None
        governed = plan.route.strategy == ROUTE_STRATEGY_SAFETY
        if governed or not (pair or policy.shadows) or not learnable(context.request, answer):
            return
        if pair and current.model in pair and context.tenant in kept.tenants:
            outcome = outcome_of(context, pair, answer)
            self._records.store.write_outcome(outcome)
        trials = drawn(policy.shadows, current.model, answer.request_id, SHADOW)
        for number, trial in enumerate(trials, 1):
            row_id = f"{answer.request_id}-s{number}"
            run = ShadowRun(model=trial.model)
            shadow = _Shadow(context, current, pair, outcome, row_id, run)
            if len(self._running) < IN_FLIGHT_MAX:
                self._running.spawn(self._run(shadow))
            else:
                run.dropped = IN_FLIGHT
                self._ended(shadow)

    async def _run(self, shadow: _Shadow) -> None:
        async def fail(error: SluiceError) -> None:
            shadow.run.dropped = error.reason.lower()

        await fail_with(self._answer(shadow), fail, shadow.row_id)
        self._ended(shadow)

    async def _answer(self, shadow: _Shadow) -> None:
        """Compares its answer with that of the caller."""
        run, begun = shadow.run, time.monotonic()
        scheduling = SchedulingParams(CLASS, begun + LIMIT_S, rules=shadow.context.scheduling.rules)
        problem = self._upstream.overload.outlook(run.model, scheduling, begun).problem
        if problem is not None:
            raise problem
        attributes = {names.GEN_AI_REQUEST_MODEL: run.model, names.PRIORITY_CLASS: CLASS}
        with shadow.context.log.child(names.SPAN_SHADOW, attributes) as span:
            row = await self._row(shadow, begun, headers_of(span))
            attempt = row.attempt
            try:
                await InternalRow.answer(row)
            finally:
                now = time.monotonic()
                # The result counts for the breaker, but not against the tenant's budget: it did not ask for this.
                usage = self._upstream.usage
                usage.record_result(shadow.context.scheduling, attempt, row.result.error, now)
                run.prompt_tokens = attempt.prompt_tokens
                run.completion_tokens = attempt.completion_tokens
                run.cost = attempt.cost
                run.duration.CopyFrom(duration((now - begun) * 1000))
            if blocked(row.result):
                run.dropped = BLOCKED
                return
            run.agreement = agreement(shadow.answered.raw_text, attempt.raw_text)
            span.set_attribute(names.SHADOW_AGREEMENT, run.agreement)
        outcome = shadow.outcome
        if outcome is not None and add_shadow(outcome, attempt, run.agreement):
            self._records.store.write_outcome(outcome)
        self._observe_drift(shadow)

    async def _row(self, shadow: _Shadow, now: float, headers: Mapping[str, str]) -> InternalRow:
        """The same conversation and sampling parameters for another model."""
        upstream, context = self._upstream, shadow.context
        model = context.policies.catalog[shadow.run.model]
        request = replace(context.request, priority_class=CLASS)
        inspect, threads = context.first.inspect, upstream.preparation.threads
        prepared = await prepare(request, context.conversation, model, inspect, threads)
        prepared.sampling.seed = context.first.sampling.seed
        return InternalRow(upstream, request, prepared, shadow.row_id, now + LIMIT_S, headers)

    def _observe_drift(self, shadow: _Shadow) -> None:
        """Reports how the weak one of the router's two models did; routers predict nothing of other models."""
        plan, pair = shadow.context.plan, shadow.pair
        if pair is not None and {shadow.answered.model, shadow.run.model} == set(pair):
            self._drift.compared(plan, pair[0], shadow.run.agreement, shadow.row_id)

    def _ended(self, shadow: _Shadow) -> None:
        """A shadow answered, or was dropped, after the request had ended."""
        log = shadow.context.log
        log.shadows = [*log.shadows, shadow.run]
        self._records.ended(log)


def learnable(request: ValidRequest, stream: Answer) -> bool:
    """Whether an answer that has ended may be used for learning: it is complete, and no guard blocked or rerouted it.

    A resumed answer began in another stream, which counts.
    """
    finished, guards = stream.finished, stream.guards
    if finished is None or request.resume or blocked(stream):
        return False
    return guards is None or all(one.action not in _STEERING for one in guards.checks.decided)


def blocked(result: RowResult) -> bool:
    """Whether the safety policy ended the answer."""
    return result.reason == FINISH_REASON_CONTENT_FILTER


def outcome_of(context: RequestContext, pair: tuple[str, str], stream: Answer) -> Outcome:
    """The outcome of a `learnable` answer of one of the ``pair``, with the caller's turns as the models saw them."""
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


def add_shadow(outcome: Outcome, shadow: Row, agreed: float) -> bool:
    """Adds the answer of a shadow; False where its model is not the other one of the two."""
    if shadow.model != (outcome.weak_model if outcome.strong_answered else outcome.strong_model):
        return False
    outcome.comparison.CopyFrom(Comparison(agreement=agreed, shadow=True))
    if outcome.strong_answered:
        _keep_answer(outcome, shadow)
    return True


def _compare_draft(outcome: Outcome, stream: Answer) -> None:
    """Compares the draft of the weak model with the answer of a cascade that escalated; a cut-off draft scores 0."""
    others = (one for one in stream.attempts if one is not stream.current)
    draft = next((one for one in others if one.model == outcome.weak_model), None)
    if draft is None or stream.current.hint_tokens:
        return  # an answer that was written with the draft in sight says nothing about it
    complete = draft.transcript.closed
    agreed = agreement(draft.raw_text, stream.current.raw_text) if complete else 0.0
    outcome.comparison.CopyFrom(Comparison(agreement=agreed))
    if complete:
        _keep_answer(outcome, draft)


def _keep_answer(outcome: Outcome, attempt: Row) -> None:
    """Keeps an answer unless the safety policy found something in it."""
    output = attempt.output
    if output is None or not (output.review().taken or output.echoes):
        outcome.weak_answer = ends(attempt.raw_text, TEXT_CHARS_MAX)
