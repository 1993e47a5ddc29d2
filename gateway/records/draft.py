"""The record and the audit entry of one request while it runs; written once, when it has ended."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.records import record as records
from gateway.records.recorder import Recorder
from gateway.routing.plan import Plan
from gateway.routing.router import ModelFacts
from gateway.safety.actions import Action
from gateway.safety.answer import AnswerInspection
from gateway.safety.guards.checks import Checks
from gateway.safety.inspector import Verdict
from gateway.streaming.stream import Stream
from gateway.validation.requests import ValidRequest
from sluice.defaults import AUTO
from sluice.errors import SluiceError
from sluice.internal.v1.audit_pb2 import AuditEntry
from sluice.settings import RecordsSettings
from sluice.v1.admin_pb2 import RequestRecord, ShadowRun
from sluice.wire.clock import unix_ms

TEXT_BYTES_MAX: Final = 256 * 1024
"""Of the turns of one request in the audit; the rest is cut off."""


class Drafts:
    """Opens drafts; holds what all of them share."""

    def __init__(
        self,
        settings: RecordsSettings,
        recorder: Recorder,
        models: Mapping[str, ModelFacts],
        gateway_id: str,
    ) -> None:
        self.settings = settings
        self.recorder = recorder
        self.models = models
        self._gateway_id = gateway_id

    def open(self, request: ValidRequest, request_id: str, trace_id: str) -> "Draft":
        """The draft of a request that has just arrived."""
        record = RequestRecord(
            request_id=request_id,
            trace_id=trace_id,
            tenant=request.tenant,
            priority_class=request.priority_class,
            workload=request.workload,
            requested_model=request.model or AUTO,
            arrived_unix_ms=unix_ms(),
            gateway=self._gateway_id,
        )
        return Draft(self, record)


class Draft:
    """What is known of one request so far."""

    def __init__(self, shared: Drafts, record: RequestRecord) -> None:
        self._shared = shared
        self._record = record
        self._entry: AuditEntry | None = None

    @property
    def request_id(self) -> str:
        """The request."""
        return self._record.request_id

    def inspected(
        self, policy: str, verdict: Verdict, came: Sequence[str], seen: Sequence[str]
    ) -> None:
        """What the safety layer decided about the turns as they ``came``; the model would see ``seen``."""
        record = self._record
        record.policy = policy
        records.add_decisions(record, verdict.taken, in_answer=False)
        self._entry = AuditEntry(
            request_id=record.request_id,
            tenant=record.tenant,
            policy=policy,
            decisions=records.audit_decisions(verdict.taken, in_answer=False),
            blocked=bool(verdict.blocked),
            governed_model="" if verdict.route is None else verdict.route.model or "",
            prompt_hmac=_hmac(self._shared.settings.audit_key, came),
        )
        if record.tenant in self._shared.settings.audit_text_tenants:
            self._entry.turns.extend(_cut(seen))

    def planned(self, plan: Plan) -> None:
        """Who shall answer."""
        records.add_route(self._record, plan)

    def failed(self, error: SluiceError) -> None:
        """The request ended before it had a stream."""
        self._record.error_reason = error.reason
        self._write()

    def ended(self, stream: Stream) -> None:
        """The stream of the request ended."""
        for leg in stream.legs:
            records.add_leg(self._record, leg, self._shared.models[leg.model])
        if stream.ticket.guards is not None:
            self._guarded(stream.ticket.guards.checks)
        if stream.finished is not None:
            records.add_end(self._record, stream.finished)
            self._answered(stream.leg.answer)
        elif stream.error is not None:
            self._record.error_reason = stream.error.reason
        self._write()

    def shadowed(self, run: ShadowRun) -> None:
        """A shadow was asked, or dropped, after the request had ended."""
        self._record.shadows.append(run)
        self._shared.recorder.keep(self._record)

    def _guarded(self, checks: Checks) -> None:
        for decided in checks.decided:
            records.add_guard(self._record, decided)
        for in_answer in (False, True):
            counts = checks.counts(in_answer=in_answer)
            records.add_decisions(self._record, counts, in_answer=in_answer)
            if self._entry is not None:
                found = records.audit_decisions(counts, in_answer=in_answer)
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
        records.add_decisions(self._record, taken, in_answer=True)
        if self._entry is not None:
            self._entry.decisions.extend(records.audit_decisions(taken, in_answer=True))

    def _write(self) -> None:
        self._shared.recorder.keep(self._record)
        if self._entry is not None and self._entry.decisions:
            self._entry.decided_unix_ms = unix_ms()
            self._shared.recorder.audit(self._entry)


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
