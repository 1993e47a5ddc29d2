"""Files on their way into the store: what a caller sends, and what the service reads itself."""

import asyncio
import hashlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, suppress
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


async def store_file(
    store: JobStore, record: UploadRecord, quotas: Quotas, pieces: AsyncIterator[bytes]
) -> str:
    """Store a file in chunks of one size; return its id. If that fails, delete what is stored of it.

    `record` is changed. Errors of `pieces` pass through.

    Raises:
        LimitReached: the tenant has as many uploads as it may have.
        StorageFull: the tenant has used its share of the inputs, or JetStream is full.
        TransportUnavailable: JetStream does not respond.
    """
    quotas.check_count(record.tenant, "uploads")
    upload, digest, waiting = new_upload_id(), hashlib.sha256(), bytearray()
    quotas.upload(upload, record)

    async def write_chunk() -> None:
        chunk = bytes(waiting[:CHUNK_BYTES])
        await store.write_chunk(upload, record.chunks, chunk)
        del waiting[:CHUNK_BYTES]
        record.chunks += 1
        record.size_bytes += len(chunk)
        quotas.upload(upload, record)

    try:
        await store.write_upload(upload, record)
        async for piece in pieces:
            quotas.check_bytes(record.tenant, "inputs")
            digest.update(piece)
            waiting += piece
            # Chunks have one size, however the caller cut the file.
            while len(waiting) >= CHUNK_BYTES:
                await write_chunk()
        while waiting:
            await write_chunk()
        record.sha256, record.complete_unix_ms = digest.digest(), unix_ms()
        await store.write_upload(upload, record)
        quotas.upload(upload, record)
    except BaseException:
        quotas.upload(upload, None)
        await asyncio.shield(store.delete_upload(upload))
        raise
    return upload


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

    def stream_of(self, tenant: str, job_input: JobInput) -> str:
        """Return the JetStream stream that has the input of a tenant.

        Raises:
            InvalidRequest: it may not be read, or not in this way.
        """
        subject = job_input.nats_subject
        if not is_pattern(subject):
            raise InvalidRequest.of(SUBJECT, f"{subject!r} is not a NATS subject")
        if job_input.format not in _LINES:
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
        """Call a webhook; return the status.

        Raises:
            InvalidRequest: it may not be called.
            Overloaded: too many calls of the tenant wait for webhooks.
            TransportUnavailable: it did not respond in time.
        """
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
            LimitReached: see `store_file`.
            Overloaded: too many calls of the tenant wait for threads.
            StorageFull: see `store_file`.
            SourceUnreachable: it cannot be reached, or not be read to its end, in the last try either.
            TransportUnavailable: JetStream does not respond.
        """
        tries = 0
        while True:
            name = PurePosixPath(urlsplit(url).path).name[-256:]
            record = UploadRecord(tenant=tenant, name=name, create_unix_ms=unix_ms())
            try:
                async with aclosing(self._pieces(tenant, url)) as pieces:
                    return await store_file(store, record, quotas, pieces)
            except SourceUnreachable as error:
                tries += 1
                if tries > policy.retries:
                    raise
                on_wait(str(error))
            await asyncio.sleep(policy.wait_s(tries, random.random()))

    async def _pieces(self, tenant: str, url: str) -> AsyncGenerator[bytes]:
        pieces = read_url(url, self.prefixes_of(tenant), self._outbound)
        try:
            while piece := await self.reading.run(tenant, next, pieces, b""):
                yield piece
        except TransportUnavailable as error:
            raise SourceUnreachable(error.message) from error
        finally:
            with suppress(ValueError):  # a thread still reads
                pieces.close()


class SourceUnreachable(Exception):
    """An input at a URL cannot be reached, or not be read to its end; another try may succeed."""


async def _within(threads: JobThreads, tenant: str, work: Callable[[], _T]) -> _T:
    try:
        async with asyncio.timeout(CALL_S):
            return await threads.run(tenant, work)
    except TimeoutError:
        message = f"an external call took over {CALL_S:g} s"
        raise TransportUnavailable(message, retry_after_s=RETRY_AFTER_S) from None
