"""Makes the record and the audit entry of a request from its log.

The record is written when the request has ended. The audit entry is written if the policy has found something in the
prompt, and at the end again if guard models have decided, or the answer has findings.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.records.store import RecordStore
from gateway.routing.router import price_of
from gateway.safety.findings import Action
from gateway.safety.guards.checks import PASSED, Decided, outcome_of
from gateway.safety.guards.families import GuardFailure
from gateway.streaming.model_run import ModelRun
from gateway.telemetry.request_log import RequestLog
from sluice.defaults import AUTO
from sluice.internal.v1.audit_pb2 import AuditDecision, AuditEntry
from sluice.settings import RecordsSettings
from sluice.v1 import admin_pb2 as pb
from sluice.v1.inference_pb2 import Priority
from sluice.v1.safety_pb2 import SAFETY_ACTION_UNSPECIFIED, SafetyAction
from sluice.wire.clock import duration, set_duration, timestamp, unix_ms
from sluice.wire.enums import value_of

TEXT_BYTES_MAX: Final = 256 * 1024
"""Longest text of one request in the audit, in bytes; the rest is cut off."""


@dataclass(frozen=True)
class RequestRecords:
    """Writes records and audit entries.

    Attributes:
        settings: What is recorded.
        store: Where it is written.
        gateway_id: The gateway that the requests came to.
        currency: The currency of costs.
    """

    settings: RecordsSettings
    store: RecordStore
    gateway_id: str
    currency: str

    def decided(self, log: RequestLog) -> None:
        """Queue the audit entry of what rules or guards have decided about a prompt, or later about the answer."""
        self.store.append_audit(self._entry(log))

    def ended(self, log: RequestLog) -> pb.RequestRecord:
        """Queue the record of a request that has ended, or of which a shadow has, and return it even if dropped."""
        record = self._record(log)
        self.store.write_record(record)
        return record

    def _record(self, log: RequestLog) -> pb.RequestRecord:
        request = log.request
        assert request is not None, "only valid requests leave a record"
        record = pb.RequestRecord(
            request_id=log.request_id,
            trace_id=log.trace_id,
            tenant=request.tenant,
            priority=value_of(Priority, request.priority_class),
            workload=request.workload,
            requested_model=request.model or AUTO,
            arrival_time=timestamp(log.arrived_unix_ms),
            gateway=self.gateway_id,
            currency=self.currency,
            operation=log.operation,
            policy=log.policy,
            answer_key=log.answer_key,
            error_reason=log.error,
            route=None if log.plan is None else log.plan.record(),
            attempts=self._attempts(log),
            guards=[_guard(decided) for decided in (*log.checks, *_decided(log))],
            decisions=[
                pb.SafetyDecision(rule=rule, action=_action_value(action), count=n, in_answer=where)
                for rule, action, n, where in _decisions(log)
            ],
            shadows=log.shadows,
        )
        if (finished := log.finished) is not None:
            record.finish_reason = finished.reason
            record.timings.CopyFrom(finished.timings)
            record.cached = finished.usage.cached
        return record

    def _attempts(self, log: RequestLog) -> list[pb.ModelAttempt]:
        """Return each model's work on the request; all runs of a request about texts are one."""
        runs = log.runs or ()
        if not log.operation or not runs:
            return [self._attempt(run) for run in runs]
        total, billed = self._attempt(runs[-1]), sum(run.billed_tokens[0] for run in runs)
        total.rows, total.prompt_tokens = len(runs), billed
        total.cost = price_of(runs[-1].settings, billed, 0)
        return [total]

    def _attempt(self, row: ModelRun) -> pb.ModelAttempt:
        """Return a model's work on the request, with the batch that its run was sent in last."""
        attempt = pb.ModelAttempt(
            model=row.model,
            prompt_tokens=row.prompt_tokens,
            completion_tokens=row.completion_tokens,
            resumed_tokens=min(row.resumed, row.completion_tokens),
            cost=row.cost,
            attempt=row.attempt_number,
            escalation_reason=row.escalation_reason,
            kept_reason=row.kept_reason,
            hint_tokens=row.hint_tokens,
            hint_dropped=row.hint_dropped,
        )
        if row.expected_s:
            set_duration(attempt.expected_time, row.expected_s * 1000)
        counted = row.server_tokens
        if counted is not None:
            attempt.server_prompt_tokens = counted.prompt_tokens
            attempt.server_completion_tokens = counted.completion_tokens
        if row.final is not None and row.final.HasField("batch"):
            batch = row.final.batch
            attempt.worker = batch.worker
            attempt.batch_id = batch.batch_id
            attempt.batch_cause = batch.cause
            attempt.batch_rows = batch.tasks
            attempt.padding_share = batch.padding_share
            set_duration(attempt.queue_wait, batch.waited_ms)
            set_duration(attempt.queue_wait_max, batch.longest_waited_ms)
        return attempt

    def _entry(self, log: RequestLog) -> AuditEntry:
        """Return the decisions about a request. Actions are named, so that entries outlive the enum."""
        request = log.request
        assert request is not None, "only valid requests are inspected"
        entry = AuditEntry(
            request_id=log.request_id,
            tenant=request.tenant,
            policy=log.policy,
            blocked=log.blocked,
            governed_model=log.governed_model,
            decisions=[
                AuditDecision(rule=rule, action=action.name.lower(), count=n, in_answer=where)
                for rule, action, n, where in _decisions(log)
            ],
            decided_unix_ms=unix_ms(),
        )
        for decided in _decided(log):  # guards decide about the prompt as a whole
            if not decided.check.in_answer:
                entry.blocked |= decided.action is Action.BLOCK
                if decided.action is Action.ROUTE:
                    entry.governed_model = decided.check.guard.settings.action.model or ""
        if self.settings.audit_key is not None:
            entry.prompt_hmac = _hmac(self.settings.audit_key, request.conversation.texts)
        if request.tenant in self.settings.audit_text_tenants:
            entry.turns.extend(_cut(log.seen))
        return entry


