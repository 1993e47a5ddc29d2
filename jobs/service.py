"""`sluice.v1.JobService` over grpc.aio: reads and writes what is in JetStream."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from jobs import spec as bounds
from jobs.closing import dead_letters
from jobs.core.leases import OVER, is_ended, is_idle, set_state
from jobs.input import Template
from jobs.process import JobProcess
from jobs.results import OrderedLog, merge_attempts, reached_stage, stages_of
from jobs.stage_log import BAD_LINES
from jobs.stages import check_stages
from jobs.store import job_unknown, upload_unknown
from jobs.threads import TenantLimiter
from jobs.uploads import store_file
from sluice import errors
from sluice.defaults import ALL_TENANTS_METADATA, KEY_METADATA, TENANT_METADATA
from sluice.internal.v1.job_pb2 import ItemOutcome, JobRecord, UploadRecord
from sluice.v1 import jobs_pb2 as pb
from sluice.v1.jobs_pb2_grpc import JobServiceServicer
from sluice.wire.clock import ms_of, timestamp, unix_ms
from sluice.wire.enums import word_of
from sluice.wire.job_calls import page_key
from sluice.wire.subjects import is_token

SPEC_BYTES_MAX: Final = 64 * 1024
"""Largest specification of a job, in bytes."""
WATCH_S: Final = 0.5
"""Interval at which a watched job is read, in seconds."""
FOLLOW_S: Final = 0.3
"""Interval at which followed results are read, and jobs for whose end a call waits, in seconds."""
CLOSED_S: Final = 60.0
"""How long a call about a job that ended early waits until it is closed, in seconds."""
PAGE_BYTES: Final = 256 * 1024
"""Bytes of results that are sent at a time."""
LIST_BYTES: Final = 4 * 1024 * 1024
"""Bytes at which a page of a list ends, however few entries it has."""
PAGE_SIZE: Final = 100
"""Default number of entries of a page."""
READS: Final = 16
"""Records that one call reads at the same time."""
READS_OF_TENANT: Final = 4
"""Calls of a tenant that use the store at the same time; further ones wait in turn."""
PAGE_SIZE_MAX: Final = 1000
"""Largest number of entries of a page."""
_CHUNK_OF_CALL_MAX: Final = 512 * 1024

_Listed = TypeVar("_Listed", pb.Job, pb.Upload)


class JobService(JobServiceServicer):
    """API of one process; every process answers for every job. Its streams are coroutines that write."""

    def __init__(self, process: JobProcess) -> None:
        self._process = process
        self._store, self._outside, self._quotas = process.store, process.outside, process.quotas
        self._limiter = TenantLimiter(READS_OF_TENANT, "the store of jobs")

    async def CreateJob(self, request: pb.CreateJobRequest, context: Any) -> pb.CreateJobResponse:
        """Create a job, or return the one that was created with the same idempotency key."""
        tenant, spec = tenant_of(context), request.spec
        if spec.ByteSize() > SPEC_BYTES_MAX:
            raise errors.InvalidRequest.of("spec", f"has over {SPEC_BYTES_MAX} bytes")
        models = await self._check(tenant, spec)
        key = request.idempotency_key
        bounds.check_length("idempotency_key", key, bounds.NAME_CHARS_MAX)
        job = pb.Job(id=new_job_id(tenant, key), tenant=tenant, spec=spec)
        job.create_time.CopyFrom(timestamp(unix_ms()))
        upload_id, key_id = spec.input.upload_id, key_of(context)
        record = JobRecord(job=job, upload_id=upload_id, key_id=key_id, models=sorted(models))
        async with self._limiter.slot(tenant):
            if key:
                record.fingerprint = await self._fingerprint(spec)
                if (existing := await self._existing(record)) is not None:
                    return pb.CreateJobResponse(job=_visible_job(existing))
            bounds.check_not_late(spec.limits)
            return pb.CreateJobResponse(job=_visible_job(await self._create(record)))

    async def _create(self, record: JobRecord) -> JobRecord:
        """Store a new job; return it, or the job of another call with the same key."""
        job = record.job
        await self._quotas.ready()
        self._quotas.check_count(job.tenant, "jobs")
        # Concurrent calls must count it already; nobody claims it before it is queued.
        self._quotas.job(job.id, record)
        set_state(job, pb.JOB_STATE_QUEUED, "", "", unix_ms())
        try:
            if await self._store.create(record):
                self._quotas.job(job.id, record)
                return record
        except BaseException:
            self._quotas.job(job.id, None)
            raise
        existing = await self._existing(record)
        if existing is None:
            raise errors.JobUnknown(f"job {job.id} was deleted at the same time; create it again")
        return existing

    async def _existing(self, record: JobRecord) -> JobRecord | None:
        """Return the job that was created with the key of `record`, or None."""
        try:
            existing, _ = await self._store.read(record.job.id)
        except errors.JobUnknown:
            return None
        if existing.fingerprint != record.fingerprint:
            raise errors.IdempotencyConflict(
                "idempotency_key: used by a job with another specification; use another key"
            )
        return existing

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:
        """Return a job."""
        return pb.GetJobResponse(job=_visible_job(await self._own(request.id, context)))

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:
        """Return a page of jobs and the totals by state."""
        tenant = scope_of(context)
        bounds.check_count("states", request.states, len(pb.JobState.values()))
        await self._quotas.ready()
        states = request.states or pb.JobState.values()
        jobs = {
            page_key(existing.urgency[1], job): job
            for job, existing in self._quotas.jobs.items()
            if tenant in (None, existing.tenant) and existing.state in states
        }

        async def read(job: str) -> pb.Job | None:
            record, _ = await self._store.read(job)
            return _visible_job(record) if record.job.state in states else None

        async with self._limiter.slot(tenant_of(context)):
            listed, token = await _page(jobs, request, read)
        totals = [
            pb.JobStateTotal(state=state, jobs=count)
            for state, count in sorted(self._quotas.totals(tenant).items())
        ]
        return pb.ListJobsResponse(jobs=listed, next_page_token=token, totals=totals)

    async def WatchJob(self, request: pb.WatchJobRequest, context: Any) -> None:  # type: ignore[override]
        """Send a job whenever it changes, until it has ended, or with `until_paused` is paused."""
        last: pb.Job | None = None
        while True:
            job = _visible_job(await self._own(request.id, context))
            if job != last:
                await context.write(pb.WatchJobResponse(job=job))
                last = job
            if is_ended(job) or (request.until_paused and job.state == pb.JOB_STATE_PAUSED):
                return
            await asyncio.sleep(WATCH_S)

    async def PauseJob(self, request: pb.PauseJobRequest, context: Any) -> pb.PauseJobResponse:
        """Pause a job."""

        def pause(record: JobRecord) -> None:
            _check_live(record.job)
            if record.job.state != pb.JOB_STATE_PAUSED:
                reason = "a caller paused it; `sluice batch resume` continues it"
                set_state(record.job, pb.JOB_STATE_PAUSED, "PAUSED_BY_CALLER", reason, unix_ms())

        return pb.PauseJobResponse(job=await self._change(request.id, context, pause))

    async def ResumeJob(self, request: pb.ResumeJobRequest, context: Any) -> pb.ResumeJobResponse:
        """Resume a paused job, and change its limits."""

        def resume(record: JobRecord) -> None:
            _check_live(record.job)
            if request.HasField("limits"):
                record.job.spec.limits.CopyFrom(request.limits)
            if record.job.state == pb.JOB_STATE_PAUSED:
                _continue(record, context)

        if request.HasField("limits"):
            bounds.check_limits(request.limits)
            bounds.check_not_late(request.limits)
        return pb.ResumeJobResponse(job=await self._change(request.id, context, resume))

    async def CancelJob(self, request: pb.CancelJobRequest, context: Any) -> pb.CancelJobResponse:
        """Cancel a job."""

        def cancel(record: JobRecord) -> None:
            job = record.job
            if job.state != pb.JOB_STATE_CANCELLED:
                _check_live(job)
                reason = "a caller cancelled it"
                set_state(job, pb.JOB_STATE_CANCELLED, "CANCELLED_BY_CALLER", reason, unix_ms())
                job.report.progress.CopyFrom(job.progress)

        return pb.CancelJobResponse(job=await self._change(request.id, context, cancel))

    async def DeleteJob(self, request: pb.DeleteJobRequest, context: Any) -> pb.DeleteJobResponse:
        """Delete an ended job with its results, and its upload unless another job uses it."""
        record = await self._closed(request.id, context)
        if record.job.state not in OVER:
            raise errors.WrongJobState("the job has not ended; cancel it first")
        await self._quotas.ready()
        shared = set(self._quotas.jobs_using(record.upload_id)) - {record.job.id}
        upload = "" if shared else record.upload_id
        async with self._limiter.slot(tenant_of(context)):
            await self._store.delete(record.job.id, upload)
        self._quotas.job(record.job.id, None)
        self._quotas.upload(upload, None)
        return pb.DeleteJobResponse()

    async def GetResults(self, request: pb.GetResultsRequest, context: Any) -> None:  # type: ignore[override]
        """Send the results of a stage by index; with `follow`, those of a first attempt until the job has ended."""
        record = await self._readable(request.id, context)
        if request.follow and record.job.spec.stages and not request.HasField("stage"):
            record = await self._when(request.id, context, is_ended)
        still = is_idle(record.job)
        stage = reached_stage(record) if still else stages_of(record) - 1
        stage = request.stage if request.HasField("stage") else stage
        if stage >= stages_of(record):
            raise errors.InvalidRequest.of("stage", f"the job has {stages_of(record)}")
        if request.follow and record.job.state not in OVER and not record.attempt:
            outcomes = self._followed(record, stage, request.from_index, context)
        else:
            merged = merge_attempts(
                self._store, request.id, stage, record.attempt, request.from_index, past_gaps=still
            )
            outcomes = self._limited(context, merged)
        async for page in _pages(outcomes):
            await context.write(pb.GetResultsResponse(results=page))

    async def ListDeadLetters(self, request: pb.ListDeadLettersRequest, context: Any) -> None:  # type: ignore[override]
        """Send the dead letters of a job by index."""
        record = await self._readable(request.id, context)
        letters = dead_letters(self._process, record, request.from_index)
        async for page in _pages(self._limited(context, letters)):
            await context.write(pb.ListDeadLettersResponse(results=page))

    async def RetryDeadLetters(
        self, request: pb.RetryDeadLettersRequest, context: Any
    ) -> pb.RetryDeadLettersResponse:
        """Run the dead letters of an ended job again."""
        bounds.check_count("reasons", request.reasons, bounds.REASONS_MAX)
        reasons = set(request.reasons)
        for reason in reasons:
            bounds.check_length("reasons", reason, bounds.NAME_CHARS_MAX)
        record = await self._readable(request.id, context)
        if record.job.spec.stages:
            raise errors.WrongJobState(
                "a job with stages cannot be retried; submit it again and name it in dedupe.reuse_job_ids,"
                " which reuses the answers to its parts"
            )
        items = 0
        async for letter in dead_letters(self._process, record):
            reason = letter.result.error.reason
            items += reason not in BAD_LINES and (not reasons or reason in reasons)
        if items and not record.job.spec.input.nats_subject:
            await self._store.upload(record.upload_id)  # raises if it was deleted since

        def retry(record: JobRecord) -> None:
            if not is_ended(record.job):
                raise errors.WrongJobState(
                    "the job has not ended; retry its dead letters when it has"
                )
            record.attempt += 1
            record.stage = 0
            del record.retry_reasons[:]
            record.retry_reasons.extend(request.reasons)
            for field in ("report", "end_time", "results_expire_time"):
                record.job.ClearField(field)
            _continue(record, context)

        job = await self._change(request.id, context, retry) if items else _visible_job(record)
        return pb.RetryDeadLettersResponse(job=job, items=items)

    async def UploadInput(self, requests: Any, context: Any) -> pb.UploadInputResponse:
        """Store an input file."""
        await self._quotas.ready()
        record = UploadRecord(tenant=tenant_of(context), create_unix_ms=unix_ms())

        async def pieces() -> AsyncIterator[bytes]:
            async for request in requests:
                if isinstance(request, errors.SluiceError):
                    raise request
                record.name = record.name or request.name[-256:]
                if request.HasField("expires_after"):
                    bounds.check_duration("expires_after", request.expires_after)
                    kept_ms = request.expires_after.ToMilliseconds()
                    record.expire_unix_ms = unix_ms() + kept_ms
                if len(request.data) > _CHUNK_OF_CALL_MAX:
                    raise errors.InvalidRequest.of("data", f"is over {_CHUNK_OF_CALL_MAX} bytes")
                yield request.data

        upload_id = await store_file(self._store, record, self._quotas, pieces())
        return pb.UploadInputResponse(
            upload_id=upload_id,
            size_bytes=record.size_bytes,
            sha256=record.sha256,
            expire_time=_expire_time(record),
        )

    async def GetUpload(self, request: pb.GetUploadRequest, context: Any) -> pb.GetUploadResponse:
        """Return an upload."""
        upload = await self._upload(scope_of(context), request.upload_id)
        return pb.GetUploadResponse(
            name=upload.name,
            size_bytes=upload.size_bytes,
            sha256=upload.sha256,
            create_time=timestamp(upload.complete_unix_ms),
            expire_time=_expire_time(upload),
        )

    async def ListUploads(
        self, request: pb.ListUploadsRequest, context: Any
    ) -> pb.ListUploadsResponse:
        """Return a page of uploads."""
        tenant = scope_of(context)
        await self._quotas.ready()
        uploads = {
            page_key(existing.complete_unix_ms, upload): upload
            for upload, existing in self._quotas.uploads.items()
            if existing.complete_unix_ms and tenant in (None, existing.tenant)
        }

        async def read(upload_id: str) -> pb.Upload | None:
            upload = await self._upload(tenant, upload_id)
            return pb.Upload(
                upload_id=upload_id,
                name=upload.name,
                size_bytes=upload.size_bytes,
                create_time=timestamp(upload.complete_unix_ms),
                expire_time=_expire_time(upload),
            )

        async with self._limiter.slot(tenant_of(context)):
            listed, token = await _page(uploads, request, read)
        return pb.ListUploadsResponse(uploads=listed, next_page_token=token)

    async def DeleteUpload(
        self, request: pb.DeleteUploadRequest, context: Any
    ) -> pb.DeleteUploadResponse:
        """Delete an upload that no job reads."""
        await self._upload(scope_of(context), request.upload_id)
        await self._quotas.ready()
        for job in self._quotas.jobs_using(request.upload_id):
            with suppress(errors.JobUnknown):
                record, _ = await self._store.read(job)
                if record.upload_id == request.upload_id and record.job.state not in OVER:
                    raise errors.WrongJobState(
                        f"job {job} reads this upload; cancel it, or wait until it ends"
                    )
        await self._store.delete_upload(request.upload_id)
        self._quotas.upload(request.upload_id, None)
        return pb.DeleteUploadResponse()

    async def _upload(self, tenant: str | None, upload_id: str) -> UploadRecord:
        """Return a complete upload of a tenant, with None of any tenant."""
        upload = await self._store.upload(upload_id)
        if tenant not in (None, upload.tenant):
            raise upload_unknown(upload_id)
        return upload

    async def _check(self, tenant: str, spec: pb.JobSpec) -> set[str]:
        """Check a specification; return the models that exist."""
        bounds.check_spec(spec)
        bounds.check_limits(spec.limits)
        source = spec.input.WhichOneof("source")
        if source is None:
            raise errors.InvalidRequest.of(
                "spec.input", "missing; name an upload, a URL or a subject"
            )
        if spec.stages:
            check_stages(spec)
        for reused in spec.dedupe.reuse_job_ids:
            _check_owner((await self._store.read(reused))[0], tenant)
        await self._outside.check(self._store, tenant, spec)
        if spec.input.template:
            Template(spec.input.template)
        if source == "upload_id":
            await self._upload(tenant, spec.input.upload_id)
        models = {spec.model, *(stage.model for stage in spec.stages)} - {""}
        existing = await self._process.gateways.model_names()
        if unknown := sorted(models - existing):
            names = ", ".join(sorted(existing))
            raise errors.UnknownModel(
                f"spec.model: no model {unknown[0]!r}; there are {names}",
                metadata={"models": names},
            )
        return existing

    async def _fingerprint(self, spec: pb.JobSpec) -> bytes:
        """Return a hash that is equal for a file that is sent again, and for a relative deadline."""
        spec_only = pb.JobSpec()
        spec_only.CopyFrom(spec)
        if spec.input.upload_id:
            upload = await self._store.upload(spec.input.upload_id)
            spec_only.input.upload_id = upload.sha256.hex()
        spec_only.limits.ClearField("deadline_time")
        return hashlib.sha256(spec_only.SerializeToString(deterministic=True)).digest()

    async def _own(self, job: str, context: Any) -> JobRecord:
        async with self._limiter.slot(tenant_of(context)):
            record, _ = await self._store.read(job)
        _check_owner(record, scope_of(context))
        return record

    async def _limited(
        self, context: Any, outcomes: AsyncIterator[ItemOutcome]
    ) -> AsyncIterator[ItemOutcome]:
        """Yield the outcomes, reading each within the tenant's limit of concurrent reads."""
        tenant = tenant_of(context)
        while True:
            async with self._limiter.slot(tenant):
                outcome = await anext(outcomes, None)
            if outcome is None:
                return
            yield outcome

    async def _change(self, job: str, context: Any, edit: Callable[[JobRecord], None]) -> pb.Job:
        tenant = scope_of(context)

        def checked(record: JobRecord) -> None:
            _check_owner(record, tenant)
            edit(record)

        async with self._limiter.slot(tenant_of(context)):
            record = await self._store.change(job, checked)
        self._quotas.job(job, record)
        return _visible_job(record)

    async def _closed(self, job: str, context: Any) -> JobRecord:
        """Return the record of a job; wait for one that ended early until it is closed.

        Raises:
            TransportUnavailable: that takes too long.
        """
        try:
            async with asyncio.timeout(CLOSED_S):
                return await self._when(job, context, lambda job: not job.closing)
        except TimeoutError:
            message = f"job {job} has ended, and its items are still being counted; try again"
            raise errors.TransportUnavailable(message, retry_after_s=FOLLOW_S) from None

    async def _when(self, job: str, context: Any, holds: Callable[[pb.Job], bool]) -> JobRecord:
        """Return the record of a job as soon as a condition holds."""
        while True:
            record = await self._own(job, context)
            if holds(record.job):
                return record
            await asyncio.sleep(FOLLOW_S)

    async def _readable(self, job: str, context: Any) -> JobRecord:
        """Return the record of a job as `_closed` does; raise WrongJobState if its results have expired."""
        record = await self._closed(job, context)
        if 0 < ms_of(record.job.results_expire_time) <= unix_ms():
            raise errors.WrongJobState("the results of the job have expired; submit it again")
        return record

    async def _followed(
        self, record: JobRecord, stage: int, first: int, context: Any
    ) -> AsyncIterator[ItemOutcome | None]:
        """Yield the results of the first attempt until the job has ended; None before it waits for more."""
        log, job = OrderedLog(self._store, record.job.id, stage, 0, first), record.job.id
        while True:
            over = is_ended((await self._own(job, context)).job)
            async for outcome in self._limited(context, log.read(past_gaps=over)):
                yield outcome
            if over:
                return
            yield None
            await asyncio.sleep(FOLLOW_S)


