"""Which jobs this process runs: it takes those that nobody has, most urgent first, while it has room."""

import asyncio
import logging
import time
from contextlib import suppress
from typing import Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from opentelemetry.trace import Tracer

from jobs.core.leases import BEAT_S, Leases, shares, urgency
from jobs.gateways import Gateways
from jobs.metrics import JobMetrics
from jobs.notify import Notifier
from jobs.runner import JobRunner
from jobs.store import JobStore
from jobs.uploads import Outside
from sluice.errors import JobUnknown, SluiceError
from sluice.internal.v1.job_pb2 import JobRecord
from sluice.settings import JobsSettings
from sluice.v1.jobs_pb2 import JOB_STATE_QUEUED, JOB_STATE_RUNNING
from sluice.wire import subjects
from sluice.wire.clock import timestamp, unix_ms

_log = logging.getLogger(__name__)

SCAN_S: Final = 30.0
"""How often all records are read, whatever was heard of them."""
UNUSED_UPLOAD_MS: Final = 24 * 3600 * 1000
"""An upload that no job uses is kept this long."""
_LIVE: Final = frozenset({JOB_STATE_QUEUED, JOB_STATE_RUNNING})


class Scheduler:
    """The jobs of one process."""

    def __init__(
        self,
        settings: JobsSettings,
        store: JobStore,
        gateways: Gateways,
        outside: Outside,
        process: str,
        tracer: Tracer,
        metrics: JobMetrics,
    ) -> None:
        self._settings = settings
        self._store = store
        self._gateways = gateways
        self._outside = outside
        self._notifier = Notifier(store, outside)
        self._process = process
        self._tracer = tracer
        self._metrics = metrics
        self._leases = Leases(process)
        self._live: set[str] = set()
        self._runners: dict[str, JobRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        metrics.show(self._runners.values())
        self._heard = asyncio.Event()
        self._scanned_at = float("-inf")

    async def start(self, client: Client) -> None:
        """Listens to changes of records."""
        pattern = f"{subjects.bucket_prefix(subjects.JOBS_BUCKET)}*"
        await client.subscribe(pattern, cb=self._on_change)

    async def run(self) -> None:
        """Takes jobs until it is cancelled."""
        while True:
            try:
                await self._look()
            except SluiceError as error:
                _log.warning("jobs cannot be looked for: %s", error)
            except Exception:  # without this loop no job is taken any more
                _log.exception("the scheduler failed")
            self._heard.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._heard.wait()

    async def close(self) -> None:
        """Leaves all jobs to other processes."""
        for runner in self._runners.values():
            runner.stop()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        await self._notifier.close()

    async def _on_change(self, message: Msg) -> None:
        """A hint: the write may have been refused."""
        job = message.subject.rpartition(".")[2]
        if job not in self._runners:
            self._live.add(job)
            self._heard.set()

    async def _look(self) -> None:
        now = time.monotonic()
        if now - self._scanned_at >= SCAN_S:
            await self._scan()
            self._scanned_at = now
        found = [await self._candidate(job, now) for job in self._live - self._runners.keys()]
        free = [one for one in found if one is not None]
        for record, revision in sorted(free, key=lambda one: urgency(one[0])):
            if len(self._runners) >= self._settings.running_max:
                return
            await self._take(record, revision)

    async def _scan(self) -> None:
        """Reads all records; uploads that no job has used for a day are deleted."""
        oldest_ms, used = unix_ms() - UNUSED_UPLOAD_MS, set()
        # Uploads first: a job that is created meanwhile is seen.
        uploads = [one async for one in self._store.uploads() if one[1].create_unix_ms < oldest_ms]
        async for record in self._store.records():
            self._notifier.look(record)
            used.add(record.upload_id)
            if record.job.state in _LIVE:
                self._live.add(record.job.id)
        for upload, _ in uploads:
            if upload not in used:
                await self._store.delete_upload(upload)

    async def _candidate(self, job: str, now: float) -> tuple[JobRecord, int] | None:
        try:
            record, revision = await self._store.read(job)
        except JobUnknown:
            self._live.discard(job)
            return None
        self._notifier.look(record)
        if record.job.state not in _LIVE:
            self._live.discard(job)
        return (record, revision) if self._leases.may_take(record, revision, now) else None

    async def _take(self, record: JobRecord, revision: int) -> None:
        job = record.job
        job.state, job.runner, job.reason, job.reason_code = (
            JOB_STATE_RUNNING,
            self._process,
            "",
            "",
        )
        record.epoch += 1
        if not job.HasField("start_time"):
            job.start_time.CopyFrom(timestamp(unix_ms()))
        taken = await self._store.write(record, revision)
        if taken is None:
            return
        _log.info("job %s is taken, time %d", job.id, record.epoch)
        runner = JobRunner(
            self._store,
            self._gateways,
            self._outside,
            self._process,
            self._tracer,
            self._metrics,
            record,
            taken,
        )
        self._runners[job.id] = runner
        self._tasks[job.id] = asyncio.create_task(self._run(runner), name=f"job {job.id}")
        self._divide()

    async def _run(self, runner: JobRunner) -> None:
        try:
            await runner.run()
        except Exception:  # other jobs go on
            _log.exception("job %s failed", runner.job)
        finally:
            del self._runners[runner.job], self._tasks[runner.job]
            self._divide()
            self._live.add(runner.job)
            self._heard.set()

    def _divide(self) -> None:
        tenants = {job: runner.tenant for job, runner in self._runners.items()}
        for job, share in shares(self._settings.window_items, tenants).items():
            self._runners[job].share(share)
