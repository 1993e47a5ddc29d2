"""Builds the record and the audit entry of a request while it runs.

The record is written when the request has ended; the audit when the prompt has been decided, and once more when the
answer has brought other decisions.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.records.store import RecordStore
from gateway.routing.plan import Plan
from gateway.safety.actions import Action
from gateway.safety.guards.checks import PASSED, Checks, Decided, outcome_of
from gateway.safety.guards.families import Failure
from gateway.safety.inspector import PromptVerdict
from gateway.streaming.answer import Answer
from gateway.streaming.row import Row
from gateway.validation.requests import ValidRequest
from sluice.defaults import AUTO
from sluice.internal.v1.audit_pb2 import AuditDecision, AuditEntry
from sluice.settings import RecordsSettings
from sluice.v1 import admin_pb2 as pb
from sluice.v1.inference_pb2 import (
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    Finished,
    Priority,
    RouteStrategy,
    Timings,
    Usage,
)
from sluice.v1.safety_pb2 import SAFETY_ACTION_UNSPECIFIED, SafetyAction
from sluice.wire.clock import duration, timestamp, unix_ms
from sluice.wire.enums import value_of

TEXT_BYTES_MAX: Final = 256 * 1024
"""Of the turns of one request in the audit; the rest is cut off."""


@dataclass(frozen=True)
class RecordContext:
    """What all records of a gateway share."""

    settings: RecordsSettings
    store: RecordStore
    gateway_id: str
    currency: str


class RecordBuilder:
    """The record and the audit entry of one request, filled in as decisions are made."""

    def __init__(
        self,
        shared: RecordContext,
        request: ValidRequest,
        request_id: str,
        trace_id: str,
        operation: str = "",
    ) -> None:
        """Of a request that has just arrived."""
        self._shared = shared
        self._record = pb.RequestRecord(
            request_id=request_id,
            trace_id=trace_id,
            tenant=request.tenant,
            priority=value_of(Priority, request.priority_class),
            workload=request.workload,
            requested_model=request.model or AUTO,
            arrival_time=timestamp(unix_ms()),
            gateway=shared.gateway_id,
            currency=shared.currency,
            operation=operation,
        )
        self._entry = AuditEntry(request_id=request_id, tenant=request.tenant)

    @property
    def record(self) -> pb.RequestRecord:
        """The record so far; read-only."""
        return self._record

    def add_inspection(
        self,
        policy: str,
        verdict: PromptVerdict,
        original: Sequence[str],
        seen: Sequence[str],
        checks: Sequence[Decided] = (),
    ) -> None:
        """The decisions of the safety rules about the ``original`` turns; a model would see ``seen``.

        ``checks``: of the token classifiers whose findings were decided with those of the rules.

        Raises:
            TransportUnavailable: they cannot be recorded now.
        """
        self._shared.store.check_audit()
        record, entry, settings = self._record, self._entry, self._shared.settings
        record.policy = entry.policy = policy
        for one in checks:
            self._add_guard(one)
        self._add_decisions(verdict.taken, in_answer=False)
        entry.blocked = bool(verdict.blocked)
        entry.governed_model = "" if verdict.route is None else verdict.route.model or ""
        if settings.audit_key is not None:
            entry.prompt_hmac = _hmac(settings.audit_key, original)
        if record.tenant in settings.audit_text_tenants:
            entry.turns.extend(_cut(seen))
        if entry.decisions:
            self._append_audit()

    def add_plan(self, plan: Plan) -> None:
        """The routing decision; replaces an earlier one."""
        self._record.route.CopyFrom(
            pb.RouteRecord(
                strategy=value_of(RouteStrategy, plan.strategy),
                reason=plan.reason,
                degraded=plan.degraded,
                candidates=[
                    pb.RouteCandidate(
                        model=one.model,
                        tier=one.tier,
                        quality=one.quality,
                        cost=one.cost,
                        expected_wait=duration(one.wait_s * 1e3),
                        reason=one.reason,
                    )
                    for one in plan.candidates
                ],
                versions=plan.versions,
                scores=[
                    pb.RouterScore(
                        policy=one.by.policy,
                        version=one.by.version,
                        head=value_of(pb.RouterHead, one.by.head),
                        gain=one.gain,
                        chances=one.chances,
                    )
                    for one in plan.scores
                ],
            )
        )

    def keep_answer(self, key: str) -> None:
        """The answer is kept, or was found, under ``key``."""
        self._record.answer_key = key

    def finish(self, finished: Finished | None = None, error: str = "") -> None:
        """The request ended as ``finished``, or with an error of that reason."""
        if finished is not None:
            self._record.finish_reason = finished.reason
            self._record.timings.CopyFrom(finished.timings)
            self._record.cached = finished.usage.cached
        self._record.error_reason = error
        self._shared.store.write_record(self._record)

    def finish_rows(self, attempts: Sequence[Row], timings: Timings, error: str) -> None:
        """All rows of a request about texts have ended; ``error`` is the reason of the one that failed it."""
        if attempts:
            self._add_attempt(attempts[-1])
            total, billed = self._record.attempts[0], [one.billed_tokens[0] for one in attempts]
            total.rows, total.prompt_tokens = len(attempts), sum(billed)
            total.cost = attempts[-1].facts.cost(sum(billed), 0)
        reason = FINISH_REASON_UNSPECIFIED if error else FINISH_REASON_STOP
        cached = not attempts and not error
        self.finish(Finished(reason=reason, timings=timings, usage=Usage(cached=cached)), error)

    def finish_stream(self, stream: Answer) -> None:
        """The stream of the request ended."""
        decided = len(self._entry.decisions)
        for attempt in stream.attempts:
            self._add_attempt(attempt)
        if stream.guards is not None:
            self._add_guards(stream.guards.checks)
        if stream.finished is not None and stream.current.inspection is not None:
            self._add_decisions(stream.current.inspection.outcome().taken, in_answer=True)
        self.finish(stream.finished, "" if stream.error is None else stream.error.reason)
        if len(self._entry.decisions) > decided:
            self._append_audit()

    def add_shadow(self, run: pb.ShadowRun) -> None:
        """A shadow answered, or was dropped, after the request had ended."""
        self._record.shadows.append(run)
        self._shared.store.write_record(self._record)

    def _add_decisions(self, taken: Mapping[tuple[str, Action], int], *, in_answer: bool) -> None:
        """Counts by rule and action. The audit holds names of actions, which do not depend on an enum."""
        ordered = sorted(taken.items(), key=lambda one: (one[0][0], one[0][1].name))
        for (rule, action), count in ordered:
            self._record.decisions.add(
                rule=rule, action=_action_value(action), count=count, in_answer=in_answer
            )
            self._entry.decisions.add(
                rule=rule, action=action.name.lower(), count=count, in_answer=in_answer
            )

    def _add_attempt(self, attempt: Row) -> None:
        """A model's work on the request, and the batch that its row was sent in last."""
        kept = self._record.attempts.add(
            model=attempt.model,
            prompt_tokens=attempt.prompt_tokens,
            completion_tokens=attempt.completion_tokens,
            resumed_tokens=attempt.usage.resumed_tokens,
            cost=attempt.cost,
            attempt=attempt.assembler.attempt,
            escalation_reason=attempt.escalation_reason,
            kept_reason=attempt.kept_reason,
        )
        counted = attempt.server_tokens
        if counted is not None:
            kept.server_prompt_tokens = counted.prompt_tokens
            kept.server_completion_tokens = counted.completion_tokens
        batch = attempt.batch
        if batch is not None:
            kept.worker = batch.worker
            kept.batch_id = batch.batch_id
            kept.batch_cause = batch.cause
            kept.batch_rows = batch.rows
            kept.padding_share = batch.padding_share
            kept.queue_wait.CopyFrom(duration(batch.waited_ms))
            kept.queue_wait_max.CopyFrom(duration(batch.longest_waited_ms))

    def _add_guards(self, checks: Checks) -> None:
        """The checks of guard models, and what they decided about the prompt as a whole."""
        for one in checks.decided:
            self._add_guard(one)
            if not one.check.in_answer:
                self._entry.blocked |= one.action is Action.BLOCK
                if one.action is Action.ROUTE:
                    self._entry.governed_model = one.check.guard.settings.action.model or ""
        for in_answer in (False, True):
            self._add_decisions(checks.counts(in_answer=in_answer), in_answer=in_answer)

    def _add_guard(self, decided: Decided) -> None:
        check, name = decided.check, decided.check.guard.name
        words = [outcome_of(rule, name) for rule, _ in decided.taken]
        failure = next((word for word in words if word in set(Failure)), "")
        categories = [] if failure else [word for word in words if word != PASSED]
        verdict = pb.GUARD_OUTCOME_FLAGGED if categories else pb.GUARD_OUTCOME_PASSED
        self._record.guards.add(
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

    def _append_audit(self) -> None:
        self._entry.decided_unix_ms = unix_ms()
        self._shared.store.append_audit(self._entry)


def _hmac(key: str, turns: Sequence[str]) -> bytes:
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


def audit_response(entry: AuditEntry) -> pb.GetAuditEntryResponse:
    """An entry of the audit without its text."""
    return pb.GetAuditEntryResponse(
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


def _public(one: AuditDecision) -> pb.SafetyDecision:
    action = getattr(Action, one.action.upper(), None)  # an unknown action is of a newer gateway
    value = SAFETY_ACTION_UNSPECIFIED if action is None else _action_value(action)
    return pb.SafetyDecision(rule=one.rule, action=value, count=one.count, in_answer=one.in_answer)


def _action_value(action: Action) -> "SafetyAction.ValueType":
    return value_of(SafetyAction, action.name)
