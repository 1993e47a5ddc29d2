"""Runs one claimed job: its stages one after the other, its record written once a second.

Every write of the record names the revision that it replaces. If the record has another one,
somebody has paused, cancelled or claimed the job: the record is read again, and the job ends here
or continues accordingly.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from opentelemetry.trace import SpanKind

from jobs.answers import DedupeCache
from jobs.core.leases import HEARTBEAT_S, OVER, clear_progress, set_state
from jobs.core.pace import Throughput
from jobs.core.work import JobWork
from jobs.process import JobProcess, JobStopped, input_unreadable
from jobs.results import Totals, stages_of
from jobs.sources import MessageSource, retry_dead_letters
from jobs.stage_attempt import StageAttempt
from jobs.stages import Source, open_stage
from jobs.store import RETRY_AFTER_S, Fenced, new_upload_id
from jobs.uploads import SourceUnreachable
from sluice import errors
from sluice.defaults import KEY_METADATA, TENANT_METADATA
from sluice.internal.v1.job_pb2 import JobCheckpoint, JobRecord
from sluice.telemetry import names
from sluice.telemetry.tracing import headers_of
from sluice.v1 import jobs_pb2 as pb
from sluice.wire.clock import duration, ms_of, unix_ms

logger = logging.getLogger(__name__)

FLUSH_S: Final = 3.0
"""How long a stopped job may take to write what has come back, in seconds."""


class JobRunner:
    """One job in this process.

    Attributes:
        job: its id.
        tenant: its owner.
        record: as this process last wrote it.
        concurrency: items that it may have in flight.
        heartbeat_at: when its record was last written, in monotonic seconds.
    """

    def __init__(self, process: JobProcess, record: JobRecord, revision: int) -> None:
        self._process = process
        self.record = record
        self._revision = revision
        self.job = record.job.id
        self.tenant = record.job.tenant
        self._epoch = record.epoch
        self.concurrency = 1
        self._attempt: StageAttempt | None = None
        self._source: Source | None = None
        self._earlier = Totals()
        self._stored_bytes = record.results_bytes
        self._throughput = Throughput()
        self.heartbeat_at = time.monotonic()
        self._work_used = JobWork(record.use)
        self._wait_reason = ""
        self._stopped = asyncio.Event()
        self._writing = asyncio.Lock()

    @property
    def in_flight(self) -> int:
        """Number of items that were sent and not answered yet."""
        return 0 if self._attempt is None else self._attempt.window.in_flight

    def stop(self) -> None:
        """Make `run` end and leave the job to another process."""
        self._stopped.set()

    def share(self, concurrency: int) -> None:
        """Set how many items it may have in flight."""
        limit = self.record.job.spec.limits.concurrency
        self.concurrency = min(concurrency, limit) if limit else concurrency
        if self._attempt is not None:
            self._attempt.set_concurrency(self.concurrency)

    async def run(self) -> None:
        """Run the job until it ends, is paused, is lost, or `stop` is called."""
        # Whichever ends first ends the run: the work, a failed heartbeat, or `stop`.
        working = asyncio.ensure_future(self._work())
        beating = asyncio.ensure_future(self._heartbeat())
        stopping = asyncio.ensure_future(self._stopped.wait())
        tasks = (working, beating, stopping)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        ended = [task for task in (beating, working) if not task.cancelled()]
        error = next((task.exception() for task in ended if task.exception()), None)
        # The new owner continues from the log; this process must write nothing more.
        if isinstance(error, Fenced):
            logger.info("lost the lease on job %s: another process owns it", self.job)
            return
        await self._leave(error)

    async def _leave(self, error: BaseException | None) -> None:
        """Write what has come back, and why the job stops here."""
        try:
            async with asyncio.timeout(FLUSH_S):
                # Outcomes that are not stored are computed again.
                with suppress(errors.StorageFull):
                    if self._attempt is not None:
                        await self._attempt.flush()
                await self._edit(partial(self._note_end, error))
        except (TimeoutError, errors.SluiceError, Fenced) as problem:
            logger.warning("writing the end of job %s failed: %s", self.job, problem)

    def _note_end(self, error: BaseException | None, record: JobRecord) -> None:
        job, now_ms = record.job, unix_ms()
        job.runner = ""
        if job.state == pb.JOB_STATE_RUNNING:
            match error:
                case JobStopped():
                    set_state(job, error.state, error.code, str(error), now_ms)
                case errors.StorageFull() | errors.LimitReached():
                    message = f"{error.message}; then resume the job"
                    set_state(job, pb.JOB_STATE_PAUSED, error.reason, message, now_ms)
                case errors.SluiceError():
                    set_state(job, pb.JOB_STATE_FAILED, error.reason, error.message, now_ms)
                case Exception():
                    logger.error("job %s failed", self.job, exc_info=error)
                    message = "the jobs service failed; its log has the reason"
                    set_state(job, pb.JOB_STATE_FAILED, "INTERNAL", message, now_ms)
                case _ if record.stage >= stages_of(record):
                    set_state(job, pb.JOB_STATE_COMPLETED, "", "", now_ms)
        clear_progress(job.progress)
        if job.state in OVER:
            job.report.CopyFrom(self._report(record))

    # Working.

    async def _work(self) -> None:
        tracer = self._process.tracer
        with tracer.start_as_current_span(names.SPAN_JOB, kind=SpanKind.INTERNAL) as span:
            span.set_attributes({names.JOB_ID: self.job, names.TENANT: self.tenant})
            key = ((KEY_METADATA, self.record.key_id),) if self.record.key_id else ()
            metadata = ((TENANT_METADATA, self.tenant), *key, *headers_of(span).items())
            # Each pass is one attempt at a stage; an outage of JetStream or of all gateways repeats it from the log.
            while self.record.stage < stages_of(self.record):
                try:
                    self._process.quotas.check_bytes(self.tenant, "results")
                    await self._fetch()
                    again = await self._run_stage(metadata)
                    await self._edit(partial(_next_stage, again))
                except errors.TransportUnavailable as error:
                    self._wait_for(error.message)
                    await asyncio.sleep(RETRY_AFTER_S)

    def _wait_for(self, cause: str) -> None:
        """Set why the job waits, and log a new reason."""
        if cause != self._wait_reason:
            self._wait_reason = cause
            logger.warning("job %s is waiting: %s", self.job, cause)

    async def _fetch(self) -> None:
        """Copy the input at a URL into the store, once, or name the upload for messages."""
        process, source = self._process, self.record.job.spec.input
        if self.record.upload_id:
            return
        if source.nats_subject:  # its record comes with the first messages
            process.quotas.check_count(self.tenant, "uploads")
            upload = new_upload_id()
        else:
            try:
                upload = await process.outside.fetch(
                    process.store, self.tenant, source.url, process.quotas, self._wait_for
                )
            except errors.InvalidRequest as error:
                raise input_unreadable(error) from error
            except SourceUnreachable as error:
                message = f"{error}; make the URL reachable, then resume the job"
                raise JobStopped("INPUT_UNREACHABLE", message) from error

        def note(record: JobRecord) -> None:
            record.upload_id = upload

        await self._edit(note)

    async def _run_stage(self, metadata: tuple[tuple[str, str], ...]) -> bool:
        """Run an attempt at the current stage; return whether documents have more than one answer left."""
        record, stage = self.record, self.record.stage
        self._earlier = await Totals.of(self._process.store, record, stage)
        spent = self._earlier.counts.cost
        with DedupeCache() as cache:
            attempt = StageAttempt(
                self._process, record, stage, metadata, cache, self._work_used, spent
            )
            attempt.set_concurrency(self.concurrency)
            await attempt.load()
            self._wait_reason = ""
            if self._attempt is not None:  # the attempt before, of another stage
                self._stored_bytes += self._attempt.log.written_bytes
            self._attempt, self._throughput = attempt, Throughput()
            self._sample(attempt)
            # Items that all have an outcome need not be parsed again, where indexes are lines.
            skipped = 0 if record.attempt or record.job.spec.stages else attempt.log.done.low_water
            self._source, blocks = await open_stage(self._process, record, stage, metadata, skipped)
            # A later attempt runs dead letters again, and nothing else.
            if record.attempt:
                blocks = retry_dead_letters(blocks, self._process.store, record, stage)
            await attempt.run(blocks, skipped)
            return attempt.log.checkpoint.split_documents > 0

    # The record.

    async def _heartbeat(self) -> None:
        while True:
            with suppress(errors.TransportUnavailable):
                await self._edit(lambda record: None)
                self._check_limits(self.record)
                if self._attempt is not None:
                    self._attempt.window.budget.limit = self.record.job.spec.limits.max_cost
                    self._attempt.changed.notify()
            await asyncio.sleep(HEARTBEAT_S)

    async def _edit(self, edit: Callable[[JobRecord], None]) -> None:
        """Write the record with the progress and what `edit` changes; stop if the job runs no longer.

        `edit` is called again if somebody else wrote the record meanwhile.

        Raises:
            Fenced: another process has the job, or it is gone.
            TransportUnavailable: JetStream does not respond.
        """
        async with self._writing:
            while True:
                record, noted_at = JobRecord(), time.monotonic()
                record.CopyFrom(self.record)
                record.running_ms += round((noted_at - self.heartbeat_at) * 1e3)
                self._note_progress(record)
                edit(record)
                revision = await self._process.store.write(record, self._revision)
                # None: somebody else wrote the record meanwhile; edit their version instead.
                if revision is not None:
                    self.record, self._revision = record, revision
                    self.heartbeat_at = noted_at
                    return
                await self._reload()

    async def _reload(self) -> None:
        try:
            fresh, self._revision = await self._process.store.read(self.job)
        except errors.JobUnknown as error:
            raise Fenced(self.job) from error
        # The epoch is the fence: another process has claimed the job.
        if fresh.epoch != self._epoch:
            raise Fenced(self.job)
        # Only the owner writes the stage, so ours is newer.
        fresh.stage = self.record.stage
        self.record = fresh
        if fresh.job.state != pb.JOB_STATE_RUNNING:
            self._stopped.set()

    def _note_progress(self, record: JobRecord) -> None:
        job, attempt = record.job, self._attempt
        record.use.CopyFrom(self._work_used.use)
        if isinstance(self._source, MessageSource) and self._source.sequence:
            job.nats_last_sequence = self._source.sequence
        wait_reason = self._wait_reason
        if attempt is not None:
            wait_reason = wait_reason or attempt.wait_reason
            job.progress.CopyFrom(self._progress(record, attempt))
            record.models[:] = sorted(attempt.models)
            record.results_bytes = self._stored_bytes + attempt.log.written_bytes
        if job.state == pb.JOB_STATE_RUNNING:
            job.reason = f"waiting: {wait_reason}" if wait_reason else ""

    def _progress(self, record: JobRecord, attempt: StageAttempt) -> pb.JobProgress:
        earlier, written = self._earlier, attempt.log.written
        progress = earlier.progress(written, record.attempt)
        progress.in_flight = attempt.window.in_flight
        progress.total_final = attempt.is_input_read or record.attempt > 0
        expected = earlier.counts.dead
        if not record.attempt:
            # While the input is being read, extrapolate the total from the share that was read.
            share = (
                1.0 if attempt.is_input_read or self._source is None else self._source.share_read
            )
            estimated = round(attempt.items_read / share) if share else 0
            progress.total = expected = max(written.total, attempt.items_read, estimated)
        progress.items_per_second, progress.tokens_per_second = self._sample(attempt)
        if progress.items_per_second:
            left_s = max(0, expected - written.total) / progress.items_per_second
            progress.remaining.CopyFrom(duration(left_s * 1e3))
        earlier.note_stages(progress, record)
        return progress

    def _sample(self, attempt: StageAttempt) -> tuple[float, float]:
        counts = attempt.log.checkpoint.counts
        return self._throughput.sample(time.monotonic(), counts.total, counts.completion_tokens)

    def _check_limits(self, record: JobRecord) -> None:
        """Raise JobStopped if the job has reached its cost limit or its deadline."""
        job, limits = record.job, record.job.spec.limits
        if 0 < ms_of(limits.deadline_time) <= unix_ms():
            message = "the deadline passed; read the answers that it has"
            raise JobStopped("DEADLINE_EXCEEDED", message, pb.JOB_STATE_EXPIRED)
        if 0 < limits.max_cost <= job.progress.cost:
            cost = f"{job.progress.cost:g} of at most {limits.max_cost:g}"
            message = f"it has cost {cost}; resume the job with a higher --max-cost"
            raise JobStopped("MAX_COST_REACHED", message)

    def _report(self, record: JobRecord) -> pb.JobReport:
        progress, running_s = record.job.progress, max(1e-3, record.running_ms / 1e3)
        point = JobCheckpoint() if self._attempt is None else self._attempt.log.checkpoint
        use = record.use
        cells = use.batch_tokens + use.padding_tokens
        return pb.JobReport(
            progress=progress,
            running_time=duration(record.running_ms),
            items_per_second=(progress.succeeded + progress.dead) / running_s,
            tokens_per_second=progress.completion_tokens / running_s,
            dead_by_reason=self._earlier.dead_by_reason(point),
            workers_busy_share=min(1.0, use.busy_s / use.worker_s) if use.worker_s else None,
            padding_share=use.padding_tokens / cells if cells else None,
        )


def _next_stage(again: bool, record: JobRecord) -> None:
    record.stage += 1
    if again and record.stage == stages_of(record):
        record.stages = record.stage + 1
