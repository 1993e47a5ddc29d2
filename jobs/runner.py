"""One job in the hands of this process: its passes one after the other, its record written once a second.

Every write of the record names the revision that it replaces. When it has another one, somebody has paused, cancelled
or taken the job: the record is read again, and the job ends here or goes on with what it says now.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from opentelemetry.trace import SpanKind

from jobs.answers import AnswerCache
from jobs.core.leases import BEAT_S, OVER, is_suspect, set_state, stand_still
from jobs.core.pace import Speed
from jobs.core.retry import RetryPolicy
from jobs.core.work import JobWork
from jobs.messages import MessageSource
from jobs.process import JobProcess, JobStops, input_unreadable
from jobs.sources import retried
from jobs.stage_pass import StagePass
from jobs.stages import Source, open_stage
from jobs.store import RETRY_AFTER_S, Fenced
from jobs.totals import Totals, note_stages, stages_of, totals_of
from jobs.uploads import SourceUnreachable, begin_messages, fetched
from sluice.defaults import KEY_METADATA, TENANT_METADATA
from sluice.errors import (
    InvalidRequest,
    LimitReached,
    SluiceError,
    StorageFull,
    TransportUnavailable,
)
from sluice.internal.v1.job_pb2 import JobRecord
from sluice.telemetry import names
from sluice.telemetry.tracing import headers_of
from sluice.v1.jobs_pb2 import (
    JOB_STATE_COMPLETED,
    JOB_STATE_EXPIRED,
    JOB_STATE_FAILED,
    JOB_STATE_PAUSED,
    JOB_STATE_RUNNING,
    JobProgress,
    JobReport,
)
from sluice.wire.clock import duration, ms_of, unix_ms

_log = logging.getLogger(__name__)

FLUSH_S: Final = 3.0
"""How long a job that is stopped may take to write what has come back."""

FETCHING: Final = RetryPolicy(retries=5)
"""How an input at a URL is tried again that cannot be reached; then the job is paused."""

Edit = Callable[[JobRecord], None]


class JobLost(Exception):
    """The job is another process's by now, or it was deleted."""


