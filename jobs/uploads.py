"""Files on their way into the store: what a caller sends, and what the service reads itself."""

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Final, ParamSpec, Self, TypeVar
from urllib.parse import urlsplit

from jobs import webhooks
from jobs.core.retry import RetryPolicy
from jobs.input.urls import check_url, read_url
from jobs.outbound import Outbound
from jobs.quotas import Quotas
from jobs.store import CHUNK_BYTES, JobStore, new_upload_id
from jobs.threads import Threads
from sluice.errors import InvalidRequest, TransportUnavailable
from sluice.internal.v1.job_pb2 import UploadRecord
from sluice.settings import JobsSettings
from sluice.v1 import jobs_pb2
from sluice.v1.jobs_pb2 import JobInput, JobSpec, JobWebhook
from sluice.wire.clock import unix_ms
from sluice.wire.subjects import covers, is_pattern

TENANT: Final = "{tenant}"
"""Stands for the tenant of the job in what the operator lists."""
CALL_S: Final = 30.0
"""A webhook or the resolution of its name, all of it, seconds."""
RETRY_AFTER_S: Final = 5.0
SUBJECT: Final = "spec.input.nats_subject"
_LINES: Final = (
    jobs_pb2.JOB_INPUT_FORMAT_UNSPECIFIED,
    jobs_pb2.JOB_INPUT_FORMAT_OPENAI,
    jobs_pb2.JOB_INPUT_FORMAT_JSONL,
)
_P = ParamSpec("_P")
_T = TypeVar("_T")


async def begin_messages(store: JobStore, tenant: str, quotas: Quotas) -> str:
    """The id of an upload for messages, which is never complete: no other job can name it as its file.

    Raises:
        LimitReached: the tenant has as many uploads as it may have.
    """
    quotas.check_upload(tenant)
    upload = new_upload_id()
    await store.write_upload(upload, UploadRecord(tenant=tenant, create_unix_ms=unix_ms()))
    return upload


class NewUpload:
    """A file that is being stored, in chunks of one size; nothing is left of it when the block fails.

    Its methods raise LimitReached and StorageFull when the tenant has what it may have.

    Attributes:
        id: its name.
        record: what is known of it.
    """

    def __init__(self, store: JobStore, tenant: str, quotas: Quotas) -> None:
        self._quotas = quotas
        self.id = new_upload_id()
        self.record = UploadRecord(tenant=tenant, create_unix_ms=unix_ms())
        self._store = store
        self._held = bytearray()
        self._digest = hashlib.sha256()

    async def add(self, data: bytes) -> None:
        """Stores the next bytes."""
        self._quotas.check_inputs(self.record.tenant)
        self._digest.update(data)
        self._held += data
        while len(self._held) >= CHUNK_BYTES:
            await self._write()

    async def complete(self) -> None:
        """Says that there are no more."""
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

    async def __aenter__(self) -> Self:
        self._quotas.check_upload(self.record.tenant)
        self._quotas.upload(self.id, self.record)
        try:
            await self._store.write_upload(self.id, self.record)
        except BaseException:
            self._quotas.upload(self.id, None)
            raise
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            await asyncio.shield(self._store.delete_upload(self.id))
            self._quotas.upload(self.id, None)


