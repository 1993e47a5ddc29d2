"""What jobs store in JetStream: records, inputs in chunks, and the logs of results.

| where | what | written by |
|---|---|---|
| bucket `SLUICE_JOBS`, `<job>` | `JobRecord` | any jobs process, over the revision that it read |
| bucket `SLUICE_JOBS`, `upload.<upload>` | `UploadRecord` | whoever receives the file or copies messages |
| `sluice.job_inputs.<upload>.<chunk>` | bytes, or `MessageChunk` | the same |
| `sluice.job_results.<job>.<stage>.<attempt>` | `JobSegment` | the owner or closer, behind the last one it knows |
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

from sluice import errors
from sluice.internal.v1.job_pb2 import JobRecord, JobSegment, MessageChunk, UploadRecord
from sluice.settings import JobsSettings
from sluice.wire import jetstream, subjects
from sluice.wire.bucket import Bucket
from sluice.wire.codec import MalformedMessage, pack, unpack

ANSWER_S: Final = 5.0
"""Timeout of a call to JetStream, in seconds; `Bucket` has its own for records."""
APPEND_S: Final = 1.5
"""Timeout of writing a segment, in seconds; it may be written again: a nats-server that ends loses
its answer."""
RETRY_AFTER_S: Final = 1.0
"""Pause before a call to JetStream is tried again, in seconds."""
CHUNK_BYTES: Final = 512 * 1024
"""Bytes of a chunk of an input."""
SEGMENT_BYTES_MAX: Final = 768 * 1024
"""Size at which a segment is closed; with the largest outcome it still fits into a message."""
UPLOAD: Final = "upload."
"""Prefix of the keys of uploads, which share the bucket with jobs."""
CHANGE_TRIES: Final = 20
"""Tries to change a record that others write at the same time."""
_Record = TypeVar("_Record", JobRecord, UploadRecord)
logger = logging.getLogger(__name__)

_NO_STREAM: Final = 10059
_WRONG_SEQUENCE: Final = frozenset({10071, 10164})
_FULL: Final = frozenset({10023, 10047, 10077, 10122})
"""JetStream's codes for: insufficient resources, storage, maximum bytes of a stream, no space."""


class Fenced(Exception):
    """Another process has claimed the job, or has written its next segment or chunk first; or the job is gone."""


