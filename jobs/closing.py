"""Closes jobs that were cancelled, expired or failed: the items without an outcome get one, and the counts are final.

1. The process that ran the job writes what has come back and leaves it; one that was lost is not waited for long.
2. One process claims the job in its record and keeps whoever ran it from writing on.
3. It walks the input again and counts the items that have no outcome. The last segment of the log says why they have
   none; the items themselves are not stored, they are read from the input whenever somebody reads the dead letters.

Closing twice gives the same counts, so a claim that is too old is ignored.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Final

from jobs.core.leases import PROCESSES_LOST, is_still, unfinished_error_of
from jobs.core.retry import Failure, failure_of
from jobs.core.window import Entry
from jobs.pass_log import LeftItems, PassLog
from jobs.process import JobProcess, JobStops
from jobs.results import Lookup, failed, last_checkpoint, merged
from jobs.sources import index_of, result_of
from jobs.stages import open_stage
from jobs.store import Fenced
from jobs.totals import Totals, note_stages, reached_stage, totals_of
from sluice.defaults import TENANT_METADATA
from sluice.errors import JobUnknown, SluiceError
from sluice.internal.v1.job_pb2 import ItemOutcome, JobCheckpoint, JobRecord
from sluice.v1.jobs_pb2 import JobItemError, JobResult
from sluice.wire.clock import unix_ms

CLAIM_MS: Final = 120_000
"""How long one process has a job to itself while it counts, milliseconds."""
LEAVE_S: Final = 6.0
"""How long the process that runs a job may take to leave it once it is over, seconds; then it is taken for lost."""
RETRY_S: Final = 5.0

_log = logging.getLogger(__name__)


class _Claimed(Exception):
    """Another process closes the job, or it is closed."""


class Closer:
    """Closes the jobs that one process hears of."""

    def __init__(self, process: JobProcess) -> None:
        self._process = process
        self._left: dict[str, asyncio.Event] = {}
        """By job that is being closed: whether the process that ran it has left it."""
        self._tasks: set[asyncio.Task[None]] = set()

    def look(self, record: JobRecord) -> None:
        """Begin to close the job of ``record`` if it has to be closed."""
        job = record.job
        if not job.closing:
            return
        if job.id not in self._left:
            self._left[job.id] = asyncio.Event()
            task = asyncio.create_task(self._close(job.id), name=f"close {job.id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: self._left.pop(job.id, None))
        if not job.runner:
            self._left[job.id].set()

    async def close(self) -> None:
        """Leave the jobs to other processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _close(self, job: str) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._left[job].wait()
        trouble = ""
        while True:
            try:
                record = await self._process.store.change(job, _claim)
                await close_job(self._process, record)
                return
            except (_Claimed, JobUnknown):
                return
            except (SluiceError, Fenced) as error:
                if trouble != str(error):
                    trouble = str(error)
                    _log.warning("closing of job %s waits: %s", job, error)
            except Exception:
                _log.exception("closing of job %s failed", job)
                return
            await asyncio.sleep(RETRY_S)
            with suppress(SluiceError):
                await self._process.store.change(job, _release)


def _claim(record: JobRecord) -> None:
    now_ms = unix_ms()
    if not record.job.closing or now_ms < record.closing_until_unix_ms:
        raise _Claimed
    record.closing_until_unix_ms = now_ms + CLAIM_MS


def _release(record: JobRecord) -> None:
    record.closing_until_unix_ms = 0


async def close_job(process: JobProcess, record: JobRecord) -> None:
    """Give the items of a job that ended early their outcome, and write the final counts into its record.

    Raises:
        Fenced: another process closes it.
        SluiceError: JetStream, or a gateway that splits texts, does not answer.
    """
    stage = reached_stage(record)
    log = PassLog(process, record, stage)
    await log.load()
    if not (record.round or log.complete):
        await _count_left(process, record, stage, log)
    totals = await totals_of(process.store, record, stage)

    def note(fresh: JobRecord) -> None:
        if not fresh.job.closing:
            raise _Claimed
        fresh.job.closing, fresh.job.runner, fresh.closing_until_unix_ms = False, "", 0
        _note_counts(fresh, totals, log)

    process.quotas.job(record.job.id, await process.store.change(record.job.id, note))