class Outside:
    """What jobs may reach outside of the mesh, as the operator lists it.

    Attributes:
        reading: threads for inputs, those at URLs too.
    """

    def __init__(self, settings: JobsSettings) -> None:
        self._settings = settings
        self._outbound = Outbound(settings.private_hosts)
        self.reading = Threads("inputs")
        # Apart, so that a webhook that does not answer keeps no job from being created.
        self._naming, self._calling = Threads("names"), Threads("webhooks")

    def prefixes_of(self, tenant: str) -> list[str]:
        """Prefixes of URLs that are inputs of ``tenant``."""
        prefixes = self._settings.input_prefixes
        return [one.replace(TENANT, tenant) for one in prefixes if self._may(tenant, one)]

    def stream_of(self, tenant: str, given: JobInput) -> str:
        """The stream of JetStream with ``given.nats_subject``, an input of ``tenant``.

        Raises:
            InvalidRequest: it may not be read, or not as ``given`` says.
        """
        subject = given.nats_subject
        if not is_pattern(subject):
            raise InvalidRequest.of(SUBJECT, f"{subject!r} is no subject of NATS")
        if given.format not in _LINES:
            raise InvalidRequest.of("spec.input.format", "messages of NATS are lines of JSON")
        listed = [
            (stream, one.replace(TENANT, tenant))
            for stream, subjects in self._settings.input_streams.items()
            if self._may(tenant, stream)
            for one in subjects
        ]
        for stream, pattern in listed:
            if covers(pattern, subject):
                return stream
        raise InvalidRequest.of(
            SUBJECT,
            "is none of the subjects that the operator lists (jobs.input_streams): "
            f"{', '.join(one for _, one in listed) or 'none'}; upload a file instead",
        )

    def _may(self, tenant: str, name: str) -> bool:
        """Whether ``tenant`` may use a prefix or a stream."""
        tenants = self._settings.input_tenants
        return name not in tenants or tenant in tenants[name]

    def close(self) -> None:
        """Begins nothing more."""
        for threads in (self.reading, self._naming, self._calling):
            threads.close()

    async def send(self, tenant: str, webhook: JobWebhook, event: webhooks.Event) -> bool:
        """Tells ``event``; see `webhooks.send`."""

        async def post(headers: Mapping[str, str]) -> int:
            post, url = self._outbound.post, webhook.url
            return await _within(
                self._calling, tenant, post, url, headers, event.body, webhooks.FIELD
            )

        return await webhooks.send(webhook, event, post)

    async def check(self, store: JobStore, tenant: str, spec: JobSpec) -> None:
        """Checks the URLs and the subject of a new job of ``tenant``.

        Raises:
            InvalidRequest: one may not be opened; the message says what to do.
            TransportUnavailable: the name of a webhook cannot be resolved now, or JetStream does not answer.
            Overloaded: too many calls of the tenant wait for names.
        """
        if spec.input.WhichOneof("source") == "nats_subject":
            stream = self.stream_of(tenant, spec.input)
            await store.read_message(stream, spec.input.nats_subject, 1)
        if spec.input.WhichOneof("source") == "url":
            check_url(spec.input.url, self.prefixes_of(tenant))
        if spec.webhook.url:
            await _within(self._naming, tenant, webhooks.check, spec.webhook, self._outbound)

    async def fetch(self, store: JobStore, tenant: str, url: str, quotas: Quotas) -> str:
        """Copies what is behind ``url`` into the store; the id of the upload.

        Raises:
            InvalidRequest: it cannot be read.
            LimitReached, StorageFull: see `NewUpload`.
            SourceUnreachable: it cannot be reached, or not be read to its end.
            TransportUnavailable: JetStream does not answer.
        """
        pieces = read_url(url, self.prefixes_of(tenant), self._outbound)
        try:
            async with NewUpload(store, tenant, quotas) as upload:
                upload.record.name = PurePosixPath(urlsplit(url).path).name[-256:]
                while piece := await self._next(tenant, pieces):
                    await upload.add(piece)
                await upload.complete()
        finally:
            with suppress(ValueError):  # a thread still reads
                pieces.close()
        return upload.id

    async def _next(self, tenant: str, pieces: Iterator[bytes]) -> bytes:
        try:
            return await self.reading.run(tenant, next, pieces, b"")
        except TransportUnavailable as error:
            raise SourceUnreachable(error.message) from error


class SourceUnreachable(Exception):
    """An input at a URL cannot be reached, or not be read to its end; another try may succeed."""


async def fetched(
    fetch: Callable[[], Awaitable[str]], policy: RetryPolicy, on_wait: Callable[[str], None]
) -> str:
    """Return what ``fetch`` returns, which is tried again after waits that grow.

    Args:
        on_wait: called with the reason before each wait.

    Raises:
        SourceUnreachable: the last try failed too.
    """
    tries = 0
    while True:
        try:
            return await fetch()
        except SourceUnreachable as error:
            tries += 1
            if tries > policy.retries:
                raise
            on_wait(str(error))
        await asyncio.sleep(policy.wait_s(tries, random.random()))


async def _within(
    threads: Threads, tenant: str, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    try:
        async with asyncio.timeout(CALL_S):
            return await threads.run(tenant, work, *args, **kwargs)
    except TimeoutError:
        message = f"a call to the outside took over {CALL_S:g} s"
        raise TransportUnavailable(message, retry_after_s=RETRY_AFTER_S) from None