async def _pages(
    outcomes: AsyncIterator[ItemOutcome | None],
) -> AsyncIterator[list[pb.JobResult]]:
    """Group results into pages: a page ends when it is full, and when None says that the next result may take long.

    One that is `FOLLOW_S` old ends with the next result: reading a log takes time as well.
    """
    page: list[pb.JobResult] = []
    size, since = 0, time.monotonic()
    async for outcome in outcomes:
        if outcome is not None:
            page.append(outcome.result)
            size += outcome.result.ByteSize()
        now = time.monotonic()
        if page and (outcome is None or size >= PAGE_BYTES or now - since >= FOLLOW_S):
            yield page
            page, size, since = [], 0, now
    if page:
        yield page


def tenant_of(context: Any) -> str:
    """Return the tenant that the gateway passed on; "default" without one.

    Raises:
        InvalidRequest: it is malformed.
    """
    metadata = dict(context.invocation_metadata() or ())
    tenant = str(metadata.get(TENANT_METADATA, "default"))
    if not is_token(tenant):
        raise errors.InvalidRequest.of(TENANT_METADATA, "use up to 64 letters, digits, '-' and '_'")
    return tenant


def scope_of(context: Any) -> str | None:
    """Return the tenant whose jobs the caller may see or change; None: every tenant's."""
    metadata = dict(context.invocation_metadata() or ())
    return None if ALL_TENANTS_METADATA in metadata else tenant_of(context)


