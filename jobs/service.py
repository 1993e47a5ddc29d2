"""``sluice.v1.JobService`` over grpc.aio. All it does is read and write what is in JetStream."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from jobs.closing import dead_letters
from jobs.core.leases import OVER, is_ended, is_still, set_state
from jobs.input import Template
from jobs.process import JobProcess
from jobs.results import OrderedLog, merged
from jobs.spec import (
    NAME_CHARS_MAX,
    PAGE_TOKEN_CHARS_MAX,
    REASONS_MAX,
    check_count,
    check_expiry,
    check_length,
    check_limits,
    check_not_late,
    check_spec,
)
from jobs.stages import check_stages
from jobs.store import job_unknown, upload_unknown
from jobs.threads import Places
from jobs.totals import reached_stage, stages_of
from jobs.uploads import NewUpload
from sluice.defaults import ALL_TENANTS_METADATA, KEY_METADATA, TENANT_METADATA
from sluice.errors import (
    IdempotencyConflict,
    InvalidRequest,
    JobUnknown,
    SluiceError,
    TransportUnavailable,
    UnknownModel,
    UploadUnknown,
    WrongJobState,
)
from sluice.internal.v1.job_pb2 import ItemOutcome, JobRecord, UploadRecord
from sluice.v1 import jobs_pb2 as pb
from sluice.v1.jobs_pb2_grpc import JobServiceServicer
from sluice.wire.clock import ms_of, timestamp, unix_ms
from sluice.wire.job_calls import page_key
from sluice.wire.subjects import is_token

SPEC_BYTES_MAX: Final = 64 * 1024
WATCH_S: Final = 0.5
FOLLOW_S: Final = 0.3
CLOSED_S: Final = 60.0
"""How long a call about a job that ended early waits until it is closed, seconds."""
CLOSED_POLL_S: Final = 0.1
PAGE_BYTES: Final = 256 * 1024
LIST_BYTES: Final = 4 * 1024 * 1024
"""A page of a list ends behind the entry that reaches it, however few it has."""
PAGE_SIZE: Final = 100
READS: Final = 16
"""The number of records that one call reads at the same time."""
READS_OF_TENANT: Final = 4
"""Calls of a tenant that read or write the store at the same time; calls and streams of it beyond that wait in turn."""
PAGE_SIZE_MAX: Final = 1000
_CHUNK_OF_CALL_MAX: Final = 512 * 1024

_Entry = TypeVar("_Entry")
_Listed = TypeVar("_Listed", pb.Job, pb.Upload)


class JobService(JobServiceServicer):
    """The API of one process; every process answers for every job. Its streams are coroutines that write."""

    def __init__(
        self,
        process: JobProcess,
        known_models: Callable[[], Coroutine[Any, Any, set[str]]],
    ) -> None:
        """``known_models``: names that a job may ask for."""
        self._process = process
        self._store, self._outside, self._quotas = process.store, process.outside, process.quotas
        self._known_models = known_models
        self._turns = Places(READS_OF_TENANT, "the store of jobs")

    async def CreateJob(self, request: pb.CreateJobRequest, context: Any) -> pb.CreateJobResponse:
        """See the proto."""
        tenant, spec = tenant_of(context), request.spec
        if spec.ByteSize() > SPEC_BYTES_MAX:
            raise InvalidRequest.of("spec", f"has over {SPEC_BYTES_MAX} bytes")
        models = await self._check(tenant, spec)
        key = request.idempotency_key
        check_length("idempotency_key", key, NAME_CHARS_MAX)
        record = JobRecord(
            upload_id=spec.input.upload_id, key_id=key_of(context), models=sorted(models)
        )
        job = record.job
        job.id, job.tenant = new_job_id(tenant, key), tenant
        job.spec.CopyFrom(spec)
        job.create_time.CopyFrom(timestamp(unix_ms()))
        async with self._turns.one(tenant):
            if key:
                record.fingerprint = await self._fingerprint(spec)
                if (known := await self._known(record)) is not None:
                    return pb.CreateJobResponse(job=_shown(known))
            check_not_late(spec.limits)
            return pb.CreateJobResponse(job=_shown(await self._create(record)))

    async def _create(self, record: JobRecord) -> JobRecord:
        """The job; that of another call with its key, if there is one."""
        job = record.job
        await self._quotas.ready()
        self._quotas.check_job(job.tenant)
        self._quotas.job(job.id, record)  # calls beside this one count it, and nobody takes it yet
        _queue(job)
        try:
            if await self._store.create(record):
                self._quotas.job(job.id, record)
                return record
        except BaseException:
            self._quotas.job(job.id, None)
            raise
        known = await self._known(record)
        if known is None:
            raise JobUnknown(f"job {job.id} was deleted at the same time: create it again")
        return known

    async def _known(self, record: JobRecord) -> JobRecord | None:
        """The job that was created with the key of ``record``; None: there is none."""
        try:
            known, _ = await self._store.read(record.job.id)
        except JobUnknown:
            return None
        if known.fingerprint != record.fingerprint:
            raise IdempotencyConflict(
                "idempotency_key: a job with another specification has it; use another key"
            )
        return known

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:
        """See the proto."""
        return pb.GetJobResponse(job=_shown(await self._own(request.id, context)))

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:
        """See the proto."""
        tenant = scope_of(context)
        check_count("states", request.states, len(pb.JobState.values()))
        await self._quotas.ready()
        asked = request.states or pb.JobState.values()
        jobs = {
            page_key(known.urgency[1], job): job
            for job, known in self._quotas.jobs.items()
            if tenant in (None, known.tenant) and known.state in asked
        }

        async def read(job: str) -> pb.Job | None:
            with suppress(JobUnknown):
                record, _ = await self._store.read(job)
                return _shown(record) if record.job.state in asked else None
            return None

        async with self._turns.one(tenant_of(context)):
            shown, token = await _page(jobs, request, read)
        totals = [
            pb.JobStateTotal(state=state, jobs=count)
            for state, count in sorted(self._quotas.totals(tenant).items())
        ]
        return pb.ListJobsResponse(jobs=shown, next_page_token=token, totals=totals)

    async def WatchJob(self, request: pb.WatchJobRequest, context: Any) -> None:  # type: ignore[override]
        """See the proto."""
        told: pb.Job | None = None
        while True:
            job = _shown(await self._own(request.id, context))
            if job != told:
                await context.write(pb.WatchJobResponse(job=job))
                told = job
            if is_ended(job) or (request.until_paused and job.state == pb.JOB_STATE_PAUSED):
                return
            await asyncio.sleep(WATCH_S)

    async def PauseJob(self, request: pb.PauseJobRequest, context: Any) -> pb.PauseJobResponse:
        """See the proto."""

        def pause(record: JobRecord) -> None:
            job = record.job
            if job.state not in (pb.JOB_STATE_QUEUED, pb.JOB_STATE_RUNNING, pb.JOB_STATE_PAUSED):
                raise _over(job)
            if job.state != pb.JOB_STATE_PAUSED:
                reason = "a caller paused it; `sluice batch resume` continues it"
                set_state(job, pb.JOB_STATE_PAUSED, "PAUSED_BY_CALLER", reason, unix_ms())

        return pb.PauseJobResponse(job=await self._change(request.id, context, pause))

    async def ResumeJob(self, request: pb.ResumeJobRequest, context: Any) -> pb.ResumeJobResponse:
        """See the proto."""

        def resume(record: JobRecord) -> None:
            job = record.job
            if request.HasField("limits"):
                job.spec.limits.CopyFrom(request.limits)
            if job.state == pb.JOB_STATE_PAUSED:
                _pay_with_key(record, context)
                _queue(job)
            elif job.state in OVER:
                raise _over(job)

        if request.HasField("limits"):
            check_limits(request.limits)
            check_not_late(request.limits)
        return pb.ResumeJobResponse(job=await self._change(request.id, context, resume))

    async def CancelJob(self, request: pb.CancelJobRequest, context: Any) -> pb.CancelJobResponse:
        """See the proto."""

        def cancel(record: JobRecord) -> None:
            job = record.job
            if job.state == pb.JOB_STATE_CANCELLED:
                return
            if job.state in OVER:
                raise _over(job)
            code, reason = "CANCELLED_BY_CALLER", "a caller cancelled it"
            set_state(job, pb.JOB_STATE_CANCELLED, code, reason, unix_ms())
            job.report.progress.CopyFrom(job.progress)

        return pb.CancelJobResponse(job=await self._change(request.id, context, cancel))

    async def DeleteJob(self, request: pb.DeleteJobRequest, context: Any) -> pb.DeleteJobResponse:
        """See the proto."""
        record = await self._closed(request.id, context)
        if record.job.state not in OVER:
            raise WrongJobState("the job is not over: cancel it first")
        await self._quotas.ready()
        shared = set(self._quotas.users_of(record.upload_id)) - {record.job.id}
        upload = "" if shared else record.upload_id
        async with self._turns.one(tenant_of(context)):
            await self._store.delete(record.job.id, upload)
        self._quotas.job(record.job.id, None)
        self._quotas.upload(upload, None)
        return pb.DeleteJobResponse()

    async def GetResults(self, request: pb.GetResultsRequest, context: Any) -> None:  # type: ignore[override]
        """See the proto."""
        record = await self._readable(request.id, context)
        if request.follow and record.job.spec.stages and not request.HasField("stage"):
            record = await self._until_over(request.id, context)
        still = is_still(record.job)
        stage = reached_stage(record) if still else stages_of(record) - 1
        stage = request.stage if request.HasField("stage") else stage
        if stage >= stages_of(record):
            raise InvalidRequest.of("stage", f"the job has {stages_of(record)}")
        if request.follow and record.job.state not in OVER and not record.round:
            outcomes = self._followed(record, stage, request.from_index, context)
        else:
            found = merged(
                self._store, request.id, stage, record.round, request.from_index, past_gaps=still
            )
            outcomes = self._in_turn(context, found)
        async for page in _pages(outcomes):
            await context.write(pb.GetResultsResponse(results=page))

    async def ListDeadLetters(self, request: pb.ListDeadLettersRequest, context: Any) -> None:  # type: ignore[override]
        """See the proto."""
        record = await self._readable(request.id, context)
        letters = dead_letters(self._process, record, request.from_index)
        async for page in _pages(self._in_turn(context, letters)):
            await context.write(pb.ListDeadLettersResponse(results=page))

    async def RetryDeadLetters(
        self, request: pb.RetryDeadLettersRequest, context: Any
    ) -> pb.RetryDeadLettersResponse:
        """See the proto."""
        check_count("reasons", request.reasons, REASONS_MAX)
        asked = set(request.reasons)
        for reason in request.reasons:
            check_length("reasons", reason, NAME_CHARS_MAX)
        record = await self._readable(request.id, context)
        if record.job.spec.stages:
            raise WrongJobState(
                "a job with stages has no retries: submit it again, and name it in dedupe.reuse_job_ids;"
                " the answers to its parts are taken over"
            )
        items = 0
        async for one in dead_letters(self._process, record):
            reason = one.result.error.reason
            items += reason not in _NO_ITEMS and (not asked or reason in asked)
        if items and not record.job.spec.input.nats_subject:
            await self._store.upload(record.upload_id)  # it may have been deleted since

        def retry(record: JobRecord) -> None:
            if not is_ended(record.job):
                raise WrongJobState("the job is not over: its dead letters can run again then")
            record.round += 1
            record.stage = 0
            del record.retry_reasons[:]
            record.retry_reasons.extend(request.reasons)
            record.job.ClearField("report")
            record.job.ClearField("end_time")
            record.job.ClearField("results_expire_time")
            _pay_with_key(record, context)
            _queue(record.job)

        job = await self._change(request.id, context, retry) if items else _shown(record)
        return pb.RetryDeadLettersResponse(job=job, items=items)

    async def UploadInput(self, requests: Any, context: Any) -> pb.UploadInputResponse:
        """See the proto."""
        await self._quotas.ready()
        async with NewUpload(self._store, tenant_of(context), self._quotas) as upload:
            async for request in requests:
                if isinstance(request, SluiceError):
                    raise request
                upload.record.name = upload.record.name or request.name[-256:]
                if request.HasField("expires_after"):
                    check_expiry("expires_after", request.expires_after)
                    upload.record.expire_unix_ms = (
                        unix_ms() + request.expires_after.ToMilliseconds()
                    )
                if len(request.data) > _CHUNK_OF_CALL_MAX:
                    raise InvalidRequest.of("data", f"is over {_CHUNK_OF_CALL_MAX} bytes")
                await upload.add(request.data)
            await upload.complete()
        return pb.UploadInputResponse(
            upload_id=upload.id,
            size_bytes=upload.record.size_bytes,
            sha256=upload.record.sha256,
            expire_time=_expire_time(upload.record),
        )

    async def GetUpload(self, request: pb.GetUploadRequest, context: Any) -> pb.GetUploadResponse:
        """See the proto."""
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
        """See the proto."""
        tenant = scope_of(context)
        await self._quotas.ready()
        uploads = {
            page_key(known.complete_unix_ms, upload): upload
            for upload, known in self._quotas.uploads.items()
            if known.complete_unix_ms and tenant in (None, known.tenant)
        }

        async def read(upload_id: str) -> pb.Upload | None:
            with suppress(UploadUnknown):
                upload = await self._upload(tenant, upload_id)
                return pb.Upload(
                    upload_id=upload_id,
                    name=upload.name,
                    size_bytes=upload.size_bytes,
                    create_time=timestamp(upload.complete_unix_ms),
                    expire_time=_expire_time(upload),
                )
            return None

        async with self._turns.one(tenant_of(context)):
            shown, token = await _page(uploads, request, read)
        return pb.ListUploadsResponse(uploads=shown, next_page_token=token)

    async def DeleteUpload(
        self, request: pb.DeleteUploadRequest, context: Any
    ) -> pb.DeleteUploadResponse:
        """See the proto."""
        await self._upload(scope_of(context), request.upload_id)
        await self._quotas.ready()
        for job in self._quotas.users_of(request.upload_id):
            with suppress(JobUnknown):
                record, _ = await self._store.read(job)
                if record.upload_id == request.upload_id and record.job.state not in OVER:
                    raise WrongJobState(
                        f"job {job} reads this upload: cancel it, or wait for its end"
                    )
        await self._store.delete_upload(request.upload_id)
        self._quotas.upload(request.upload_id, None)
        return pb.DeleteUploadResponse()

    async def _upload(self, tenant: str | None, upload_id: str) -> UploadRecord:
        """A complete upload of ``tenant``; None: of any."""
        upload = await self._store.upload(upload_id)
        if tenant not in (None, upload.tenant):
            raise upload_unknown(upload_id)
        return upload

    async def _check(self, tenant: str, spec: pb.JobSpec) -> set[str]:
        """Check a specification; return the models that are there."""
        check_spec(spec)
        check_limits(spec.limits)
        source = spec.input.WhichOneof("source")
        if source is None:
            raise InvalidRequest.of("spec.input", "name an upload, a URL or a subject")
        if spec.stages:
            check_stages(spec)
        await self._check_reused(tenant, spec.dedupe.reuse_job_ids)
        await self._outside.check(self._store, tenant, spec)
        if spec.input.template:
            Template(spec.input.template)
        if source == "upload_id":
            await self._upload(tenant, spec.input.upload_id)
        asked = {spec.model, *(stage.model for stage in spec.stages)} - {""}
        known = await self._known_models()
        if unknown := sorted(asked - known):
            names = ", ".join(sorted(known))
            raise UnknownModel(
                f"spec.model: no model {unknown[0]!r}; there are {names}",
                metadata={"models": names},
            )
        return known

    async def _check_reused(self, tenant: str, jobs: Sequence[str]) -> None:
        for job in jobs:
            record, _ = await self._store.read(job)
            _check_owner(record, tenant)

    async def _fingerprint(self, spec: pb.JobSpec) -> bytes:
        """A hash that is equal for a file that is sent again, and for a deadline that counts from now."""
        named = pb.JobSpec()
        named.CopyFrom(spec)
        if spec.input.upload_id:
            upload = await self._store.upload(spec.input.upload_id)
            named.input.upload_id = upload.sha256.hex()
        named.limits.ClearField("deadline_time")
        return hashlib.sha256(named.SerializeToString(deterministic=True)).digest()

    async def _own(self, job: str, context: Any) -> JobRecord:
        async with self._turns.one(tenant_of(context)):
            record, _ = await self._store.read(job)
        _check_owner(record, scope_of(context))
        return record

    async def _in_turn(
        self, context: Any, outcomes: AsyncIterator[_Entry]
    ) -> AsyncIterator[_Entry]:
        """``outcomes``, each read in a turn of the caller's tenant."""
        tenant = tenant_of(context)
        while True:
            async with self._turns.one(tenant):
                found = await anext(outcomes, None)
            if found is None:
                return
            yield found

    async def _change(self, job: str, context: Any, edit: Callable[[JobRecord], None]) -> pb.Job:
        tenant = scope_of(context)

        def checked(record: JobRecord) -> None:
            _check_owner(record, tenant)
            edit(record)

        async with self._turns.one(tenant_of(context)):
            record = await self._store.change(job, checked)
        self._quotas.job(job, record)
        return _shown(record)

    async def _closed(self, job: str, context: Any) -> JobRecord:
        """Return the record of a job; one that ended early is waited for until it is closed.

        Raises:
            TransportUnavailable: that takes too long.
        """
        waited_until = time.monotonic() + CLOSED_S
        while (record := await self._own(job, context)).job.closing:
            if time.monotonic() > waited_until:
                message = f"job {job} has ended, and its items are still being counted: try again"
                raise TransportUnavailable(message, retry_after_s=FOLLOW_S)
            await asyncio.sleep(CLOSED_POLL_S)
        return record

    async def _readable(self, job: str, context: Any) -> JobRecord:
        """Return the record of a job as `_closed`; raise WrongJobState when its results have expired."""
        record = await self._closed(job, context)
        if 0 < ms_of(record.job.results_expire_time) <= unix_ms():
            raise WrongJobState("the results of the job have expired: submit it again")
        return record

    async def _until_over(self, job: str, context: Any) -> JobRecord:
        """How many stages it has is known at its end."""
        while True:
            record = await self._own(job, context)
            if is_ended(record.job):
                return record
            await asyncio.sleep(FOLLOW_S)

    async def _followed(
        self, record: JobRecord, stage: int, first: int, context: Any
    ) -> AsyncIterator[ItemOutcome]:
        """Follows the results of the first pass until the job is over."""
        log, job = OrderedLog(self._store, record.job.id, stage, 0, first), record.job.id
        while True:
            over = is_ended((await self._own(job, context)).job)
            async for outcome in self._in_turn(context, log.read(past_gaps=over)):
                yield outcome
            if over:
                return
            await asyncio.sleep(FOLLOW_S)


