"""Store records, audit entries and outcomes in JetStream, and read them back.

They are written in the background. While JetStream is too slow, records are dropped and counted. Audit entries have a
queue of their own and are never dropped: requests are refused instead (`BackgroundWriter.is_full`). A grade is
confirmed only once it is stored. Prompts are returned only of tenants that opt in now (routing.outcomes.tenants).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Final, TypeVar

from google.protobuf.message import Message
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from nats.js.errors import APIError, NotFoundError

from gateway.records.outcome import response_of
from gateway.records.shares import TenantShares
from gateway.records.writer import QUEUE_MAX_BYTES, WRITE_S, BackgroundWriter
from sluice.errors import OutcomesNotKept, RecordUnknown
from sluice.internal.v1.audit_pb2 import AuditEntry
from sluice.internal.v1.outcome_pb2 import Outcome
from sluice.internal.v1.task_pb2 import Task
from sluice.settings import RecordsSettings, Settings
from sluice.settings.routing import OutcomeSettings
from sluice.v1 import admin_pb2 as pb
from sluice.wire import jetstream, subjects
from sluice.wire.codec import MAX_MESSAGE_BYTES, MalformedMessage, pack, unpack
from sluice.wire.jetstream import answering

M = TypeVar("M", bound=Message)

logger = logging.getLogger(__name__)

READ_S: Final = 2.0
"""Timeout of a read, in seconds."""
TRACE_REQUESTS_MAX: Final = 1000
"""Most requests of one trace that are read, because a caller can send any number with one trace id."""
TRACE_OTHERS_MAX: Final = 100
"""Most other requests of a trace that are named beside the latest."""
COALESCE_S: Final = 0.1
"""How long records are coalesced before a write, in seconds: each write costs as much CPU as routing a request."""
_UNAVAILABLE: Final = "stored records cannot be read or written"
_MIB: Final = 1024 * 1024


class RecordStore:
    """The owner of the streams `SLUICE_RECORDS`, `SLUICE_AUDIT` and `SLUICE_OUTCOMES` in this process.

    Methods that read, grade or forget raise TransportUnavailable when JetStream does not answer.

    Attributes:
        audit_writer: Writer of audit entries.
        dropped: Number of records and outcomes that were dropped.
    """

    def __init__(
        self,
        settings: RecordsSettings,
        in_force: Callable[[], Settings],
        replicas: int = 1,
        queue_max_bytes: int = QUEUE_MAX_BYTES,
    ) -> None:
        """Prepare the store; `in_force` returns the current settings of policies."""
        self.dropped = 0
        self._replicas = replicas
        self._in_force = in_force
        self._writer = BackgroundWriter(COALESCE_S, queue_max_bytes)
        self.audit_writer = BackgroundWriter(max_bytes=queue_max_bytes)
        self._streams: dict[str | None, StreamConfig] = {}
        """Streams that exist, by name."""
        self._settings = settings
        self._records_share = TenantShares(
            subjects.RECORDS_STREAM,
            partial(subjects.record, subjects.ANY, subjects.ANY),
            settings.tenant_share * settings.max_mib * _MIB,
        )
        self._audit_share = TenantShares(
            subjects.AUDIT_STREAM,
            partial(subjects.audit, request=subjects.ANY),
            settings.tenant_share * settings.audit_max_mib * _MIB,
        )
        self._client: Client | None = None

    async def start(self, client: Client) -> None:
        """Create the streams, or update their limits.

        Raises:
            nats.errors.Error: JetStream does not answer, or refuses the limits.
        """
        self._client = client
        settings = self._settings
        if settings.enabled:
            await self._ensure(jetstream.records_stream, settings.max_mib, settings.max_age_h)
        if settings.audit_enabled:
            mib, age_h = settings.audit_max_mib, settings.audit_max_age_h
            await self._ensure(jetstream.audit_stream, mib, age_h)
        await self.ensure_outcomes(self._in_force().routing.outcomes)

    async def ensure_outcomes(self, settings: OutcomeSettings) -> None:
        """Create the stream of outcomes if a tenant opts in; raise as `start`."""
        if settings.tenants:
            await self._ensure(jetstream.outcomes_stream, settings.max_mib, settings.max_age_h)

    async def _ensure(
        self, config_of: Callable[[int, float], StreamConfig], max_mib: int, max_age_h: float
    ) -> None:
        config = config_of(max_mib * _MIB, max_age_h * 3600)
        await jetstream.ensure_stream(self._js, config, self._replicas)
        self._streams[config.name] = config

    async def restore(self) -> None:
        """Create streams again that NATS has lost; raise as `start`."""
        for config in (*self._streams.values(), jetstream.DEAD_LETTERS):
            await jetstream.ensure_stream(self._js, config, self._replicas, update=False)

    async def run(self) -> None:
        """Write queued messages, and trim what exceeds a tenant's share, until cancelled."""
        assert self._client is not None, "started"
        writers = self._writer.run(self._client), self.audit_writer.run(self._client)
        shares = self._records_share.keep(self._js), self._audit_share.keep(self._js)
        await asyncio.gather(*writers, *shares)

    async def flush(self, limit_s: float) -> None:
        """Wait until all is written, at most `limit_s` seconds; `run` must be running."""
        await asyncio.gather(self._writer.flush(limit_s), self.audit_writer.flush(limit_s))

    def write_record(self, record: pb.RequestRecord) -> None:
        """Queue a record, which replaces an earlier one of the same request."""
        if self._settings.enabled:
            subject = subjects.record(record.request_id, record.trace_id, record.tenant)
            if self._put(subject, record, record.tenant):
                self._records_share.count(record.tenant, subject, record.ByteSize())

    def append_audit(self, entry: AuditEntry) -> None:
        """Queue an audit entry even if the queue is full; it must include any earlier one of the same request."""
        if self._settings.audit_enabled:
            subject = subjects.audit(entry.tenant, entry.request_id)
            payload = entry.SerializeToString()
            self.audit_writer.put(subject, payload, self._in_force().retention_s(entry.tenant))
            self._audit_share.count(entry.tenant, subject, len(payload))

    def write_outcome(self, outcome: Outcome) -> None:
        """Queue an outcome, which replaces an earlier one of the same request."""
        subject = subjects.outcome(outcome.tenant, outcome.request_id)
        self._put(subject, outcome, outcome.tenant)

    async def grade(self, request_id: str, grade: pb.Grade, tenant: str | None) -> pb.RequestRecord:
        """Store the grade of a request of `tenant` (None for any), and return the record.

        The grade is stored beside the record and beside the outcome. Outcomes may be kept longer; if only the outcome
        is left, the returned record has only the request id and the tenant.

        Raises:
            RecordUnknown: Neither is stored, or the request is of another tenant.
        """
        record = await self._record_of(request_id)
        _check_tenant(record.tenant, tenant)
        grade_subjects = [subjects.grade(request_id)] if self._settings.enabled else []
        if record.tenant in self._in_force().routing.outcomes.tenants:
            grade_subjects.append(subjects.outcome_grade(record.tenant, request_id))
        keep_s = self._in_force().retention_s(record.tenant)
        with answering(_UNAVAILABLE):
            for subject in grade_subjects:
                await self._js.publish(subject, pack(grade), timeout=WRITE_S, msg_ttl=keep_s)
        return record

    async def explain(self, request_id: str, tenant: str | None) -> pb.GetRequestRecordResponse:
        """Return the record and the grade of a request of `tenant` (None for any).

        Raises:
            RecordUnknown: There is no record, or the request is of another tenant.
        """
        record = await self._request_record(request_id)
        _check_tenant(record.tenant, tenant)
        response = pb.GetRequestRecordResponse(record=record)
        with suppress(RecordUnknown):  # it has no grade
            subject = subjects.grade(request_id)
            grade = await self._last(pb.Grade, subjects.RECORDS_STREAM, subject, direct=True)
            response.grade.CopyFrom(grade)
        return response

    async def explain_trace(self, trace_id: str, tenant: str | None) -> pb.GetRequestRecordResponse:
        """Return record and grade of the latest request in a trace, and the ids of the others.

        Raises:
            RecordUnknown: There is no record of a request of `tenant`.
        """
        arrivals = dict[str, int]()
        subject = subjects.record(subjects.ANY, trace_id, subjects.ANY)
        async with aclosing(self._read(subject, subjects.RECORDS_STREAM)) as messages:
            async for message in messages:
                record = unpack(pb.RequestRecord, message.data)
                if tenant in (None, record.tenant):
                    arrivals[record.request_id] = record.arrival_time.ToNanoseconds()
                # A caller can send any number of requests with one trace id.
                if len(arrivals) == TRACE_REQUESTS_MAX:
                    break
        if not arrivals:
            raise _unknown()
        *others, latest = sorted(arrivals, key=arrivals.__getitem__)
        response = await self.explain(latest, tenant)
        response.other_request_ids.extend(others[-TRACE_OTHERS_MAX:])
        return response

    async def audit_entry(self, request_id: str, tenant: str | None) -> AuditEntry:
        """Return the audit entry of a request of `tenant` (None for any); raise RecordUnknown if there is none."""
        if not self._settings.audit_enabled:
            raise RecordUnknown("the audit is disabled; set records.audit_max_mib")
        subject = subjects.audit(tenant or subjects.ANY, request_id)
        return await self._last(AuditEntry, subjects.AUDIT_STREAM, subject)

    async def list_outcomes(
        self, tenants: Sequence[str], since_unix_ms: float
    ) -> AsyncGenerator[pb.StreamOutcomesResponse, None]:
        """Yield the outcomes of `tenants` (empty for all) that have a label, tenant by tenant.

        Raises:
            OutcomesNotKept: No tenant opts in, or one of `tenants` does not.
        """
        opted_in = self._in_force().routing.outcomes.tenants
        others = [tenant for tenant in tenants if tenant not in opted_in]
        # Say so instead of listing nothing: the operator would wait for outcomes.
        if others or not opted_in:
            who = others[0] if others else "any tenant"
            raise OutcomesNotKept(
                f"no outcomes are kept of {who}; name tenants that opt in under routing.outcomes.tenants"
            )
        for tenant in dict.fromkeys(tenants or opted_in):
            grades = {
                message.subject.split(".")[-2]: unpack(pb.Grade, message.data).grade
                async for message in self._read(subjects.outcome_grade(tenant, subjects.ANY))
            }
            async for message in self._read(subjects.outcome(tenant, subjects.ANY)):
                outcome = unpack(Outcome, message.data)
                response = response_of(outcome, grades.get(outcome.request_id))
                if response is not None and outcome.answered_unix_ms >= since_unix_ms:
                    yield response

    def _put(self, subject: str, message: Message, tenant: str) -> bool:
        """Queue a message; return False if it is dropped."""
        payload = message.SerializeToString()
        if not self._writer.is_full and len(payload) <= MAX_MESSAGE_BYTES:
            self._writer.put(subject, payload, self._in_force().retention_s(tenant))
            return True
        self.dropped += 1
        # Logged at 1, 2, 4, 8 ...: a flood does not fill the log.
        if self.dropped.bit_count() == 1:
            logger.warning("dropped %d records: too large, or JetStream is too slow", self.dropped)
        return False

    @property
    def _js(self) -> JetStreamContext:
        assert self._client is not None, "started"
        return self._client.jetstream()

    async def _record_of(self, request_id: str) -> pb.RequestRecord:
        """Return the record of a request, or what its outcome tells of it; raise as `grade`."""
        try:
            return await self._request_record(request_id)
        except RecordUnknown:
            tenants = self._in_force().routing.outcomes.tenants
            subject = subjects.outcome(subjects.ANY, request_id)
            with suppress(RecordUnknown):
                if tenants:
                    outcome = await self._last(Outcome, subjects.OUTCOMES_STREAM, subject)
                    if outcome.tenant in tenants:
                        return pb.RequestRecord(request_id=request_id, tenant=outcome.tenant)
            raise

    async def _request_record(self, request_id: str) -> pb.RequestRecord:
        if not self._settings.enabled:
            raise RecordUnknown("records are disabled; set records.max_mib")
        subject = subjects.record(request_id, subjects.ANY, subjects.ANY)
        return await self._last(pb.RequestRecord, subjects.RECORDS_STREAM, subject)

    async def _last(self, kind: type[M], stream: str, subject: str, *, direct: bool = False) -> M:
        """Return the last message of a subject; raise RecordUnknown if there is none.

        A `direct` read is cheaper, but does not support wildcards in the subject.
        """
        with answering(_UNAVAILABLE):
            try:
                async with asyncio.timeout(READ_S):
                    message = await self._js.get_last_msg(stream, subject, direct=direct)
            except NotFoundError:
                raise _unknown() from None
        return unpack(kind, message.data or b"")

    async def forget(self, tenant: str) -> pb.ForgetTenantResponse:
        """Delete records, audit entries, outcomes and dead letters of `tenant`; return the number of each."""
        dead = [
            message.metadata.sequence.stream
            async for message in self._read(
                f"{subjects.DEAD_LETTERS}.>", subjects.DEAD_LETTERS_STREAM
            )
            if _tenant_of_task(message.data) == tenant
        ]
        of_tenant = subjects.record(subjects.ANY, subjects.ANY, tenant)
        records = {
            unpack(pb.RequestRecord, message.data).request_id
            async for message in self._read(of_tenant, subjects.RECORDS_STREAM)
        }
        # All are found before the first is deleted, so that a failure leaves nothing half read.
        for sequence in dead:
            with answering(_UNAVAILABLE), suppress(APIError):  # it is gone
                await self._js.delete_msg(subjects.DEAD_LETTERS_STREAM, sequence)
        for request_id in records:
            await self._purge(subjects.RECORDS_STREAM, subjects.all_of_record(request_id))
        outcomes = await self._purge(subjects.OUTCOMES_STREAM, subjects.all_outcomes_of(tenant))
        audit = await self._purge(subjects.AUDIT_STREAM, subjects.audit(tenant, subjects.ANY))
        return pb.ForgetTenantResponse(
            records=len(records),
            audit_entries=audit,
            outcomes=outcomes,
            dead_letters=len(dead),
        )

    async def _purge(self, stream: str, subject: str) -> int:
        """Purge a subject; return the number of messages, 0 if there is no such stream."""
        with answering(_UNAVAILABLE), suppress(NotFoundError):
            before = (await self._js.stream_info(stream)).state.messages
            await self._js.purge_stream(stream, subject=subject)
            return before - (await self._js.stream_info(stream)).state.messages
        return 0

    async def _read(
        self, subject: str, stream: str = subjects.OUTCOMES_STREAM
    ) -> AsyncGenerator[Msg, None]:
        """Yield all messages of a subject, which may have wildcards; none if there is no such stream."""
        messages = jetstream.stored_messages(self._js, stream, subject, READ_S)
        with answering(_UNAVAILABLE), suppress(NotFoundError):
            async with aclosing(messages):
                async for message in messages:
                    yield message


def _check_tenant(owner: str, tenant: str | None) -> None:
    """Raise RecordUnknown for the request of another tenant, as if it did not exist."""
    if tenant is not None and owner != tenant:
        raise _unknown()


def _tenant_of_task(payload: bytes) -> str:
    """Return the tenant of a dead letter; empty if its payload is invalid or was left out."""
    try:
        return unpack(Task, payload).tenant
    except MalformedMessage:
        return ""


def _unknown() -> RecordUnknown:
    return RecordUnknown(
        "there is no record of this request: it is too old, unknown, or still running"
    )