def key_of(context: Any) -> str:
    """Return the id of the API key that the gateway passed on; empty: the caller used none."""
    return str(dict(context.invocation_metadata() or ()).get(KEY_METADATA, ""))


def _continue(record: JobRecord, context: Any) -> None:
    """Queue a job again, charged to the caller's key unless an operator continues it."""
    if tenant_of(context) == record.job.tenant:
        record.key_id = key_of(context)
    set_state(record.job, pb.JOB_STATE_QUEUED, "", "", unix_ms())


def new_job_id(tenant: str, key: str) -> str:
    """Return the id of a job: always the same one for a tenant's key, else a unique one."""
    if not key:
        return f"job-{secrets.token_hex(10)}"
    return f"job-{hashlib.sha256(f'{tenant}/{key}'.encode()).hexdigest()[:20]}"


def _check_owner(record: JobRecord, tenant: str | None) -> None:
    if tenant not in (None, record.job.tenant):
        raise job_unknown(record.job.id)


def _check_live(job: pb.Job) -> None:
    if job.state in OVER:
        raise errors.WrongJobState(f"the job is already {word_of(pb.JobState, job.state)}")


def _visible_job(record: JobRecord) -> pb.Job:
    job = pb.Job()
    job.CopyFrom(record.job)
    if job.spec.HasField("webhook"):
        job.spec.webhook.ClearField("secret")
    return job


