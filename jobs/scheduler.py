"""Which jobs this process runs: it takes those that nobody has, most urgent first, while it has room."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from nats.aio.client import Client
from nats.aio.msg import Msg

from jobs.closing import Closer
from jobs.core.leases import (
    BEAT_S,
    LOST_MAX,
    PROCESSES_LOST,
    Leases,
    is_ended,
    note_loss,
    set_state,
    shares,
)
from jobs.core.pace import Rate
from jobs.notify import Notifier
from jobs.process import JobProcess
from jobs.runner import JobRunner
from jobs.store import read_record
from sluice.errors import JobUnknown, SluiceError
from sluice.internal.v1.job_pb2 import JobRecord, UploadRecord
from sluice.telemetry import catalog
from sluice.telemetry.catalog import Metric
from sluice.telemetry.instruments import Instruments, Point
from sluice.v1.jobs_pb2 import (
    JOB_STATE_EXPIRED,
    JOB_STATE_FAILED,
    JOB_STATE_PAUSED,
    JOB_STATE_QUEUED,
    JOB_STATE_RUNNING,
    JOB_STATE_UNSPECIFIED,
    JobState,
)
from sluice.wire import subjects
from sluice.wire.clock import ms_of, timestamp, unix_ms
from sluice.wire.enums import word_of
from sluice.wire.stream_keeper import REPEAT_S

_log = logging.getLogger(__name__)

GATHER_S: Final = 0.02
"""Changes of records are gathered for so long."""
EXPIRED_AT_ONCE: Final = 16
STARTS_PER_MINUTE: Final = 600
"""The jobs of one tenant that a process starts: beginning and ending one takes more than a small job itself."""
SCAN_S: Final = 30.0
"""How often all records are read, whatever was heard of them."""
UNUSED_UPLOAD_MS: Final = 24 * 3600 * 1000
"""An upload that no job uses is kept this long."""
_WAITING: Final = frozenset({JOB_STATE_QUEUED, JOB_STATE_PAUSED})
_STATES: Final = tuple(state for state in JobState.values() if state != JOB_STATE_UNSPECIFIED)
_RECORDS: Final = subjects.bucket_prefix(subjects.JOBS_BUCKET)


class Scheduler:
    """The jobs of one process. Those that it may take it knows by the index of all (`Quotas.live`)."""

    def __init__(self, process: JobProcess) -> None:
        self._process = process
        self._store, self._quotas = process.store, process.quotas
        self._notifier = Notifier(process.store, process.outside)
        self._closer = Closer(process)
        self._leases = Leases(process.name)
        self._had: set[str] = set()
        """Jobs that this process has run: what it has left is not lost."""
        self._left: set[str] = set()
        """Running jobs that no process has any more."""
        self._leaving: set[str] = set()
        self._runners: dict[str, JobRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._show(process.instruments)
        self._heard = asyncio.Event()
        self._starts: dict[str, Rate] = {}
        self._scanned_at = self._left_at = self._failed_at = float("-inf")

    async def start(self, client: Client) -> None:
        """Listens to changes of records."""
        await client.subscribe(f"{_RECORDS}>", cb=self._on_change)

    async def run(self) -> None:
        """Takes jobs until it is cancelled."""
        while True:
            self._heard.clear()
            try:
                await self._look()
                self._failed_at = float("-inf")
            except SluiceError as error:
                now = time.monotonic()
                if now - self._failed_at >= REPEAT_S:
                    self._failed_at = now
                    _log.warning("job scan failed: %s", error)
                self._scanned_at = float("-inf")  # changes may not have been heard
            except Exception:  # without this loop no job is taken any more
                _log.exception("the scheduler failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._heard.wait()
                await asyncio.sleep(GATHER_S)

    async def close(self) -> None:
        """Leaves all jobs to other processes."""
        for runner in self._runners.values():
            runner.stop()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        await self._notifier.close()
        await self._closer.close()

    def _look_at(self, record: JobRecord) -> None:
        """Do what is due for a job that this process does not run: close it, tell of it."""
        self._closer.look(record)
        self._notifier.look(record)

    async def _on_change(self, message: Msg) -> None:
        """A hint: the write may have been refused."""
        key = message.subject.removeprefix(_RECORDS)
        if key.startswith("upload."):
            upload = read_record(UploadRecord, key, message.data) if message.data else None
            self._quotas.upload(key.removeprefix("upload."), upload)
            return
        record = read_record(JobRecord, key, message.data) if message.data else None
        self._quotas.job(key, record)
        if key not in self._runners and record is not None:
            self._look_at(record)
            self._heard.set()

    async def _look(self) -> None:
        now = time.monotonic()
        if now - self._scanned_at >= SCAN_S:
            await self._scan()
            self._scanned_at = now
        await self._expire()
        await self._find_left(now)
        while (chosen := self._next(now)) is not None:
            candidate = await self._candidate(chosen, now)
            self._left.discard(chosen)
            if candidate is not None:
                tenant = candidate[0].job.tenant
                self._starts.setdefault(tenant, Rate(STARTS_PER_MINUTE, now)).took(1)
                await self._take(*candidate)

    async def _find_left(self, now: float) -> None:
        """Jobs that are running and that nobody has: once a second, and when this process has left one."""
        if now - self._left_at < BEAT_S:
            return
        self._left.clear()
        self._left_at = now
        for job, known in list(self._quotas.live.items()):
            runs = known.state == JOB_STATE_RUNNING and job not in self._runners
            if runs and await self._candidate(job, now) is not None:
                self._left.add(job)

    def _next(self, now: float) -> str | None:
        """The job to take: of the tenant with the fewest, the most urgent one; None: none, or there is no place.

        A tenant without a job that runs gets the place of a tenant that has several.
        """
        running = Counter(runner.tenant for runner in self._runners.values())
        suspected = any(runner.suspected for runner in self._runners.values())
        # Of a tenant without a rate none has begun.
        resting = {tenant for tenant, rate in self._starts.items() if rate.wait_s(now)}
        waiting = (
            (running[known.tenant], *known.urgency, job)
            for job, known in self._quotas.live.items()
            if (known.state == JOB_STATE_QUEUED or job in self._left)
            and job not in self._runners
            and known.tenant not in resting
            and not (suspected and known.suspect)
        )
        most = self._quotas.places_max
        others, *_, first = min(waiting, default=(most, 0, 0, ""))
        if others >= most:
            return None
        if len(self._runners) < self._process.settings.running_max:
            return first
        tenant, most = running.most_common(1)[0]
        if not others and most > 1 and not self._leaving:
            newest = [job for job, runner in self._runners.items() if runner.tenant == tenant][-1]
            _log.info("job %s waits: tenant %s has %d others", newest, tenant, most - 1)
            self._leaving.add(newest)
            self._runners[newest].stop()
        return None

    async def _expire(self) -> None:
        """Jobs that wait or are paused, and whose deadline has passed, are over."""
        now_ms = unix_ms()
        late = [
            job
            for job, known in self._quotas.live.items()
            if known.urgency[0] <= now_ms and known.state in _WAITING
        ]
        if late[EXPIRED_AT_ONCE:]:
            self._heard.set()  # the others follow; meanwhile jobs are taken
        for job in late[:EXPIRED_AT_ONCE]:
            try:
                self._quotas.job(job, await self._store.change(job, _expire))
            except JobUnknown:
                self._quotas.job(job, None)

    async def _scan(self) -> None:
        """Reads all records; uploads that no job has used for a day are deleted."""
        now_ms, used, read = unix_ms(), set(), set()
        oldest_ms = now_ms - UNUSED_UPLOAD_MS
        jobs: set[str] = set()
        jobs_before, uploads_before = self._quotas.known()
        # Uploads first: a job that is created meanwhile is seen.
        uploads = [one async for one in self._store.uploads()]
        async for record in self._store.records():
            jobs.add(record.job.id)
            if record.job.id not in self._runners:
                self._look_at(record)
            self._quotas.job(record.job.id, record)
            used.add(record.upload_id)
            if not is_ended(record.job):
                read.add(record.upload_id)
            elif record.results_bytes and 0 < ms_of(record.job.results_expire_time) <= now_ms:
                await self._expire_results(record.job.id)
        for upload, stored in uploads:
            # How far one is that is being received only this process knows.
            if stored.size_bytes or upload not in uploads_before:
                self._quotas.upload(upload, stored)
            unused = upload not in used and stored.create_unix_ms < oldest_ms
            expired = upload not in read and 0 < stored.expire_unix_ms <= now_ms
            if unused or expired:
                await self._store.delete_upload(upload)
                self._quotas.upload(upload, None)
        gone = uploads_before.difference(upload for upload, _ in uploads)
        self._quotas.forget(jobs_before - jobs, gone)
        self._quotas.counted.set()
        self._had &= jobs | self._runners.keys()
        tenants = {known.tenant for known in self._quotas.jobs.values()}
        self._starts = {name: rate for name, rate in self._starts.items() if name in tenants}

    async def _expire_results(self, job: str) -> None:
        def note(record: JobRecord) -> None:
            record.results_bytes = 0

        await self._store.delete_results(job)
        with suppress(JobUnknown):
            self._quotas.job(job, await self._store.change(job, note))

    async def _candidate(self, job: str, now: float) -> tuple[JobRecord, int] | None:
        try:
            record, revision = await self._store.read(job)
        except JobUnknown:
            self._quotas.job(job, None)
            return None
        self._quotas.job(job, record)
        return (record, revision) if self._leases.may_take(record, revision, now) else None

    async def _take(self, record: JobRecord, revision: int) -> None:
        job = record.job
        if job.runner and job.id not in self._had:
            note_loss(record)
            if record.lost_processes >= LOST_MAX:
                await self._give_up(record, revision)
                return
        job.runner = self._process.name
        set_state(job, JOB_STATE_RUNNING, "", "", unix_ms())
        record.epoch += 1
        if not job.HasField("start_time"):
            job.start_time.CopyFrom(timestamp(unix_ms()))
        taken = await self._store.write(record, revision)
        if taken is None:
            return  # its record is read again
        self._had.add(job.id)
        _log.info("job %s is taken, time %d", job.id, record.epoch)
        runner = JobRunner(self._process, record, taken)
        self._runners[job.id] = runner
        self._tasks[job.id] = asyncio.create_task(self._run(runner), name=f"job {job.id}")
        self._divide()

    async def _give_up(self, record: JobRecord, revision: int) -> None:
        """A job with which processes end, one after the other, would end this one too."""
        job, lost = record.job, record.lost_processes
        job.runner = ""
        message = (
            f"{lost} processes of jobs ended while they ran it, without a result: its input may take "
            "too much memory; the log of the last one has the reason"
        )
        set_state(job, JOB_STATE_FAILED, PROCESSES_LOST, message, unix_ms())
        _log.error("job %s fails: %s", job.id, job.reason)
        await self._store.write(record, revision)
        await self._candidate(job.id, time.monotonic())

    async def _run(self, runner: JobRunner) -> None:
        try:
            await runner.run()
        except Exception:  # other jobs go on
            _log.exception("job %s failed", runner.job)
        finally:
            del self._runners[runner.job], self._tasks[runner.job]
            self._leaving.discard(runner.job)
            self._look_at(runner.record)  # `_on_change` passes over what this process writes
            self._divide()
            self._left_at = float("-inf")
            self._heard.set()

    def _show(self, instruments: Instruments) -> None:
        """Gauges, which are read on other threads."""

        def show(name: Metric, read: Callable[[list[JobRunner]], float]) -> None:
            instruments.observe(name, lambda: [((), read(list(self._runners.values())))])

        def oldest_s(runners: list[JobRunner]) -> float:
            return max((time.monotonic() - one.beat_at for one in runners), default=0.0)

        def by_state() -> list[Point]:
            totals = self._quotas.totals()
            return [((word_of(JobState, state),), totals[state]) for state in _STATES]

        instruments.observe(catalog.JOBS, by_state)
        show(catalog.JOBS_RUNNING, len)
        show(catalog.JOB_WINDOW, lambda runners: sum(one.concurrency for one in runners))
        show(catalog.JOB_IN_FLIGHT, lambda runners: sum(one.in_flight for one in runners))
        show(catalog.OLDEST_LEASE, oldest_s)

    def _divide(self) -> None:
        tenants = {job: runner.tenant for job, runner in self._runners.items()}
        for job, share in shares(self._process.settings.window_items, tenants).items():
            self._runners[job].share(share)


def _expire(record: JobRecord) -> None:
    job = record.job
    if job.state in _WAITING:
        job.runner = ""
        message = "its deadline passed before it ran; what has an answer can be read"
        set_state(job, JOB_STATE_EXPIRED, "DEADLINE_EXCEEDED", message, unix_ms())
