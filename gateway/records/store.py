"""Writes records and audit entries to JetStream beside the answers, and reads records back.

What waits to be written is bounded: where JetStream cannot follow, the newest are dropped and counted, and no answer
ever waits for its record. A grade is the exception: who sends one is told when it is stored.
"""

import asyncio
import logging
from contextlib import suppress
from itertools import count, islice
from typing import Final

from google.protobuf.message import Message
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext

from gateway.records.outcome_store import OutcomeStore
from gateway.records.stored import MIB, away, ensure, last
from sluice.errors import RecordUnknown
from sluice.internal.v1.audit_pb2 import AuditEntry
from sluice.internal.v1.outcome_pb2 import Outcome
from sluice.settings import RecordsSettings
from sluice.v1.admin_pb2 import ExplainResponse, Grade, RequestRecord, RouterDriftEvent
from sluice.wire import jetstream, subjects
from sluice.wire.codec import MAX_MESSAGE_BYTES, pack, unpack

_log = logging.getLogger(__name__)

WAITING_MAX: Final = 8192
"""Messages that may wait to be written."""
TOGETHER_MAX: Final = 64
"""Messages that are written at once."""
WRITE_S: Final = 5.0
_RETRY_S: Final = 1.0


class RecordStore:
    """The one writer of `SLUICE_RECORDS`, `SLUICE_AUDIT`, `SLUICE_OUTCOMES` and `SLUICE_EVENTS` in this process.

    Attributes:
        outcomes: reads what is written of outcomes.
        dropped: messages that found no room.
    """

    def __init__(self, settings: RecordsSettings, outcomes: OutcomeStore) -> None:
        self.outcomes = outcomes
        self._settings = settings
        self._waiting: dict[str, tuple[str, bytes]] = {}
        """Subject and payload, in order; what has the same name as one that still waits takes its place."""
        self._numbers = count()
        self._news = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._js: JetStreamContext | None = None
        self.dropped = 0

    async def start(self, client: Client) -> None:
        """Creates the streams, or gives them the configured limits.

        Raises:
            nats.errors.Error: JetStream does not answer, or refuses the limits.
        """
        self._js = client.jetstream()
        kept = self._settings
        await ensure(self._js, jetstream.events_stream())
        if kept.enabled:
            limits = kept.max_mib * MIB, kept.max_age_h * 3600
            await ensure(self._js, jetstream.records_stream(*limits))
        if kept.audit_enabled:
            limits = kept.audit_max_mib * MIB, kept.audit_max_age_h * 3600
            await ensure(self._js, jetstream.audit_stream(*limits))
        await self.outcomes.start(self._js)

    def keep(self, record: RequestRecord) -> None:
        """Will write ``record``, in place of an earlier one of the same request."""
        if self._settings.enabled:
            subject = subjects.record(record.request_id)
            self._put(subject, record, subject)

    def audit(self, entry: AuditEntry) -> None:
        """Will append ``entry``."""
        if self._settings.audit_enabled:
            self._put(subjects.audit(entry.tenant, entry.request_id), entry)

    def outcome(self, outcome: Outcome) -> None:
        """Will write ``outcome``, in place of an earlier one of the same request."""
        subject = subjects.outcome(outcome.tenant, outcome.request_id)
        self._put(subject, outcome, subject)

    def announce(self, event: RouterDriftEvent) -> None:
        """Will tell operators of ``event``."""
        self._put(subjects.ROUTER_DRIFT, event)

    async def grade(self, request_id: str, grade: Grade) -> RequestRecord:
        """Stores ``grade``, with the record and with the outcome; returns when it is stored, with the record.

        Outcomes may be kept longer: of a record that is gone request and tenant are left.

        Raises:
            RecordUnknown: nothing is kept of the request.
            TransportUnavailable: JetStream does not answer.
        """
        record = await self._record_of(request_id)
        stored = [subjects.grade(request_id)] if self._settings.enabled else []
        if self.outcomes.keeps(record.tenant):
            stored.append(subjects.outcome_grade(record.tenant, request_id))
        assert self._js is not None, "started"
        try:
            for subject in stored:
                await self._js.publish(subject, pack(grade), timeout=WRITE_S)
        except (TimeoutError, NatsError) as error:
            raise away(error) from error
        return record

    async def find(self, request_id: str) -> ExplainResponse:
        """What is kept of a request.

        Raises:
            RecordUnknown: nothing.
            TransportUnavailable: JetStream does not answer.
        """
        record = unpack(RequestRecord, await self._last(subjects.record(request_id)))
        response = ExplainResponse(record=record)
        with suppress(RecordUnknown):  # nobody has graded it
            response.grade.CopyFrom(unpack(Grade, await self._last(subjects.grade(request_id))))
        return response

    async def audited(self, request_id: str) -> AuditEntry:
        """The audit entry of a request.

        Raises:
            RecordUnknown: there is none.
            TransportUnavailable: JetStream does not answer.
        """
        if not self._settings.audit_enabled:
            raise RecordUnknown("the audit is switched off: see records.audit_enabled")
        subject = subjects.audit_of_any(request_id)
        # Not direct: only the stream itself can look for a subject of which the tenant is not known.
        data = await self._message(subjects.AUDIT_STREAM, subject, direct=False)
        return unpack(AuditEntry, data)

    async def run(self) -> None:
        """Writes until it is cancelled."""
        while True:
            await self._news.wait()
            while self._waiting:
                try:
                    await self._write()
                except Exception:  # the task would die, and nobody would notice
                    _log.exception("records were not written")
            self._news.clear()
            self._empty.set()

    async def flush(self, limit_s: float) -> None:
        """Returns when nothing waits any more, or after ``limit_s`` seconds; `run` must be running."""
        try:
            async with asyncio.timeout(limit_s):
                await self._empty.wait()
        except TimeoutError:
            _log.warning("%d records were not written", len(self._waiting))

    def _put(self, subject: str, message: Message, name: str = "") -> None:
        """Without a ``name`` it takes nothing's place."""
        payload, name = message.SerializeToString(), name or f"{next(self._numbers)}"
        full = len(self._waiting) >= WAITING_MAX and name not in self._waiting
        if full or len(payload) > MAX_MESSAGE_BYTES:
            self._drop()
            return
        self._waiting[name] = subject, payload
        self._empty.clear()
        self._news.set()

    def _drop(self) -> None:
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # 1, 2, 4, 8 ...: a flood does not fill the log
            _log.warning(
                "%d records dropped: too large, or JetStream does not follow", self.dropped
            )

    async def _write(self) -> None:
        """Writes some of what waits; what failed waits again, in its place, unless there is something newer."""
        assert self._js is not None, "started"
        some = list(islice(self._waiting.items(), TOGETHER_MAX))
        for name, _ in some:
            del self._waiting[name]
        sent = await asyncio.gather(
            *(self._js.publish(*message, timeout=WRITE_S) for _, message in some),
            return_exceptions=True,
        )
        failed = [one for one, result in zip(some, sent, strict=True) if _is_failure(result)]
        if failed:
            self._waiting = {**dict(failed), **self._waiting}
            await asyncio.sleep(_RETRY_S)

    async def _record_of(self, request_id: str) -> RequestRecord:
        """What is left of a record; raises as `grade`."""
        try:
            return unpack(RequestRecord, await self._last(subjects.record(request_id)))
        except RecordUnknown:
            outcome = await self.outcomes.find(request_id)
            if outcome is None:
                raise
            return RequestRecord(request_id=request_id, tenant=outcome.tenant)

    async def _last(self, subject: str) -> bytes:
        if not self._settings.enabled:
            raise RecordUnknown("records are switched off: see records.enabled")
        return await self._message(subjects.RECORDS_STREAM, subject, direct=True)

    async def _message(self, stream: str, subject: str, *, direct: bool) -> bytes:
        assert self._js is not None, "started"
        found = await last(self._js, stream, subject, direct=direct)
        if found is None:
            raise RecordUnknown(
                "nothing is kept of this request: it is too old, unknown, or still running"
            )
        return found


def _is_failure(result: object) -> bool:
    if not isinstance(result, BaseException):
        return False
    if not isinstance(result, TimeoutError | NatsError):
        raise result
    return True