def _decided(log: RequestLog) -> Sequence[Decided]:
    """Return what guard models decided."""
    return () if log.guards is None else log.guards.decided


def _decisions(log: RequestLog) -> list[tuple[str, Action, int, bool]]:
    """Return (rule, action, count, whether it is about the answer) of all findings.

    First rules and guards about the prompt, then guards and rules about the answer; each sorted by rule.
    """
    counts = [(log.findings, False)]
    if log.guards is not None:
        counts += [(log.guards.counts(in_answer=where), where) for where in (False, True)]
    counts.append((log.answer_findings, True))
    return [
        (rule, action, count, in_answer)
        for by_rule, in_answer in counts
        for (rule, action), count in sorted(by_rule.items(), key=lambda item: item[0])
    ]


def _guard(decided: Decided) -> pb.GuardCheck:
    check, name = decided.check, decided.check.guard.name
    words = [outcome_of(rule, name) for rule, _ in decided.actions]
    failure = next((word for word in words if word in set(GuardFailure)), "")
    categories = [] if failure else [word for word in words if word != PASSED]
    verdict = pb.GUARD_OUTCOME_FLAGGED if categories else pb.GUARD_OUTCOME_PASSED
    return pb.GuardCheck(
        guard=name,
        model=check.guard.settings.model,
        in_answer=check.in_answer,
        answer_tokens=check.tokens,
        outcome=pb.GUARD_OUTCOME_NO_VERDICT if failure else verdict,
        categories=categories,
        failure=failure,
        action=_action_value(decided.action),
        score=decided.score,
        duration=duration(decided.cost.took_ms),
        cost=decided.cost.cost,
    )


def _hmac(key: str, turns: Sequence[str]) -> bytes:
    digest = hmac.new(key.encode(), digestmod=hashlib.sha256)
    for turn in turns:
        data = turn.encode(errors="surrogatepass")
        digest.update(len(data).to_bytes(8, "big"))  # no two lists of turns are the same bytes
        digest.update(data)
    return digest.digest()


def _cut(turns: Sequence[str]) -> list[str]:
    """Return the turns, cut to `TEXT_BYTES_MAX` in all, in whole characters."""
    texts, room = [], TEXT_BYTES_MAX
    for turn in turns:
        data = turn.encode(errors="replace")[:room]
        texts.append(data.decode(errors="ignore"))
        room -= len(data)
    return texts


def audit_response(entry: AuditEntry) -> pb.GetAuditEntryResponse:
    """Return an entry of the audit without its text."""
    return pb.GetAuditEntryResponse(
        request_id=entry.request_id,
        tenant=entry.tenant,
        decision_time=timestamp(entry.decided_unix_ms),
        policy=entry.policy,
        decisions=[_public(decision) for decision in entry.decisions],
        blocked=entry.blocked,
        governed_model=entry.governed_model,
        prompt_hmac=entry.prompt_hmac,
        with_text=bool(entry.turns),
    )


def _public(decision: AuditDecision) -> pb.SafetyDecision:
    action = getattr(Action, decision.action.upper(), None)  # a newer gateway may know more actions
    value = SAFETY_ACTION_UNSPECIFIED if action is None else _action_value(action)
    return pb.SafetyDecision(
        rule=decision.rule, action=value, count=decision.count, in_answer=decision.in_answer
    )


def _action_value(action: Action) -> "SafetyAction.ValueType":
    return value_of(SafetyAction, action.name)
