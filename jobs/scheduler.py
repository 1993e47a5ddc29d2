"""Scheduler: claims jobs that no process runs, most urgent first, while this process has capacity."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from nats.aio.client import Client
from nats.aio.msg import Msg

from jobs.closing import FollowUps
from jobs.core import leases
from jobs.core.pace import RateLimit
from jobs.process import JobProcess
from jobs.runner import FLUSH_S, JobRunner
from jobs.store import UPLOAD, read_record
from sluice.background import BackgroundTasks
from sluice.errors import JobUnknown, SluiceError
from sluice.internal.v1.job_pb2 import JobRecord, UploadRecord
from sluice.telemetry.instruments import Instruments, Point
from sluice.v1 import jobs_pb2 as pb
from sluice.wire import subjects
from sluice.wire.clock import ms_of, timestamp, unix_ms
from sluice.wire.enums import word_of
from sluice.wire.stream_keeper import REPEAT_S

logger = logging.getLogger(__name__)

COALESCE_S: Final = 0.02
"""How long changes of records are collected before they are handled, in seconds."""
STARTS_PER_MINUTE: Final = 600
"""Jobs of one tenant that a process starts per minute: starting and ending one takes more than a
small job itself."""
SCAN_S: Final = 30.0
"""Interval at which all records are read, whatever notifications arrived, in seconds."""
UNUSED_UPLOAD_MS: Final = 24 * 3600 * 1000
"""How long after its creation an upload that no job uses is kept, in milliseconds."""
_WAITING: Final = frozenset({pb.JOB_STATE_QUEUED, pb.JOB_STATE_PAUSED})
_STATES: Final = tuple(state for state in pb.JobState.values() if state != pb.JOB_STATE_UNSPECIFIED)
_RECORDS: Final = subjects.bucket_prefix(subjects.JOBS_BUCKET)


class JobScheduler:
    """Jobs of one process. It knows candidates from the index of all jobs (`Quotas.live`)."""

    def __init__(self, process: JobProcess) -> None:
        self._process = process
        self._store, self._quotas = process.store, process.quotas
        self._follow_ups = FollowUps(process)
        self._leases = leases.Leases(process.name)
        self._owned: set[str] = set()
        """Jobs that this process has run: what it has left is not lost."""
        self._abandoned: set[str] = set()
        """Running jobs without an owner."""
        self._yielding: set[str] = set()
        self._runners: dict[str, JobRunner] = {}
        self._tasks = BackgroundTasks()
        self._register_gauges(process.instruments)
        self._changed = asyncio.Event()
        self._starts: dict[str, RateLimit] = {}
        self._scanned_at = self._abandoned_at = self._failed_at = float("-inf")

    async def start(self, client: Client) -> None:
        """Subscribe to changes of records."""
        await client.subscribe(f"{_RECORDS}>", cb=self._on_change)

    async def run(self) -> None:
        """Claim jobs until cancelled; also expire jobs, and delete expired results and unused uploads."""
        while True:
            self._changed.clear()
            try:
                await self._scan_due()
                self._failed_at = float("-inf")
            except SluiceError as error:
                now = time.monotonic()
                if now - self._failed_at >= REPEAT_S:
                    self._failed_at = now
                    logger.warning("job scan failed: %s", error)
                self._scanned_at = float("-inf")  # change notifications may have been lost
            except Exception:  # without this loop no job would be claimed any more
                logger.exception("job scan failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(leases.HEARTBEAT_S):
                    await self._changed.wait()
                await asyncio.sleep(COALESCE_S)

    async def close(self) -> None:
        """Leave all jobs to other processes; wait at most `2 * FLUSH_S` for what they still write."""
        for runner in self._runners.values():
            runner.stop()
        await self._tasks.settle(2 * FLUSH_S)
        await self._follow_ups.close()

    async def _on_change(self, message: Msg) -> None:
        """Handle a change of a record. It is only a hint: the write may have been refused."""
        key = message.subject.removeprefix(_RECORDS)
        if key.startswith(UPLOAD):  # uploads share the bucket with jobs
            upload = read_record(UploadRecord, key, message.data) if message.data else None
            self._quotas.upload(key.removeprefix(UPLOAD), upload)
            return
        record = read_record(JobRecord, key, message.data) if message.data else None
        self._quotas.job(key, record)
        if key not in self._runners and record is not None:
            self._follow_ups.on_record(record)
            self._changed.set()

    async def _scan_due(self) -> None:
        now = time.monotonic()
        if now - self._scanned_at >= SCAN_S:
            await self._scan()
            self._scanned_at = now
        await self._expire()
        await self._find_abandoned(now)
        while (chosen := self._next_job(now)) is not None:
            candidate = await self._claimable(chosen, now)
            self._abandoned.discard(chosen)
            if candidate is not None:
                tenant = candidate[0].job.tenant
                self._starts.setdefault(tenant, RateLimit(STARTS_PER_MINUTE, now)).consume(1)
                await self._claim(*candidate)

    async def _find_abandoned(self, now: float) -> None:
        """Find running jobs without an owner: once a second, and when this process has left one."""
        if now - self._abandoned_at < leases.HEARTBEAT_S:
            return
        self._abandoned.clear()
        self._abandoned_at = now
        for job, usage in list(self._quotas.live.items()):
            runs = usage.state == pb.JOB_STATE_RUNNING and job not in self._runners
            if runs and await self._claimable(job, now) is not None:
                self._abandoned.add(job)

    def _next_job(self, now: float) -> str | None:
        """Return the job to claim: the most urgent one of the tenant with the fewest; None: none, or no capacity.

        A tenant without a running job gets the place of a tenant that has several.
        """
        running = Counter(runner.tenant for runner in self._runners.values())
        suspected = any(leases.is_suspect(runner.record) for runner in self._runners.values())
        # A tenant without a rate limit has started no job yet.
        resting = {tenant for tenant, rate in self._starts.items() if rate.wait_s(now)}
        waiting = (
            (running[usage.tenant], *usage.urgency, job)
            for job, usage in self._quotas.live.items()
            if (usage.state == pb.JOB_STATE_QUEUED or job in self._abandoned)
            and job not in self._runners
            and usage.tenant not in resting
            and not (suspected and usage.suspect)
        )
        places = self._quotas.places_max
        # Sort by running jobs of the tenant, then by urgency; the default stands for no candidate.
        others, *_, first = min(waiting, default=(places, 0, 0, ""))
        if others >= places:
            return None
        if len(self._runners) < self._process.settings.running_max:
            return first
        # All places are taken: a tenant with several jobs yields its newest one to a tenant with none.
        tenant, count = running.most_common(1)[0]
        if not others and count > 1 and not self._yielding:
            newest = [job for job, runner in self._runners.items() if runner.tenant == tenant][-1]
            logger.info("yielding job %s: tenant %s runs %d others", newest, tenant, count - 1)
            self._yielding.add(newest)
            self._runners[newest].stop()
        return None

    async def _expire(self) -> None:
        """Expire waiting and paused jobs whose deadline has passed."""
        now_ms = unix_ms()
        for job, usage in list(self._quotas.live.items()):
            if usage.urgency[0] <= now_ms and usage.state in _WAITING:
                await self._change(job, _set_expired)

    async def _scan(self) -> None:
        """Read all records into the index; delete expired results, and uploads that are expired or unused."""
        quotas, now_ms = self._quotas, unix_ms()
        used, read = set[str](), set[str]()
        gone_jobs, gone_uploads = set(quotas.jobs), set(quotas.uploads)
        # Uploads before jobs: a job that is created in between then protects its upload.
        uploads = [upload async for upload in self._store.uploads()]
        async for record in self._store.records():
            job = record.job
            gone_jobs.discard(job.id)
            if job.id not in self._runners:
                self._follow_ups.on_record(record)
            quotas.job(job.id, record)
            used.add(record.upload_id)
            if not leases.is_ended(job):
                read.add(record.upload_id)
            elif record.results_bytes and 0 < ms_of(job.results_expire_time) <= now_ms:
                await self._store.delete_results(job.id)
                await self._change(job.id, _note_results_deleted)
        for upload, stored in uploads:
            # Only this process knows the size of an upload that it is receiving.
            if stored.size_bytes or upload not in gone_uploads:
                quotas.upload(upload, stored)
            gone_uploads.discard(upload)
            unused = upload not in used and stored.create_unix_ms < now_ms - UNUSED_UPLOAD_MS
            expired = upload not in read and 0 < stored.expire_unix_ms <= now_ms
            if unused or expired:
                await self._store.delete_upload(upload)
                quotas.upload(upload, None)
        for job_id in gone_jobs:
            quotas.job(job_id, None)
        for upload_id in gone_uploads:
            quotas.upload(upload_id, None)
        quotas.counted.set()
        self._owned &= quotas.jobs.keys() | self._runners.keys()
        tenants = {usage.tenant for usage in quotas.jobs.values()}
        self._starts = {name: rate for name, rate in self._starts.items() if name in tenants}

    async def _change(self, job: str, edit: Callable[[JobRecord], None]) -> None:
        """Change a record, and update the index of jobs."""
        try:
            self._quotas.job(job, await self._store.change(job, edit))
        except JobUnknown:
            self._quotas.job(job, None)

    async def _claimable(self, job: str, now: float) -> tuple[JobRecord, int] | None:
        try:
            record, revision = await self._store.read(job)
        except JobUnknown:
            self._quotas.job(job, None)
            return None
        self._quotas.job(job, record)
        return (record, revision) if self._leases.may_claim(record, revision, now) else None

    async def _claim(self, record: JobRecord, revision: int) -> None:
        job = record.job
        # An owner that is still named ended without leaving the job, perhaps because of the job.
        if job.runner and job.id not in self._owned:
            leases.record_loss(record)
            if record.lost_processes >= leases.LOST_MAX:
                await self._give_up(record, revision)
                return
        job.runner = self._process.name
        leases.set_state(job, pb.JOB_STATE_RUNNING, "", "", unix_ms())
        record.epoch += 1
        if not job.HasField("start_time"):
            job.start_time.CopyFrom(timestamp(unix_ms()))
        new_revision = await self._store.write(record, revision)
        if new_revision is None:
            return  # Another process wrote the record first; the next scan reads it again.
        self._owned.add(job.id)
        logger.info("claimed job %s (epoch %d)", job.id, record.epoch)
        self._runners[job.id] = runner = JobRunner(self._process, record, new_revision)
        self._tasks.spawn(self._run(runner))
        self._share_window()

    async def _give_up(self, record: JobRecord, revision: int) -> None:
        """Fail a job with which several processes ended in a row: it would end this one too."""
        job = record.job
        job.runner = ""
        message = (
            f"{record.lost_processes} jobs processes ended while they ran it, without a result; its "
            "input may need too much memory, see the log of the last process"
        )
        leases.set_state(job, pb.JOB_STATE_FAILED, leases.PROCESSES_LOST, message, unix_ms())
        logger.error("job %s fails: %s", job.id, job.reason)
        await self._store.write(record, revision)
        await self._claimable(job.id, time.monotonic())

    async def _run(self, runner: JobRunner) -> None:
        try:
            await runner.run()
        except Exception:  # other jobs continue
            logger.exception("job %s failed", runner.job)
        finally:
            del self._runners[runner.job]
            self._yielding.discard(runner.job)
            self._follow_ups.on_record(
                runner.record
            )  # `_on_change` ignores what this process writes
            self._share_window()
            self._abandoned_at = float("-inf")
            self._changed.set()

    def _register_gauges(self, instruments: Instruments) -> None:
        """Register gauges, which are read on other threads."""

        def show(name: str, read: Callable[[list[JobRunner]], float]) -> None:
            instruments.observe(name, lambda: [((), read(list(self._runners.values())))])

        def oldest_s(runners: list[JobRunner]) -> float:
            return max((time.monotonic() - runner.heartbeat_at for runner in runners), default=0.0)

        def by_state() -> list[Point]:
            totals = self._quotas.totals()
            return [((word_of(pb.JobState, state),), totals[state]) for state in _STATES]

        instruments.observe("sluice.jobs", by_state)
        show("sluice.jobs.running", len)
        show("sluice.jobs.window", lambda runners: sum(run.concurrency for run in runners))
        show("sluice.jobs.in_flight", lambda runners: sum(run.in_flight for run in runners))
        show("sluice.jobs.oldest_lease", oldest_s)

    def _share_window(self) -> None:
        tenants = {job: runner.tenant for job, runner in self._runners.items()}
        for job, share in leases.shares(self._process.settings.window_items, tenants).items():
            self._runners[job].share(share)


def _set_expired(record: JobRecord) -> None:
    """Expire a job if it still waits or is paused, and is late: the index may be older than the record."""
    job = record.job
    if job.state in _WAITING and leases.urgency(record)[0] <= unix_ms():
        job.runner = ""  # nobody runs it, so closing need not wait for an owner
        message = "the deadline passed before it was complete; read the answers that it has"
        leases.set_state(job, pb.JOB_STATE_EXPIRED, "DEADLINE_EXCEEDED", message, unix_ms())


def _note_results_deleted(record: JobRecord) -> None:
    record.results_bytes = 0
