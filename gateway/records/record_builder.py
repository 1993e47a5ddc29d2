"""The record and the audit entry of one request while it runs; written once, when it has ended."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from gateway.records.store import RecordStore
from gateway.routing.plan import Candidate, Plan
from gateway.routing.prediction import HeadScore
from gateway.routing.router import ModelFacts
from gateway.safety.actions import Action
from gateway.safety.guards.checks import Checks, Decided, outcome_of
from gateway.safety.inspector import AnswerInspection, PromptVerdict
from gateway.streaming import leg as streams
from gateway.streaming.stream import Stream
from gateway.validation.requests import ValidRequest
from sluice.defaults import AUTO
from sluice.errors import SluiceError
from sluice.internal.v1.audit_pb2 import AuditDecision, AuditEntry
from sluice.internal.v1.frame_pb2 import BatchInfo
from sluice.settings import RecordsSettings
from sluice.v1.admin_pb2 import (
    GetAuditResponse,
    GuardCheck,
    Leg,
    RequestRecord,
    RouteCandidate,
    RouteRecord,
    RouterScore,
    SafetyDecision,
    ShadowRun,
)
from sluice.v1.inference_pb2 import SAFETY_ACTION_UNSPECIFIED, Finished, SafetyAction
from sluice.wire.clock import duration, timestamp, unix_ms

TEXT_BYTES_MAX: Final = 256 * 1024
"""Of the turns of one request in the audit; the rest is cut off."""

Counts = Mapping[tuple[str, Action], int]
"""Findings by rule and action."""


class RecordBuilders:
    """Opens drafts; holds what all of them share."""

    def __init__(
        self,
        settings: RecordsSettings,
        store: RecordStore,
        models: Mapping[str, ModelFacts],
        gateway_id: str,
    ) -> None:
        self.settings = settings
        self.store = store
        self.models = models
        self._gateway_id = gateway_id

    def open(self, request: ValidRequest, request_id: str, trace_id: str) -> "RecordBuilder":
        """The draft of a request that has just arrived."""
        record = RequestRecord(
            request_id=request_id,
            trace_id=trace_id,
            tenant=request.tenant,
            priority_class=request.priority_class,
            workload=request.workload,
            requested_model=request.model or AUTO,
            arrival_time=timestamp(unix_ms()),
            gateway=self._gateway_id,
        )
        return RecordBuilder(self, record)


class RecordBuilder:
    """What is known of one request so far."""

    def __init__(self, shared: RecordBuilders, record: RequestRecord) -> None:
        self._shared = shared
        self._record = record
        self._entry: AuditEntry | None = None

    @property
    def request_id(self) -> str:
        """The request."""
        return self._record.request_id

    def add_inspection(
        self, policy: str, verdict: PromptVerdict, came: Sequence[str], seen: Sequence[str]
    ) -> None:
        """What the safety layer decided about the turns as they ``came``; the model would see ``seen``."""
        record = self._record
        record.policy = policy
        _add_decisions(record, verdict.taken, in_answer=False)
        self._entry = AuditEntry(
            request_id=record.request_id,
            tenant=record.tenant,
            policy=policy,
            decisions=_audit_decisions(verdict.taken, in_answer=False),
            blocked=bool(verdict.blocked),
            governed_model="" if verdict.route is None else verdict.route.model or "",
            prompt_hmac=_hmac(self._shared.settings.audit_key, came),
        )
        if record.tenant in self._shared.settings.audit_text_tenants:
            self._entry.turns.extend(_cut(seen))

    def add_plan(self, plan: Plan) -> None:
        """Who shall answer."""
        _add_route(self._record, plan)

    def finish_with_error(self, error: SluiceError) -> None:
        """The request ended before it had a stream."""
        self._record.error_reason = error.reason
        self._write()

    def finish(self, stream: Stream) -> None:
        """The stream of the request ended."""
        for leg in stream.legs:
            _add_leg(self._record, leg, self._shared.models[leg.model])
        if stream.ticket.guards is not None:
            self._guarded(stream.ticket.guards.checks)
        if stream.finished is not None:
            _add_end(self._record, stream.finished)
            self._answered(stream.leg.answer)
        elif stream.error is not None:
            self._record.error_reason = stream.error.reason
        self._write()

    def add_shadow(self, run: ShadowRun) -> None:
        """A shadow was asked, or dropped, after the request had ended."""
        self._record.shadows.append(run)
        self._shared.store.write_record(self._record)

    def _guarded(self, checks: Checks) -> None:
        for decided in checks.decided:
            _add_guard(self._record, decided)
        for in_answer in (False, True):
            counts = checks.counts(in_answer=in_answer)
            _add_decisions(self._record, counts, in_answer=in_answer)
            if self._entry is not None:
                found = _audit_decisions(counts, in_answer=in_answer)
                self._entry.decisions.extend(found)
        self._judged(checks)

    def _judged(self, checks: Checks) -> None:
        """What guards decided about the prompt as a whole."""
        if self._entry is None:
            return
        prompt = [one for one in checks.decided if not one.check.in_answer]
        self._entry.blocked |= any(one.action is Action.BLOCK for one in prompt)
        for one in prompt:
            if one.action is Action.ROUTE:
                self._entry.governed_model = one.check.guard.settings.action.model or ""

    def _answered(self, answer: AnswerInspection | None) -> None:
        if answer is None:
            return
        taken = answer.outcome().taken
        _add_decisions(self._record, taken, in_answer=True)
        if self._entry is not None:
            self._entry.decisions.extend(_audit_decisions(taken, in_answer=True))

    def _write(self) -> None:
        self._shared.store.write_record(self._record)
        if self._entry is not None and self._entry.decisions:
            self._entry.decided_unix_ms = unix_ms()
            self._shared.store.append_audit(self._entry)


def _hmac(key: str | None, turns: Sequence[str]) -> bytes:
    if key is None:
        return b""
    digest = hmac.new(key.encode(), digestmod=hashlib.sha256)
    for turn in turns:
        data = turn.encode(errors="surrogatepass")
        digest.update(len(data).to_bytes(8, "big"))  # no two lists of turns are the same bytes
        digest.update(data)
    return digest.digest()


def _cut(turns: Sequence[str]) -> list[str]:
    """The turns, `TEXT_BYTES_MAX` in all; cut in whole characters."""
    kept, room = [], TEXT_BYTES_MAX
    for turn in turns:
        data = turn.encode(errors="replace")[:room]
        kept.append(data.decode(errors="ignore"))
        room -= len(data)
    return kept


def _add_decisions(record: RequestRecord, counts: Counts, *, in_answer: bool) -> None:
    """What the safety layer did about the prompt, or about the answer."""
    for rule, action, count in _sorted(counts):
        record.decisions.append(
            SafetyDecision(rule=rule, action=_value(action), count=count, in_answer=in_answer)
        )


def _audit_decisions(counts: Counts, *, in_answer: bool) -> list[AuditDecision]:
    """The same for the audit, whose names do not depend on an enum."""
    return [
        AuditDecision(rule=rule, action=action.name.lower(), count=count, in_answer=in_answer)
        for rule, action, count in _sorted(counts)
    ]


def _add_route(record: RequestRecord, plan: Plan) -> None:
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


def _add_leg(record: RequestRecord, leg: streams.Leg, facts: ModelFacts) -> None:
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


def _add_guard(record: RequestRecord, decided: Decided) -> None:
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
            duration=duration(decided.cost.took_ms),
            cost=decided.cost.cost,
        )
    )


def _add_end(record: RequestRecord, finished: Finished) -> None:
    """The answer was complete."""
    record.finish_reason = finished.reason
    record.timings.CopyFrom(finished.timings)


def audit_response(entry: AuditEntry) -> GetAuditResponse:
    """An entry of the audit as operators see it: without text."""
    return GetAuditResponse(
        request_id=entry.request_id,
        tenant=entry.tenant,
        decision_time=timestamp(entry.decided_unix_ms),
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
    leg.queue_wait.CopyFrom(duration(batch.waited_ms))
    leg.queue_wait_max.CopyFrom(duration(batch.longest_waited_ms))


def _candidate(one: Candidate) -> RouteCandidate:
    return RouteCandidate(
        model=one.model,
        tier=one.tier,
        quality=one.quality,
        cost=one.cost,
        expected_wait=duration(one.wait_s * 1e3),
        reason=one.reason,
    )


def _score(one: HeadScore) -> RouterScore:
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