_NO_ITEMS: Final = ("BAD_LINE", "DUPLICATE_ID")


async def _pages(outcomes: AsyncIterator[ItemOutcome]) -> AsyncIterator[list[pb.JobResult]]:
    """A page is sent when it is full, or when the next result has to be waited for."""
    page: list[pb.JobResult] = []
    size, since = 0, time.monotonic()
    async for outcome in outcomes:
        page.append(outcome.result)
        size += outcome.result.ByteSize()
        if size >= PAGE_BYTES or time.monotonic() - since >= FOLLOW_S:
            yield page
            page, size, since = [], 0, time.monotonic()
    if page:
        yield page


def tenant_of(context: Any) -> str:
    """The tenant that the gateway passed on.

    Raises:
        InvalidRequest: it is none.
    """
    metadata = dict(context.invocation_metadata() or ())
    tenant = str(metadata.get(TENANT_METADATA, "default"))
    if not is_token(tenant):
        raise InvalidRequest.of(TENANT_METADATA, "use up to 64 letters, digits, '-' and '_'")
    return tenant


def scope_of(context: Any) -> str | None:
    """The one tenant whose jobs the caller may see or change, as the gateway says; None: every tenant's."""
    metadata = dict(context.invocation_metadata() or ())
    return None if ALL_TENANTS_METADATA in metadata else tenant_of(context)