class JobStore:
    """The store. Methods raise TransportUnavailable while JetStream does not respond, or refuses a write.

    When a stream is full, those that write chunks or segments raise StorageFull. Those that read segments or chunks
    of messages raise MalformedMessage for a damaged one.
    """

    def __init__(self, settings: JobsSettings, replicas: int) -> None:
        self._replicas = replicas
        self._records = Bucket(jetstream.JOBS, replicas)
        self._streams = jetstream.job_streams(settings)
        self.jetstream: JetStreamContext | None = None

    async def start(self, client: Client) -> None:
        """Create the bucket and the streams.

        Raises:
            nats.errors.Error: JetStream does not respond, or refuses them.
        """
        self.jetstream = client.jetstream(timeout=ANSWER_S)
        await self._records.start(client)
        for config in self._streams:
            await jetstream.ensure_stream(self.jetstream, config, self._replicas)

    async def restore(self) -> None:
        """Create again, empty, what NATS has lost; raises as `start`."""
        await self._records.restore()
        for config in self._streams:
            await jetstream.ensure_stream(self._js, config, self._replicas, update=False)

    # Records.

    async def create(self, record: JobRecord) -> bool:
        """Create a job; return False if there is one with its id."""
        return await self.write(record, 0) is not None

    async def read(self, job: str) -> tuple[JobRecord, int]:
        """Return a record with its revision.

        Raises:
            JobUnknown: there is none, or it is damaged.
        """
        stored = await self._records.read_payload(job) if subjects.is_token(job) else None
        record = None if stored is None else read_record(JobRecord, job, stored[0])
        if stored is None or record is None:
            raise job_unknown(job)
        return record, stored[1]

    async def write(self, record: JobRecord, revision: int) -> int | None:
        """Write a record; return the new revision, or None if it no longer has `revision`."""
        return await self._records.write(record.job.id, record, revision)

    async def change(self, job: str, edit: Callable[[JobRecord], None]) -> JobRecord:
        """Edit a record as it is now; `edit` raises to refuse, and may be called several times.

        Raises:
            JobUnknown: there is none, or it is damaged.
            TransportUnavailable: others write it again and again.
        """
        for _ in range(CHANGE_TRIES):
            record, revision = await self.read(job)
            edit(record)
            if await self.write(record, revision) is not None:
                return record
        raise _unavailable(f"job {job} is written by others at the same time")

    async def records(self) -> AsyncIterator[JobRecord]:
        """Yield all jobs in no order; damaged records are left out."""
        async for key, payload in self._records.read_payloads():
            if not key.startswith(UPLOAD) and (record := read_record(JobRecord, key, payload)):
                yield record

    async def uploads(self) -> AsyncIterator[tuple[str, UploadRecord]]:
        """Yield all uploads with their ids, complete or not, in no order; damaged records are left out."""
        async for key, payload in self._records.read_payloads():
            if key.startswith(UPLOAD) and (record := read_record(UploadRecord, key, payload)):
                yield key.removeprefix(UPLOAD), record

    async def delete(self, job: str, upload: str) -> None:
        """Delete a job with its results, and `upload` unless it is empty."""
        await self.delete_results(job)
        if upload:
            await self.delete_upload(upload)
        await self._records.purge(job)

    async def delete_results(self, job: str) -> None:
        """Delete the results of a job."""
        await self._purge(subjects.JOB_RESULTS_STREAM, f"{subjects.JOB_RESULTS}.{job}.>")

    # Inputs.

    async def upload(self, upload: str) -> UploadRecord:
        """Return a complete upload.

        Raises:
            UploadUnknown: there is none, or its record is damaged.
        """
        key = f"{UPLOAD}{upload}"
        stored = await self._records.read_payload(key) if subjects.is_token(upload) else None
        record = None if stored is None else read_record(UploadRecord, key, stored[0])
        if record is None or not record.complete_unix_ms:
            raise upload_unknown(upload)
        return record

    async def write_upload(self, upload: str, record: UploadRecord) -> None:
        """Write the record of an upload."""
        await self._records.write(f"{UPLOAD}{upload}", record)

    async def delete_upload(self, upload: str) -> None:
        """Delete an upload with its chunks."""
        await self._purge(subjects.JOB_INPUTS_STREAM, f"{subjects.JOB_INPUTS}.{upload}.>")
        await self._records.purge(f"{UPLOAD}{upload}")

    async def write_chunk(self, upload: str, number: int, chunk: bytes) -> None:
        """Store the next chunk of an upload."""
        await self._publish(subjects.job_input(upload, number), chunk, {})

    async def read_chunk(self, upload: str, number: int) -> bytes:
        """Return a chunk of a complete upload.

        Raises:
            UploadUnknown: it was deleted.
        """
        stream, subject = subjects.JOB_INPUTS_STREAM, subjects.job_input(upload, number)
        stored = await self.read_message(stream, subject, direct=True)
        if stored is None:
            raise errors.UploadUnknown(f"upload {upload} was deleted")
        return stored[0]

    # Messages of the operator's streams.

    async def read_messages(self, upload: str, number: int) -> MessageChunk | None:
        """Return a chunk of an input from NATS; None if there is none yet."""
        stream, subject = subjects.JOB_INPUTS_STREAM, subjects.job_input(upload, number)
        stored = await self.read_message(stream, subject)
        return None if stored is None else unpack(MessageChunk, stored[0])

    async def write_messages(self, upload: str, number: int, chunk: MessageChunk) -> None:
        """Store the next chunk of an input from NATS.

        Raises:
            Fenced: another process has stored one.
        """
        headers = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: "0"}
        await self._publish(subjects.job_input(upload, number), pack(chunk), headers)

    async def read_message(
        self, stream: str, subject: str, sequence: int | None = None, *, direct: bool = False
    ) -> tuple[bytes, int] | None:
        """Return the last message of a subject, or the first at or after `sequence`, with its sequence.

        `direct`: another server of a cluster may answer, whose copy may be behind.

        Raises:
            InvalidRequest: there is no such stream.
        """
        js, behind = self._js, sequence is not None
        try:
            stored = await js.get_msg(stream, sequence, subject, direct=direct, next=behind)
        except NotFoundError as error:
            if error.err_code == _NO_STREAM:
                raise errors.InvalidRequest.of(
                    "spec.input.nats_subject",
                    f"no stream {stream} in JetStream; create it, or correct jobs.input_streams",
                ) from None
            return None
        except (TimeoutError, NatsError) as error:
            raise _no_response(error) from error
        assert stored.seq is not None, "stored messages have one"
        return stored.data or b"", stored.seq

    # Results.

    async def last_segment(self, job: str, stage: int, attempt: int) -> tuple[JobSegment, int]:
        """Return the last segment of an attempt with its sequence; an empty one and 0 if there is none."""
        stream, subject = subjects.JOB_RESULTS_STREAM, subjects.job_results(job, stage, attempt)
        stored = await self.read_message(stream, subject)
        return (JobSegment(), 0) if stored is None else (unpack(JobSegment, stored[0]), stored[1])

    async def append(
        self, job: str, stage: int, attempt: int, segment: JobSegment, last: int
    ) -> int:
        """Append a segment behind the one of sequence `last`; return its sequence.

        Raises:
            Fenced: another one is the last.
        """
        headers = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(last)}
        subject = subjects.job_results(job, stage, attempt)
        return await self._publish(subject, pack(segment), headers, APPEND_S)

    async def segment_at(
        self, job: str, stage: int, attempt: int, sequence: int
    ) -> tuple[JobSegment, int] | None:
        """Return the first segment of an attempt at or after `sequence`, with its sequence; None if there is none."""
        stream, subject = subjects.JOB_RESULTS_STREAM, subjects.job_results(job, stage, attempt)
        stored = await self.read_message(stream, subject, sequence, direct=True)
        return None if stored is None else (unpack(JobSegment, stored[0]), stored[1])

    async def _publish(
        self, subject: str, payload: bytes, headers: dict[str, str], timeout_s: float = ANSWER_S
    ) -> int:
        try:
            stored = await self._js.publish(subject, payload, timeout=timeout_s, headers=headers)
        except APIError as error:
            if error.err_code in _WRONG_SEQUENCE:
                raise Fenced(subject) from error
            if error.err_code in _FULL:
                raise errors.StorageFull(
                    "the jobs store is full; delete ended jobs, or raise "
                    f"jobs.results_max_bytes or jobs.inputs_max_bytes ({error.description})"
                ) from error
            raise _unavailable(f"JetStream refused a write: {error.description}") from error
        except (TimeoutError, NatsError) as error:
            raise _no_response(error) from error
        return stored.seq

    async def _purge(self, stream: str, subject: str) -> None:
        try:
            await self._js.purge_stream(stream, subject=subject)
        except (TimeoutError, NatsError) as error:
            raise _no_response(error) from error

    @property
    def _js(self) -> JetStreamContext:
        if self.jetstream is None:
            raise _unavailable("NATS is not connected")
        return self.jetstream


