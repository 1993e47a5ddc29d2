"""Files on their way into the store: what a caller sends, and what the service reads itself."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import PurePosixPath
from typing import Final, TypeVar
from urllib.parse import urlsplit

from jobs import webhooks
from jobs.core.retry import ItemRetryPolicy
from jobs.outbound import Outbound, check_url, read_url
from jobs.quotas import Quotas
from jobs.store import CHUNK_BYTES, JobStore, new_upload_id
from jobs.threads import JobThreads
from sluice.errors import InvalidRequest, TransportUnavailable
from sluice.internal.v1.job_pb2 import UploadRecord
from sluice.settings import JobsSettings
from sluice.v1 import jobs_pb2
from sluice.v1.jobs_pb2 import JobInput, JobSpec
from sluice.wire.clock import unix_ms
from sluice.wire.subjects import covers, is_pattern

TENANT: Final = "{tenant}"
"""Placeholder for the tenant of the job in what the operator lists."""
CALL_S: Final = 30.0
"""Timeout of a webhook, or of the resolution of its name, in seconds."""
RETRY_AFTER_S: Final = 5.0
"""Retry delay in the error of such a timeout, in seconds."""
FETCH_RETRIES: Final = ItemRetryPolicy(retries=5)
"""Retries of an input URL that cannot be reached; then the job is paused."""
SUBJECT: Final = "spec.input.nats_subject"
_LINES: Final = (
    jobs_pb2.JOB_INPUT_FORMAT_UNSPECIFIED,
    jobs_pb2.JOB_INPUT_FORMAT_OPENAI,
    jobs_pb2.JOB_INPUT_FORMAT_JSONL,
)
_T = TypeVar("_T")


class NewUpload:
    """A file that is being stored, in chunks of one size; see `new_upload`.

    Attributes:
        id: its name.
        record: its record so far.
    """

    def __init__(self, store: JobStore, tenant: str, quotas: Quotas) -> None:
        self._quotas = quotas
        self.id = new_upload_id()
        self.record = UploadRecord(tenant=tenant, create_unix_ms=unix_ms())
        self._store = store
        self._held = bytearray()
        self._digest = hashlib.sha256()

    async def add(self, data: bytes) -> None:
        """Store the next bytes."""
        self._quotas.check_inputs(self.record.tenant)
        self._digest.update(data)
        self._held += data
        # Chunks have one size, however the caller cut the file.
        while len(self._held) >= CHUNK_BYTES:
            await self._write()

    async def complete(self) -> None:
        """Store the rest and mark the upload as complete."""
        while self._held:
            await self._write()
        self.record.sha256 = self._digest.digest()
        self.record.complete_unix_ms = unix_ms()
        await self._store.write_upload(self.id, self.record)
        self._quotas.upload(self.id, self.record)

    async def _write(self) -> None:
        chunk = bytes(self._held[:CHUNK_BYTES])
        await self._store.write_chunk(self.id, self.record.chunks, chunk)
        del self._held[:CHUNK_BYTES]
        self.record.chunks += 1
        self.record.size_bytes += len(chunk)
        self._quotas.upload(self.id, self.record)


@asynccontextmanager
async def new_upload(store: JobStore, tenant: str, quotas: Quotas) -> AsyncIterator[NewUpload]:
    """Begin to store a file; nothing is left of it if the block fails.

    Raises LimitReached and StorageFull, as methods of the file do, if the tenant has used its quota.
    """
    quotas.check_upload(tenant)
    upload = NewUpload(store, tenant, quotas)
    quotas.upload(upload.id, upload.record)
    try:
        await store.write_upload(upload.id, upload.record)
        yield upload
    except BaseException:
        quotas.upload(upload.id, None)
        await asyncio.shield(store.delete_upload(upload.id))
        raise


class ExternalAccess:
    """What jobs may reach outside of the mesh, as the operator lists it.

    Attributes:
        reading: threads for inputs, including those at URLs.
    """

    def __init__(self, settings: JobsSettings) -> None:
        self._settings = settings
        self._outbound = Outbound(settings.private_hosts)
        self.reading = JobThreads("inputs")
        # Separate pools, so that a webhook that does not respond blocks no job creation.
        self._naming, self._calling = JobThreads("names"), JobThreads("webhooks")

    def prefixes_of(self, tenant: str) -> list[str]:
        """Return the prefixes of URLs that a tenant may read."""
        prefixes = self._settings.input_prefixes
        return [
            pattern.replace(TENANT, tenant) for pattern in prefixes if self._may(tenant, pattern)
        ]

    def stream_of(self, tenant: str, given: JobInput) -> str:
        """Return the JetStream stream that has the input of a tenant.

        Raises:
            InvalidRequest: it may not be read, or not in this way.
        """
        subject = given.nats_subject
        if not is_pattern(subject):
            raise InvalidRequest.of(SUBJECT, f"{subject!r} is not a NATS subject")
        if given.format not in _LINES:
            raise InvalidRequest.of(
                "spec.input.format",
                "not supported for NATS messages; leave it out or use a JSON format",
            )
        listed = [
            (stream, pattern.replace(TENANT, tenant))
            for stream, subjects in self._settings.input_streams.items()
            if self._may(tenant, stream)
            for pattern in subjects
        ]
        for stream, pattern in listed:
            if covers(pattern, subject):
                return stream
        raise InvalidRequest.of(
            SUBJECT,
            "not among the subjects that the operator allows (jobs.input_streams): "
            f"{', '.join(one for _, one in listed) or 'none'}; upload a file instead",
        )

    def _may(self, tenant: str, name: str) -> bool:
        """Return whether a tenant may use a prefix or a stream."""
        tenants = self._settings.input_tenants
        return name not in tenants or tenant in tenants[name]

    def close(self) -> None:
        """Start no more calls."""
        for threads in (self.reading, self._naming, self._calling):
            threads.close()

    async def post(self, tenant: str, url: str, headers: Mapping[str, str], body: bytes) -> int:
        """Call a webhook; return the status."""
        call = partial(self._outbound.post, url, headers, body, webhooks.FIELD)
        return await _within(self._calling, tenant, call)

    async def check(self, store: JobStore, tenant: str, spec: JobSpec) -> None:
        """Check the URLs and the subject of a new job.

        Raises:
            InvalidRequest: one may not be opened; the message says what to do.
            TransportUnavailable: the name of a webhook cannot be resolved now, or JetStream does not respond.
            Overloaded: too many calls of the tenant wait for names.
        """
        if spec.input.WhichOneof("source") == "nats_subject":
            stream = self.stream_of(tenant, spec.input)
            await store.read_message(stream, spec.input.nats_subject, 1)
        if spec.input.WhichOneof("source") == "url":
            check_url(spec.input.url, self.prefixes_of(tenant))
        if spec.webhook.url:
            check = partial(webhooks.check, spec.webhook, self._outbound)
            await _within(self._naming, tenant, check)

    async def fetch(
        self,
        store: JobStore,
        tenant: str,
        url: str,
        quotas: Quotas,
        on_wait: Callable[[str], None],
        policy: ItemRetryPolicy = FETCH_RETRIES,
    ) -> str:
        """Copy what is behind a URL into the store; return the id of the upload.

        What cannot be reached is tried again after growing waits; `on_wait` is called with the reason
        before each.

        Raises:
            InvalidRequest: it cannot be read.
            LimitReached: see `new_upload`.
            StorageFull: see `new_upload`.
            SourceUnreachable: it cannot be reached, or not be read to its end; nor could it in the last try.
            TransportUnavailable: JetStream does not respond.
        """
        tries = 0
        while True:
            pieces = read_url(url, self.prefixes_of(tenant), self._outbound)
            try:
                async with new_upload(store, tenant, quotas) as upload:
                    upload.record.name = PurePosixPath(urlsplit(url).path).name[-256:]
                    while piece := await self._next(tenant, pieces):
                        await upload.add(piece)
                    await upload.complete()
                return upload.id
            except SourceUnreachable as error:
                tries += 1
                if tries > policy.retries:
                    raise
                on_wait(str(error))
            finally:
                with suppress(ValueError):  # a thread still reads
                    pieces.close()
            await asyncio.sleep(policy.wait_s(tries, random.random()))

    async def _next(self, tenant: str, pieces: Iterator[bytes]) -> bytes:
        try:
            return await self.reading.run(tenant, next, pieces, b"")
        except TransportUnavailable as error:
            raise SourceUnreachable(error.message) from error


class SourceUnreachable(Exception):
    """An input at a URL cannot be reached, or not be read to its end; another try may succeed."""


async def _within(threads: JobThreads, tenant: str, work: Callable[[], _T]) -> _T:
    try:
        async with asyncio.timeout(CALL_S):
            return await threads.run(tenant, work)
    except TimeoutError:
        message = f"an external call took over {CALL_S:g} s"
        raise TransportUnavailable(message, retry_after_s=RETRY_AFTER_S) from None