def key_of(context: Any) -> str:
    """Return the id of the API key that the gateway passed on; empty: the caller has shown none."""
    return str(dict(context.invocation_metadata() or ()).get(KEY_METADATA, ""))


def _pay_with_key(record: JobRecord, context: Any) -> None:
    """Let a job that goes on take from the limits of the key that says so; an operator's leaves it as it is."""
    if tenant_of(context) == record.job.tenant:
        record.key_id = key_of(context)


def new_job_id(tenant: str, key: str) -> str:
    """A job's id: one and the same for a tenant's key; else one that no other job has."""
    if not key:
        return f"job-{secrets.token_hex(10)}"
    return f"job-{hashlib.sha256(f'{tenant}/{key}'.encode()).hexdigest()[:20]}"


def _check_owner(record: JobRecord, tenant: str | None) -> None:
    if tenant not in (None, record.job.tenant):
        raise job_unknown(record.job.id)


def _queue(job: pb.Job) -> None:
    job.runner = ""
    set_state(job, pb.JOB_STATE_QUEUED, "", "", unix_ms())


def _over(job: pb.Job) -> WrongJobState:
    state = pb.JobState.Name(job.state).removeprefix("JOB_STATE_").lower()
    return WrongJobState(f"the job is {state} already")


def _shown(record: JobRecord) -> pb.Job:
    job = pb.Job()
    job.CopyFrom(record.job)
    job.spec.webhook.ClearField("secret")
    if not record.job.spec.HasField("webhook"):
        job.spec.ClearField("webhook")
    return job