class JobRunner:
    """One job.

    Attributes:
        job: its id.
        tenant: its owner.
        record: as this process wrote it last.
        concurrency: items that it may have in flight.
        beat_at: when its record was written last, monotonic seconds.
    """

    def __init__(self, process: JobProcess, record: JobRecord, revision: int) -> None:
        self._process = process
        self.record = record
        self._revision = revision
        self.job = record.job.id
        self.tenant = record.job.tenant
        self._epoch = record.epoch
        self.concurrency = 1
        self._pass: StagePass | None = None
        self._source: Source | None = None
        self._earlier = Totals()
        self._stored_bytes = record.results_bytes
        self._speed = Speed()
        self._begun_at = self.beat_at = time.monotonic()
        self._ran_ms = record.running_ms
        self._work_done, self._used = JobWork(), record.use
        self._trouble = ""
        self._stopped = asyncio.Event()
        self._writing = asyncio.Lock()

    @property
    def in_flight(self) -> int:
        """Items that were sent and not answered yet."""
        return 0 if self._pass is None else self._pass.window.in_flight

    @property
    def suspected(self) -> bool:
        """Whether processes ended while they had it, and it has no item more since."""
        return is_suspect(self.record)

    def stop(self) -> None:
        """Leaves the job to another process."""
        self._stopped.set()

    def share(self, concurrency: int) -> None:
        """How many items it may have in flight."""
        most = self.record.job.spec.limits.concurrency
        self.concurrency = min(concurrency, most) if most else concurrency
        if self._pass is not None:
            self._pass.set_concurrency(self.concurrency)

    async def run(self) -> None:
        """Runs the job until it ends, is paused, is lost, or `stop`."""
        working = asyncio.ensure_future(self._work())
        beating = asyncio.ensure_future(self._beat())
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
        if isinstance(error, JobLost | Fenced):
            _log.info("job %s goes on elsewhere", self.job)
            return
        await self._leave(error)

    async def _leave(self, error: BaseException | None) -> None:
        """Writes what has come back, and why the job stops here."""
        try:
            async with asyncio.timeout(FLUSH_S):
                with suppress(StorageFull):  # what is not stored is computed again
                    if self._pass is not None:
                        await self._pass.flush()
                await self._edit(lambda record: self._note_end(record, error))
        except (TimeoutError, SluiceError, Fenced, JobLost) as problem:
            _log.warning("job %s: its end was not written: %s", self.job, problem)

    def _note_end(self, record: JobRecord, error: BaseException | None) -> None:
        job = record.job
        job.runner = ""
        if job.state == JOB_STATE_RUNNING:
            self._note_state(record, error)
        stand_still(job.progress)
        if job.state in OVER:
            job.report.CopyFrom(self._report(record))

    def _note_state(self, record: JobRecord, error: BaseException | None) -> None:
        match error:
            case JobStops():
                end = error.state, error.code, str(error)
            case StorageFull() | LimitReached():
                end = JOB_STATE_PAUSED, error.reason, f"{error.message}; then resume the job"
            case SluiceError():
                end = JOB_STATE_FAILED, error.reason, error.message
            case Exception():
                _log.error("job %s failed", self.job, exc_info=error)
                message = "the service of jobs failed; its log has the reason"
                end = JOB_STATE_FAILED, "INTERNAL", message
            case _ if record.stage >= stages_of(record):
                end = JOB_STATE_COMPLETED, "", ""
            case _:
                return
        set_state(record.job, *end, unix_ms())

    # Working.

    async def _work(self) -> None:
        headers: dict[str, str] = {}
        tracer = self._process.tracer
        with tracer.start_as_current_span(names.SPAN_JOB, kind=SpanKind.INTERNAL) as span:
            span.set_attributes({names.JOB_ID: self.job, names.TENANT: self.tenant})
            headers = headers_of(span)
            key = ((KEY_METADATA, self.record.key_id),) if self.record.key_id else ()
            metadata = ((TENANT_METADATA, self.tenant), *key, *headers.items())
            while self.record.stage < stages_of(self.record):
                try:
                    self._process.quotas.check_results(self.tenant)
                    await self._fetch()
                    again = await self._run_stage(metadata)
                    await self._edit(partial(_next_stage, again))
                except TransportUnavailable as error:
                    self._wait_for(error.message)
                    await asyncio.sleep(RETRY_AFTER_S)

    def _wait_for(self, cause: str) -> None:
        """Note why the job waits, and log it when it is another cause than before."""
        if cause != self._trouble:
            self._trouble = cause
            _log.warning("job %s waits: %s", self.job, cause)

    async def _fetch(self) -> None:
        """Reads the input at a URL into the store, once; names the place of messages."""
        process, given = self._process, self.record.job.spec.input
        if self.record.upload_id:
            return
        try:
            if given.nats_subject:
                upload = await begin_messages(process.store, self.tenant, process.quotas)
            else:
                fetch = partial(
                    process.outside.fetch, process.store, self.tenant, given.url, process.quotas
                )
                upload = await fetched(fetch, FETCHING, self._wait_for)
        except InvalidRequest as error:
            raise input_unreadable(error) from error
        except SourceUnreachable as error:
            message = (
                f"its input cannot be read: {error}; make the URL reachable, then resume the job"
            )
            raise JobStops("INPUT_UNREACHABLE", message) from error

        def note(record: JobRecord) -> None:
            record.upload_id = upload

        await self._edit(note)

    async def _run_stage(self, metadata: tuple[tuple[str, str], ...]) -> bool:
        """Whether documents are left with more than one answer."""
        record, stage = self.record, self.record.stage
        self._earlier = await totals_of(self._process.store, record, stage)
        spent = self._earlier.counts.cost
        with AnswerCache() as cache:
            running = StagePass(
                self._process, record, stage, metadata, cache, spent, self._work_done
            )
            running.set_concurrency(self.concurrency)
            await running.load()
            self._trouble = ""
            self._stored_bytes += 0 if self._pass is None else self._pass.log.written_bytes
            self._pass, self._speed = running, Speed()
            self._told(running)
            skipped = 0 if record.round or record.job.spec.stages else running.log.done.low_water
            self._source, blocks = await open_stage(self._process, record, stage, metadata, skipped)
            if record.round:
                blocks = retried(blocks, self._process.store, record, stage)
            await running.run(blocks, skipped)
            return running.log.split_documents > 0

    # The record.

    async def _beat(self) -> None:
        while True:
            with suppress(TransportUnavailable):
                await self._edit(lambda record: None)
                self._check_limits(self.record)
                if self._pass is not None:
                    self._pass.set_max_cost(self.record.job.spec.limits.max_cost)
            await asyncio.sleep(BEAT_S)

    async def _edit(self, edit: Edit) -> None:
        """Writes the record with the progress and what ``edit`` changes.

        Raises:
            JobLost: another process has the job, or it is gone.
        """
        async with self._writing:
            while True:
                record = JobRecord()
                record.CopyFrom(self.record)
                self._note_progress(record)
                edit(record)
                revision = await self._process.store.write(record, self._revision)
                if revision is not None:
                    self.record, self._revision = record, revision
                    return
                await self._read_again()

    async def _read_again(self) -> None:
        try:
            fresh, self._revision = await self._process.store.read(self.job)
        except SluiceError as error:
            if isinstance(error, TransportUnavailable):
                raise
            raise JobLost from error
        ours = fresh.epoch == self._epoch
        if not ours:
            raise JobLost
        # Of the owner's fields ours are newer.
        fresh.stage = self.record.stage
        self.record = fresh
        if fresh.job.state != JOB_STATE_RUNNING:
            self._stopped.set()

    def _note_progress(self, record: JobRecord) -> None:
        now = time.monotonic()
        record.running_ms = self._ran_ms + round((now - self._begun_at) * 1e3)
        record.use.CopyFrom(self._work_done.use(self._used))
        self.beat_at = now
        if isinstance(self._source, MessageSource) and self._source.sequence:
            record.job.nats_last_sequence = self._source.sequence
        progress = self._progress(record, now)
        record.job.progress.CopyFrom(progress)
        if self._pass is not None:
            record.models[:] = sorted(self._pass.models)
        if record.job.state == JOB_STATE_RUNNING:
            trouble = self._trouble or (self._pass.trouble if self._pass is not None else "")
            record.job.reason = f"waiting: {trouble}" if trouble else ""

    def _progress(self, record: JobRecord, now: float) -> JobProgress:
        running = self._pass
        if running is None:
            return record.job.progress
        record.results_bytes = self._stored_bytes + running.log.written_bytes
        progress = self._earlier.progress(running.log.written, record.round)
        progress.in_flight = running.window.in_flight
        if record.round:
            progress.total_final = True
            progress.total = self._earlier.total
        else:
            progress.total_final = running.read_all
            progress.total = max(running.log.written.total, running.read)
            if not running.read_all and self._source is not None and self._source.share_read:
                progress.total = max(progress.total, round(running.read / self._source.share_read))
        settled = running.log.written.total
        self._told(running)
        progress.items_per_second = self._speed.items_per_s
        progress.tokens_per_second = self._speed.tokens_per_s
        of_all = self._earlier.counts.dead if record.round else progress.total
        left_s = self._speed.remaining_s(max(0, of_all - settled))
        if left_s is not None:
            progress.remaining.CopyFrom(duration(left_s * 1e3))
        note_stages(progress, self._earlier, record)
        return progress

    def _told(self, running: StagePass) -> None:
        counts = running.log.counts
        self._speed.told(time.monotonic(), counts.total, counts.completion_tokens)

    def _check_limits(self, record: JobRecord) -> None:
        """Raises JobStops when the job has cost enough, or is too late."""
        job, limits = record.job, record.job.spec.limits
        if 0 < ms_of(limits.deadline_time) <= unix_ms():
            message = "its deadline passed; what has an answer can be read"
            raise JobStops("DEADLINE_EXCEEDED", message, JOB_STATE_EXPIRED)
        if 0 < limits.max_cost <= job.progress.cost:
            raise JobStops(
                "MAX_COST_REACHED",
                f"it has cost {job.progress.cost:g} of at most {limits.max_cost:g}; resume it with a higher --max-cost",
            )

    def _report(self, record: JobRecord) -> JobReport:
        progress, running_s = record.job.progress, max(1e-3, record.running_ms / 1e3)
        reasons = Counter(self._earlier.reasons)
        if self._pass is not None:
            reasons.update(self._pass.log.reasons)
        use = record.use
        cells = use.batch_tokens + use.padding_tokens
        return JobReport(
            progress=progress,
            running_time=duration(record.running_ms),
            items_per_second=(progress.succeeded + progress.dead) / running_s,
            tokens_per_second=progress.completion_tokens / running_s,
            dead_by_reason={reason: count for reason, count in reasons.items() if count > 0},
            workers_busy_share=min(1.0, use.busy_s / use.worker_s) if use.worker_s else None,
            padding_share=use.padding_tokens / cells if cells else None,
        )


def _next_stage(again: bool, record: JobRecord) -> None:
    record.stage += 1
    if again and record.stage == stages_of(record):
        record.stages = record.stage + 1
