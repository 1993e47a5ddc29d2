"""The record of one request, filled in as its decisions fall. Plain code over the message that is kept."""

from collections.abc import Iterable, Mapping

from gateway.routing.plan import Candidate, Plan
from gateway.routing.router import ModelFacts
from gateway.routing.scores import Score
from gateway.safety.actions import Action
from gateway.safety.guards.checks import Decided, outcome_of
from gateway.streaming import leg as streams
from sluice.internal.v1.audit_pb2 import AuditDecision, AuditEntry
from sluice.internal.v1.frame_pb2 import BatchInfo
from sluice.v1.admin_pb2 import (
    GetAuditResponse,
    GuardCheck,
    Leg,
    RequestRecord,
    RouteCandidate,
    RouteRecord,
    RouterScore,
    SafetyDecision,
)
from sluice.v1.inference_pb2 import SAFETY_ACTION_UNSPECIFIED, Finished, SafetyAction

Counts = Mapping[tuple[str, Action], int]
"""Findings by rule and action."""


def add_decisions(record: RequestRecord, counts: Counts, *, in_answer: bool) -> None:
    """What the safety layer did about the prompt, or about the answer."""
    for rule, action, count in _sorted(counts):
        record.decisions.append(
            SafetyDecision(rule=rule, action=_value(action), count=count, in_answer=in_answer)
        )


def audit_decisions(counts: Counts, *, in_answer: bool) -> list[AuditDecision]:
    """The same for the audit, whose names do not depend on an enum."""
    return [
        AuditDecision(rule=rule, action=action.name.lower(), count=count, in_answer=in_answer)
        for rule, action, count in _sorted(counts)
    ]


def add_route(record: RequestRecord, plan: Plan) -> None:
    """How the model was chosen."""
    record.route.CopyFrom(
        RouteRecord(
            strategy=plan.strategy,
            reason=plan.reason,
            degraded=plan.degraded,
            candidates=[_candidate(one) for one in plan.candidates],
            versions=plan.versions,
            scores=[_score(one) for one in plan.scores],
        )
    )


def add_leg(record: RequestRecord, leg: streams.Leg, facts: ModelFacts) -> None:
    """A model's work on the request, and the batch that its row was sent in last."""
    answered = len(leg.transcript.token_ids)
    kept = Leg(
        model=leg.model,
        prompt_tokens=leg.prompt_tokens,
        completion_tokens=answered,
        cost=facts.cost(leg.prompt_tokens, answered),
        attempt=leg.assembler.attempt,
        handed_over=leg.handed_over,
        kept=leg.kept,
        unused=leg.unused,
        alone=leg.alone,
    )
    if leg.batch is not None:
        _add_batch(kept, leg.batch)
    record.legs.append(kept)


def add_guard(record: RequestRecord, decided: Decided) -> None:
    """What a guard model was asked, and what came of it."""
    check, name = decided.check, decided.check.guard.name
    record.guards.append(
        GuardCheck(
            guard=name,
            model=check.guard.settings.model,
            in_answer=check.in_answer,
            answer_tokens=check.tokens,
            outcomes=[outcome_of(rule, name) for rule, _ in decided.taken],
            action=_value(decided.action),
            score=decided.score,
            took_ms=decided.cost.took_ms,
            cost=decided.cost.cost,
        )
    )


def add_end(record: RequestRecord, finished: Finished) -> None:
    """The answer was complete."""
    record.finish_reason = finished.reason
    record.timings.CopyFrom(finished.timings)


def audit_response(entry: AuditEntry) -> GetAuditResponse:
    """An entry of the audit as operators see it: without text."""
    return GetAuditResponse(
        request_id=entry.request_id,
        tenant=entry.tenant,
        decided_unix_ms=entry.decided_unix_ms,
        policy=entry.policy,
        decisions=[_public(one) for one in entry.decisions],
        blocked=entry.blocked,
        governed_model=entry.governed_model,
        prompt_hmac=entry.prompt_hmac,
        with_text=bool(entry.turns),
    )


def _public(one: AuditDecision) -> SafetyDecision:
    action = getattr(Action, one.action.upper(), None)  # of a newer gateway: not known here
    value = SAFETY_ACTION_UNSPECIFIED if action is None else _value(action)
    return SafetyDecision(rule=one.rule, action=value, count=one.count, in_answer=one.in_answer)


def _value(action: Action) -> "SafetyAction.ValueType":
    return SafetyAction.Value(f"SAFETY_ACTION_{action.name}")


def _add_batch(leg: Leg, batch: BatchInfo) -> None:
    leg.worker = batch.worker
    leg.batch_id = batch.batch_id
    leg.batch_cause = batch.cause
    leg.batch_rows = batch.rows
    leg.padding_share = batch.padding_share
    leg.waited_ms = batch.waited_ms
    leg.longest_waited_ms = batch.longest_waited_ms


def _candidate(one: Candidate) -> RouteCandidate:
    return RouteCandidate(
        model=one.model,
        tier=one.tier,
        quality=one.quality,
        cost=one.cost,
        wait_ms=one.wait_s * 1e3,
        reason=one.reason,
    )


def _score(one: Score) -> RouterScore:
    return RouterScore(
        policy=one.by.policy,
        version=one.by.version,
        head=one.by.head,
        gain=one.gain,
        chances=one.chances,
    )


def _sorted(counts: Counts) -> Iterable[tuple[str, Action, int]]:
    ordered = sorted(counts.items(), key=lambda one: (one[0][0], one[0][1].name))
    return [(rule, action, count) for (rule, action), count in ordered]