def _expire_time(upload: UploadRecord) -> Timestamp | None:
    return timestamp(upload.expire_unix_ms) if upload.expire_unix_ms else None


async def _page(
    entries: Mapping[str, str],
    request: pb.ListJobsRequest | pb.ListUploadsRequest,
    read: Callable[[str], Coroutine[Any, Any, _Listed | None]],
) -> tuple[list[_Listed], str]:
    """Return a page of entries, and the token of the next one.

    A few are read at the same time; entries that are gone (None) are left out. A page also ends at
    `LIST_BYTES`.

    Args:
        entries: what `read` gets, by sort key.
        request: names the page.
        read: reads an entry; raises JobUnknown or UploadUnknown if it is gone.
    """
    bounds.check_length("page_token", request.page_token, bounds.PAGE_TOKEN_CHARS_MAX)
    size = min(request.page_size or PAGE_SIZE, PAGE_SIZE_MAX)
    keys = sorted(key for key in entries if key > request.page_token)

    async def existing(key: str) -> _Listed | None:
        with suppress(errors.JobUnknown, errors.UploadUnknown):
            return await read(entries[key])
        return None

    listed: list[_Listed] = []
    listed_bytes = 0
    for begin in range(0, min(size, len(keys)), READS):
        some = keys[begin : min(begin + READS, size)]
        records = await asyncio.gather(*map(existing, some))
        for key, record in zip(some, records, strict=True):
            if record is not None:
                listed.append(record)
                listed_bytes += record.ByteSize()
            if listed_bytes >= LIST_BYTES:
                return listed, key if key < keys[-1] else ""
    return listed, keys[size - 1] if len(keys) > size else ""
