"""Closing of jobs that were cancelled, expired or failed: unfinished items get an outcome, counts become final.

1. The process that ran the job writes what has come back and leaves it; a lost process is not
   waited for long.
2. One process claims the job in its record, and keeps the former owner from writing on.
3. It reads the input again and counts the items without an outcome. The last segment of the log says
   why they have none; the items themselves are not stored but read from the input whenever somebody
   lists the dead letters.

Closing twice gives the same counts, so a claim that is too old is ignored.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Final

from jobs import webhooks
from jobs.core.leases import PROCESSES_LOST, is_idle, unfinished_error_of
from jobs.core.retry import FailureKind, failure_kind
from jobs.items import Item
from jobs.process import JobProcess, JobStopped
from jobs.results import OutcomeReader, Totals, failed, merge_attempts, reached_stage
from jobs.sources import result_of
from jobs.stage_log import StageLog
from jobs.stages import open_stage
from jobs.store import Fenced
from sluice.background import BackgroundTasks, wait_for_event
from sluice.defaults import TENANT_METADATA
from sluice.errors import JobUnknown, SluiceError
from sluice.internal.v1.job_pb2 import ItemOutcome, JobRecord
from sluice.v1.jobs_pb2 import JobItemError, JobResult
from sluice.wire.clock import unix_ms

CLAIM_MS: Final = 120_000
"""How long one process may count before another one claims the job, in milliseconds."""
LEAVE_S: Final = 6.0
"""How long the owner of an ended job may take to leave it before it counts as lost, in seconds."""
RETRY_S: Final = 5.0
"""Pause before closing is tried again, in seconds."""

logger = logging.getLogger(__name__)


class _ClaimedElsewhere(Exception):
    """Another process closes the job, or it is closed."""


class FollowUps:
    """Closes ended jobs and sends their webhook events, for jobs that this process does not run."""

    def __init__(self, process: JobProcess) -> None:
        self._process = process
        self._owner_left: dict[str, asyncio.Event] = {}
        """By job that is being closed: set once the process that ran it has left it."""
        self._notifying: set[str] = set()
        """Jobs whose event is being sent here, however long it waits for its turn."""
        self._tasks = BackgroundTasks()

    def on_record(self, record: JobRecord) -> None:
        """Start to close a job, or to send its event, if its record needs it."""
        job = record.job
        if job.closing:
            if job.id not in self._owner_left:
                self._owner_left[job.id] = asyncio.Event()
                self._tasks.spawn(self._close(job.id))
            if not job.runner:
                self._owner_left[job.id].set()
        elif job.id not in self._notifying and webhooks.pending(record) is not None:
            self._notifying.add(job.id)
            self._tasks.spawn(self._notify(job.id))

    async def close(self) -> None:
        """Leave the jobs to other processes, undelivered events after `webhooks.NOTIFY_MS`."""
        await self._tasks.close()

    async def _close(self, job: str) -> None:
        try:
            await wait_for_event(self._owner_left[job], LEAVE_S)
            while not await self._try_close(job):
                await asyncio.sleep(RETRY_S)
                # Give up the claim, so that the next try, of any process, need not wait for its end.
                with suppress(SluiceError):
                    await self._process.store.change(job, _release)
        finally:
            del self._owner_left[job]

    async def _try_close(self, job: str) -> bool:
        """Close a job unless another process does; return whether nothing is left to do."""
        try:
            with suppress(_ClaimedElsewhere, JobUnknown):
                await close_job(self._process, await self._process.store.change(job, _claim))
        except (SluiceError, Fenced) as error:
            logger.warning("closing job %s was delayed: %s", job, error)
            return False
        return True

    async def _notify(self, job: str) -> None:
        try:
            await webhooks.notify(self._process.store, job, self._process.outside.post)
        finally:
            self._notifying.discard(job)


def _claim(record: JobRecord) -> None:
    now_ms = unix_ms()
    if not record.job.closing or now_ms < record.closing_until_unix_ms:
        raise _ClaimedElsewhere
    record.closing_until_unix_ms = now_ms + CLAIM_MS


def _release(record: JobRecord) -> None:
    record.closing_until_unix_ms = 0


async def close_job(process: JobProcess, record: JobRecord) -> None:
    """Give the unfinished items of an ended job their outcome, and write the final counts into its record.

    Raises:
        _ClaimedElsewhere: it was closed meanwhile.
        JobUnknown: it was deleted.
        Fenced: another process closes it.
        SluiceError: JetStream, or a gateway that splits texts, does not respond.
    """
    job, stage = record.job, reached_stage(record)
    log = StageLog(process, record, stage)
    await log.load()
    if not (record.attempt or log.checkpoint.complete):
        # Reading the input may be what ended lost processes, and could end this one.
        error = None if job.reason_code == PROCESSES_LOST else unfinished_error_of(job)
        if error is not None:
            async with aclosing(_items(process, record, log.done.low_water)) as items:
                async for line in items:
                    if line.index not in log.done:
                        log.count(ItemOutcome(result=_unfinished_result(line, error)))
        await log.close(error)
    totals = await Totals.of(process.store, record, stage)

    def note(fresh: JobRecord) -> None:
        if not fresh.job.closing:
            raise _ClaimedElsewhere
        fresh.job.closing, fresh.job.runner, fresh.closing_until_unix_ms = False, "", 0
        progress = totals.progress(log.checkpoint.counts, fresh.attempt)
        progress.total_final = True
        totals.note_stages(progress, fresh)
        fresh.job.progress.CopyFrom(progress)
        report = fresh.job.report
        report.progress.CopyFrom(progress)
        report.dead_by_reason.clear()
        report.dead_by_reason.update(totals.dead_by_reason(log.checkpoint))

    process.quotas.job(job.id, await process.store.change(job.id, note))


async def _items(process: JobProcess, record: JobRecord, first: int) -> AsyncGenerator[Item]:
    """Yield the items of the reached stage again, as far as the input can be read; at least those from `first` on."""
    if not record.upload_id:
        return  # The job ended before its input was read.
    metadata = ((TENANT_METADATA, record.job.tenant),)
    skipped = 0 if record.job.spec.stages else first
    try:
        stage = reached_stage(record)
        _, blocks = await open_stage(process, record, stage, metadata, skipped)
        async with aclosing(blocks):  # type: ignore[type-var]
            async for block in blocks:
                for line in block:
                    yield line
    except (SluiceError, JobStopped) as error:
        if isinstance(error, SluiceError) and failure_kind(error) is not FailureKind.PERMANENT:
            raise
        logger.info("input of job %s cannot be read to its end: %s", record.job.id, error)


def _unfinished_result(item: Item, error: JobItemError) -> JobResult:
    """Return the dead letter of an item that has no outcome in the log of this stage.

    An item that failed in the stage before keeps that error; an answer of that stage is replaced by `error`.
    """
    outcome = result_of(item, item.outcome or JobResult())
    if not outcome.HasField("error"):
        outcome.error.CopyFrom(error)
    return outcome


async def dead_letters(
    process: JobProcess, record: JobRecord, first: int = 0
) -> AsyncIterator[ItemOutcome]:
    """Yield the dead letters of a job by index, from `first` on.

    For a job that ended early these are all items without an answer: its input is read again for
    them.
    """
    job, stage = record.job, reached_stage(record)
    outcomes = merge_attempts(
        process.store, job.id, stage, record.attempt, first, past_gaps=is_idle(job)
    )
    checkpoint = (await process.store.last_segment(job.id, stage, 0))[0].checkpoint
    if checkpoint.HasField("unfinished"):
        outcomes = _with_unfinished(process, record, outcomes, checkpoint.unfinished, first)
    async for outcome in failed(outcomes):
        yield outcome


async def _with_unfinished(
    process: JobProcess,
    record: JobRecord,
    outcomes: AsyncIterator[ItemOutcome],
    error: JobItemError,
    first: int,
) -> AsyncIterator[ItemOutcome]:
    """Yield the outcomes, and those of items that have none; reads the input for them."""
    reader, index = OutcomeReader(outcomes), first
    async with aclosing(_items(process, record, first)) as items:
        async for line in items:
            if line.index >= first:
                index = line.index + 1
                unfinished = ItemOutcome(result=_unfinished_result(line, error))
                yield await reader.at(index - 1) or unfinished
    while (head := await reader.skip_to(index)) is not None:  # its upload was deleted
        index = head.result.index + 1
        yield head