async def _count_left(process: JobProcess, record: JobRecord, stage: int, log: PassLog) -> None:
    """Count the items without an outcome, and close the log."""
    job, left = record.job, LeftItems()
    if job.reason_code == PROCESSES_LOST:
        # Reading its input may have ended those processes, and would end this one.
        await log.close(left, None)
        return
    error, first = unfinished_error_of(job), log.done.low_water
    async with aclosing(_items(process, record, stage, first)) as items:
        async for one in items:
            if index_of(one) not in log.done:
                left.add(job.id, _left(one, error))
    await log.close(left, error)


def _note_counts(record: JobRecord, totals: Totals, log: PassLog) -> None:
    progress, counts = record.job.progress, totals.progress(log.counts, record.round)
    counts.total, counts.total_final = totals.total if record.round else log.counts.total, True
    progress.CopyFrom(counts)
    note_stages(progress, totals, record)
    report, reasons = record.job.report, totals.reasons + log.reasons
    report.progress.CopyFrom(progress)
    report.dead_by_reason.clear()
    report.dead_by_reason.update({name: count for name, count in reasons.items() if count > 0})


async def _items(
    process: JobProcess, record: JobRecord, stage: int, first: int = 0
) -> AsyncGenerator[Entry | ItemOutcome]:
    """Read the items of a stage again, as far as the input can be read.

    Args:
        first: those before this index may be left out.
    """
    if not record.upload_id:
        return  # it was never read
    metadata = ((TENANT_METADATA, record.job.tenant),)
    skipped = 0 if record.job.spec.stages else first
    try:
        _, blocks = await open_stage(process, record, stage, metadata, skipped)
        async with aclosing(blocks):  # type: ignore[type-var]
            async for block in blocks:
                for one in block:
                    yield one
    except (SluiceError, JobStops) as error:
        if isinstance(error, SluiceError) and failure_of(error) is not Failure.PERMANENT:
            raise
        _log.info("input of job %s ended early: %s", record.job.id, error)


def _left(one: Entry | ItemOutcome, error: JobItemError) -> JobResult:
    """Return the outcome of an item that has none in the log."""
    if isinstance(one, Entry):
        return result_of(one, JobResult(error=error))
    result = JobResult()
    result.CopyFrom(one.result)
    if result.HasField("answer"):  # of the stage before
        result.error.CopyFrom(error)
    return result


async def dead_letters(
    process: JobProcess, record: JobRecord, first: int = 0
) -> AsyncIterator[ItemOutcome]:
    """Yield the dead letters of a job by index, from ``first`` on.

    Of a job that ended early these are all items without an answer: its input is read again for them.
    """
    job, stage = record.job, reached_stage(record)
    outcomes = merged(process.store, job.id, stage, record.round, first, past_gaps=is_still(job))
    checkpoint = await last_checkpoint(process.store, job.id, stage)
    if checkpoint.HasField("unfinished"):
        outcomes = _with_left(process, record, outcomes, checkpoint, first)
    async for outcome in failed(outcomes):
        yield outcome


async def _with_left(
    process: JobProcess,
    record: JobRecord,
    outcomes: AsyncIterator[ItemOutcome],
    checkpoint: JobCheckpoint,
    first: int,
) -> AsyncIterator[ItemOutcome]:
    """Yield ``outcomes``, and those of the items that have none. The input is read behind what is all in the log."""
    known, begin, index = Lookup(outcomes), max(first, checkpoint.low_water), first
    while (head := await known.skip_to(index)) is not None and head.result.index < begin:
        index = head.result.index + 1
        yield head
    async with aclosing(_items(process, record, reached_stage(record), begin)) as items:
        async for one in items:
            if index_of(one) < begin:
                continue
            index = index_of(one) + 1
            left = ItemOutcome(result=_left(one, checkpoint.unfinished))
            yield await known.at(index - 1) or left
    while (head := await known.skip_to(index)) is not None:  # its upload was deleted
        index = head.result.index + 1
        yield head
