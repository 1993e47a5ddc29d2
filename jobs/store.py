"""What jobs keep in JetStream: records, inputs in chunks, and the log of results of every pass.

| where | what | written by |
|---|---|---|
| bucket ``SLUICE_JOBS``, ``<job>`` | ``JobRecord`` | the API and the owner, each over the revision that it read |
| bucket ``SLUICE_JOBS``, ``upload.<upload>`` | ``UploadRecord`` | whoever receives the file |
| ``sluice.job_inputs.<upload>.<chunk>`` | bytes, or ``MessageChunk`` | the same, or the owner of the job |
| ``sluice.job_results.<job>.<stage>.<round>`` | ``JobSegment`` | the owner, each behind the last one it knows |
"""

import logging
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Final, TypeVar

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import Header
from nats.js.errors import APIError, NotFoundError

from sluice.errors import (
    InvalidRequest,
    JobUnknown,
    StorageFull,
    TransportUnavailable,
    UploadUnknown,
)
from sluice.internal.v1.job_pb2 import JobRecord, JobSegment, MessageChunk, UploadRecord
from sluice.settings import JobsSettings
from sluice.wire import jetstream, subjects
from sluice.wire.bucket import Bucket
from sluice.wire.codec import MalformedMessage, pack, unpack

ANSWER_S: Final = 5.0
"""Longest wait for JetStream, seconds."""
APPEND_S: Final = 1.5
"""The limit of a segment, seconds; it may be written again: a nats-server that ends takes its answer along."""
RETRY_AFTER_S: Final = 1.0
CHUNK_BYTES: Final = 512 * 1024
SEGMENT_BYTES_MAX: Final = 768 * 1024
"""A segment is closed at this size; with the largest outcome it still fits into a message."""
CHANGE_TRIES: Final = 20
_Record = TypeVar("_Record", JobRecord, UploadRecord)
_log = logging.getLogger(__name__)

_NO_STREAM: Final = 10059
_WRONG_SEQUENCE: Final = frozenset({10071, 10164})
_FULL: Final = frozenset({10023, 10047, 10077, 10122})
"""JetStream's codes for: insufficient resources, storage, maximum bytes of a stream, no space."""


class Fenced(Exception):
    """Somebody else has written behind the last segment that this process knows."""