def _expire_time(upload: UploadRecord) -> Timestamp | None:
    return timestamp(upload.expire_unix_ms) if upload.expire_unix_ms else None


async def _page(
    entries: Mapping[str, str],
    request: pb.ListJobsRequest | pb.ListUploadsRequest,
    read: Callable[[str], Coroutine[Any, Any, _Listed | None]],
) -> tuple[list[_Listed], str]:
    """What ``read`` gives of ``entries``, by their keys, on the page that ``request`` names; and the name of the next.

    A few are read at the same time; those that are gone (None) are left out. A page ends at `LIST_BYTES` too.
    """
    check_length("page_token", request.page_token, PAGE_TOKEN_CHARS_MAX)
    size = min(request.page_size or PAGE_SIZE, PAGE_SIZE_MAX)
    keys = sorted(key for key in entries if key > request.page_token)
    shown: list[_Listed] = []
    listed_bytes = 0
    for begin in range(0, min(size, len(keys)), READS):
        some = keys[begin : min(begin + READS, size)]
        found = await asyncio.gather(*(read(entries[key]) for key in some))
        for key, one in zip(some, found, strict=True):
            if one is not None:
                shown.append(one)
                listed_bytes += one.ByteSize()
            if listed_bytes >= LIST_BYTES:
                return shown, key if key < keys[-1] else ""
    return shown, keys[size - 1] if len(keys) > size else ""