def read_record(kind: type[_Record], key: str, payload: bytes) -> _Record | None:
    """Return the record of a key; None, with a log line, if it is damaged: other jobs continue."""
    try:
        stored = unpack(kind, payload)
    except MalformedMessage as error:
        logger.error("ignored damaged record %s: %s", key, error)
        return None
    if isinstance(stored, JobRecord) and stored.job.id != key:
        logger.error("ignored damaged record %s: it has the id of job %r", key, stored.job.id)
        return None
    return stored


def job_unknown(job: str) -> errors.JobUnknown:
    """Return the error of a job that does not exist, or is of another tenant."""
    return errors.JobUnknown(f"no job {job!r}")


def upload_unknown(upload: str) -> errors.UploadUnknown:
    """Return the error of an upload that does not exist, or is of another tenant."""
    return errors.UploadUnknown(f"no complete upload {upload!r}; send the file again")


def new_upload_id() -> str:
    """Return a unique name of an upload."""
    return f"upload-{secrets.token_hex(12)}"


def _no_response(error: Exception) -> errors.TransportUnavailable:
    return _unavailable(f"no response from JetStream ({type(error).__name__})")


def _unavailable(message: str) -> errors.TransportUnavailable:
    return errors.TransportUnavailable(f"the jobs store is unavailable: {message}")