class JobStore:
    """All of it. Methods raise TransportUnavailable while JetStream does not answer, StorageFull when it is full."""

    def __init__(self, settings: JobsSettings, replicas: int) -> None:
        self._replicas = replicas
        self._records = Bucket(jetstream.JOBS, replicas)
        self._streams = jetstream.job_streams(settings)
        self._jetstream: JetStreamContext | None = None

    async def start(self, client: Client) -> None:
        """Creates bucket and streams.

        Raises:
            nats.errors.Error: JetStream does not answer, or refuses them.
        """
        self._jetstream = client.jetstream(timeout=ANSWER_S)
        await self._records.start(client)
        for config in self._streams:
            await jetstream.ensure_stream(self._jetstream, config, self._replicas)

    async def restore(self) -> None:
        """Create what NATS has lost, empty; raises as `start`."""
        assert self._jetstream is not None, "started"
        await self._records.restore()
        for config in self._streams:
            await jetstream.restore_stream(self._jetstream, config, self._replicas)

    # Records.

    async def create(self, record: JobRecord) -> bool:
        """Whether the job is new; else there is one with its id."""
        return await self.write(record, 0) is not None

    async def read(self, job: str) -> tuple[JobRecord, int]:
        """The record with its revision.

        Raises:
            JobUnknown: there is none, or it is damaged.
        """
        found = await self._records.read_payload(job) if subjects.is_token(job) else None
        record = None if found is None else read_record(JobRecord, job, found[0])
        if found is None or record is None:
            raise job_unknown(job)
        return record, found[1]

    async def write(self, record: JobRecord, revision: int) -> int | None:
        """The new revision, or None when the record has another one than ``revision`` by now."""
        return await self._records.write(record.job.id, record, revision)

    async def change(self, job: str, edit: Callable[[JobRecord], None]) -> JobRecord:
        """Edits the record as it is now; ``edit`` raises what refuses, and may be called several times.

        Raises:
            JobUnknown: there is none.
            TransportUnavailable: others write it again and again.
        """
        for _ in range(CHANGE_TRIES):
            record, revision = await self.read(job)
            edit(record)
            if await self.write(record, revision) is not None:
                return record
        raise _unavailable(f"others write job {job} at the same time")

    async def records(self) -> AsyncIterator[JobRecord]:
        """All jobs, in no order; damaged records are left out."""
        async for key, payload in self._records.read_payloads():
            if key.startswith("upload."):
                continue
            if (record := read_record(JobRecord, key, payload)) is not None:
                yield record

    async def uploads(self) -> AsyncIterator[tuple[str, UploadRecord]]:
        """All uploads by id, in no order."""
        async for key, payload in self._records.read_payloads():
            if not key.startswith("upload."):
                continue
            if (record := read_record(UploadRecord, key, payload)) is not None:
                yield key.removeprefix("upload."), record

    async def delete(self, job: str, upload: str) -> None:
        """Deletes a job with its results, and ``upload`` unless it is empty."""
        await self.delete_results(job)
        if upload:
            await self.delete_upload(upload)
        await self._records.purge(job)

    async def delete_results(self, job: str) -> None:
        """Deletes the results of a job."""
        await self._purge(subjects.JOB_RESULTS_STREAM, f"{subjects.JOB_RESULTS}.{job}.>")

    # Inputs.

    async def upload(self, upload: str) -> UploadRecord:
        """A complete upload.

        Raises:
            UploadUnknown: there is none, or its record is damaged.
        """
        key = f"upload.{upload}"
        found = await self._records.read_payload(key) if subjects.is_token(upload) else None
        record = None if found is None else read_record(UploadRecord, key, found[0])
        if record is None or not record.complete_unix_ms:
            raise upload_unknown(upload)
        return record

    async def write_upload(self, upload: str, record: UploadRecord) -> None:
        """Writes what is known of an upload."""
        await self._records.write(f"upload.{upload}", record)

    async def delete_upload(self, upload: str) -> None:
        """Deletes an upload with its chunks."""
        await self._purge(subjects.JOB_INPUTS_STREAM, f"{subjects.JOB_INPUTS}.{upload}.>")
        await self._records.purge(f"upload.{upload}")

    async def write_chunk(self, upload: str, number: int, chunk: bytes) -> None:
        """Stores the next chunk of an upload."""
        await self._publish(subjects.job_input(upload, number), chunk, {})

    async def read_chunk(self, upload: str, number: int) -> bytes:
        """A chunk of a complete upload.

        Raises:
            UploadUnknown: it was deleted.
        """
        stream, subject = subjects.JOB_INPUTS_STREAM, subjects.job_input(upload, number)
        found = await self._get(stream, subject, direct=True)
        if found is None:
            raise UploadUnknown(f"upload {upload} is gone")
        return found[0]

    # Messages of the operator's streams.

    async def read_messages(self, upload: str, number: int) -> MessageChunk | None:
        """A chunk of an input from NATS; None while there is none."""
        found = await self._get(subjects.JOB_INPUTS_STREAM, subjects.job_input(upload, number))
        return None if found is None else unpack(MessageChunk, found[0])

    async def write_messages(self, upload: str, number: int, chunk: MessageChunk) -> None:
        """Stores the next chunk of an input from NATS.

        Raises:
            Fenced: another process has stored one.
        """
        headers = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: "0"}
        await self._publish(subjects.job_input(upload, number), pack(chunk), headers)

    async def read_message(
        self, stream: str, subject: str, sequence: int
    ) -> tuple[bytes, int] | None:
        """The first message of ``subject`` at ``sequence`` or behind it, with its own; None while there is none.

        Raises:
            InvalidRequest: there is no such stream.
        """
        return await self._get(stream, subject, sequence)

    async def _get(
        self, stream: str, subject: str, sequence: int | None = None, *, direct: bool = False
    ) -> tuple[bytes, int] | None:
        """The last message of a subject, or the first at ``sequence`` or behind it, with its own.

        ``direct``: another server of a cluster may answer, with less than there is.
        """
        js, behind = self._js, sequence is not None
        try:
            found = await js.get_msg(stream, sequence, subject, direct=direct, next=behind)
        except NotFoundError as error:
            if error.err_code == _NO_STREAM:
                raise InvalidRequest.of(
                    "spec.input.nats_subject",
                    f"there is no stream {stream} in JetStream: create it, or mend jobs.input_streams",
                ) from None
            return None
        except (TimeoutError, NatsError) as error:
            what = f"stream {stream} does not answer ({type(error).__name__})"
            raise _unavailable(what) from error
        assert found.seq is not None, "stored messages have one"
        return found.data or b"", found.seq

    # Results.

    async def last_segment(self, job: str, stage: int, round_: int) -> tuple[JobSegment, int]:
        """The last segment of a pass with its sequence; an empty one and 0 when there is none."""
        found = await self._get(
            subjects.JOB_RESULTS_STREAM, subjects.job_results(job, stage, round_)
        )
        return (JobSegment(), 0) if found is None else (unpack(JobSegment, found[0]), found[1])

    async def append(
        self, job: str, stage: int, round_: int, segment: JobSegment, last: int
    ) -> int:
        """Appends a segment behind the one of sequence ``last``; returns its sequence.

        Raises:
            Fenced: another one is the last.
        """
        headers = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(last)}
        subject = subjects.job_results(job, stage, round_)
        return await self._publish(subject, pack(segment), headers, APPEND_S)

    async def segment_at(
        self, job: str, stage: int, round_: int, sequence: int
    ) -> tuple[JobSegment, int] | None:
        """The first segment of a pass at ``sequence`` or behind it, with its own; None when there is none."""
        stream, subject = subjects.JOB_RESULTS_STREAM, subjects.job_results(job, stage, round_)
        found = await self._get(stream, subject, sequence, direct=True)
        return None if found is None else (unpack(JobSegment, found[0]), found[1])

    async def _publish(
        self, subject: str, payload: bytes, headers: dict[str, str], timeout_s: float = ANSWER_S
    ) -> int:
        try:
            stored = await self._js.publish(subject, payload, timeout=timeout_s, headers=headers)
        except APIError as error:
            if error.err_code in _WRONG_SEQUENCE:
                raise Fenced(subject) from error
            if error.err_code in _FULL:
                raise StorageFull(
                    "the store of jobs is full: delete jobs that are over, or raise "
                    f"jobs.results_max_bytes or jobs.inputs_max_bytes ({error.description})"
                ) from error
            raise _unavailable(f"JetStream refuses: {error.description}") from error
        except (TimeoutError, NatsError) as error:
            raise _unavailable(f"JetStream does not answer ({type(error).__name__})") from error
        return stored.seq

    async def _purge(self, stream: str, subject: str) -> None:
        try:
            await self._js.purge_stream(stream, subject=subject)
        except (TimeoutError, NatsError) as error:
            raise _unavailable(f"JetStream does not answer ({type(error).__name__})") from error

    @property
    def _js(self) -> JetStreamContext:
        if self._jetstream is None:
            raise _unavailable("NATS is not connected")
        return self._jetstream


def read_record(kind: type[_Record], key: str, payload: bytes) -> _Record | None:
    """The record of ``key``; None, and a line in the log, when it is damaged: other jobs go on."""
    try:
        found = unpack(kind, payload)
    except MalformedMessage as error:
        _log.error("the record %s is damaged and left out: %s", key, error)
        return None
    if isinstance(found, JobRecord) and found.job.id != key:
        _log.error("the record %s is damaged and left out: it is of job %r", key, found.job.id)
        return None
    return found


def job_unknown(job: str) -> JobUnknown:
    """The error of a job that is not there, and of another tenant's."""
    return JobUnknown(f"there is no job {job!r}")


def upload_unknown(upload: str) -> UploadUnknown:
    """Return the error of an upload that is not there, and of another tenant's."""
    return UploadUnknown(f"there is no complete upload {upload!r}: send the file again")


def new_upload_id() -> str:
    """A name that no other upload has."""
    return f"upload-{secrets.token_hex(12)}"


def _unavailable(message: str) -> TransportUnavailable:
    return TransportUnavailable(
        f"what jobs keep cannot be read or written: {message}", retry_after_s=RETRY_AFTER_S
    )
