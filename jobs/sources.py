"""Where the items of a pass come from, in blocks: the input. `jobs/stages.py` has those of jobs with stages."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Final

from jobs.answers import input_hash
from jobs.core.window import BLOCK, BLOCK_BYTES, Entry
from jobs.input import Template, read_items
from jobs.input.read import Format
from jobs.items import BadLine, Item
from jobs.process import JobProcess
from jobs.results import Lookup, failed, last_checkpoint, merged
from jobs.store import RETRY_AFTER_S, JobStore
from jobs.threads import Stop
from sluice.client.openai_lines import encoded_line
from sluice.errors import SluiceError, TransportUnavailable
from sluice.internal.v1.job_pb2 import ItemOutcome, JobRecord, UploadRecord
from sluice.v1 import jobs_pb2
from sluice.v1.inference_pb2 import PRIORITY_BULK, EmbedRequest, GenerateRequest
from sluice.v1.jobs_pb2 import Job, JobInput, JobItemError, JobResult, JobSpec
from sluice.wire.patience import patiently

Block = list[Entry | ItemOutcome]
"""Items, and outcomes of what is none."""

CHUNK_S: Final = 60.0
"""How long a chunk is waited for while JetStream does not answer, seconds."""
WHOLE_S: Final = 3600
"""Tokens are gathered for longer than any answer takes: nobody reads a part of an item's answer."""
_FORMATS: Final = {
    jobs_pb2.JOB_INPUT_FORMAT_OPENAI: Format.JSONL,
    jobs_pb2.JOB_INPUT_FORMAT_JSONL: Format.JSONL,
    jobs_pb2.JOB_INPUT_FORMAT_CSV: Format.CSV,
    jobs_pb2.JOB_INPUT_FORMAT_PARQUET: Format.PARQUET,
}


@dataclass
class InputSource:
    """The lines of an upload. They are parsed in a thread of the tenant, a block at a time.

    Attributes:
        skipped: lines at the begin that are left out.
        chunks_read: chunks that were taken so far, of ``upload.chunks``.
    """

    process: JobProcess
    record: JobRecord
    upload: UploadRecord
    skipped: int = 0
    chunks_read: int = 0

    @property
    def share_read(self) -> float:
        """The share of the input's bytes that was read, 0 to 1."""
        return self.chunks_read / max(1, self.upload.chunks)

    async def blocks(self) -> AsyncIterator[Block]:
        """All of it.

        Raises:
            InputInvalid: it cannot be read on.
            TransportUnavailable: JetStream does not answer.
        """
        stop = Stop()
        entries = Blocks(self._entries(asyncio.get_running_loop(), stop))
        tenant, threads = self.record.job.tenant, self.process.outside.reading
        reading = asyncio.ensure_future(threads.run(tenant, entries.next))
        try:
            while block := await asyncio.shield(reading):
                reading = asyncio.ensure_future(threads.run(tenant, entries.next))
                yield block
        finally:
            stop.set()
            reading.cancel()

    def _entries(
        self, loop: asyncio.AbstractEventLoop, stop: Stop
    ) -> Iterator[Entry | ItemOutcome]:
        job, given = self.record.job, self.record.job.spec.input
        items = read_items(
            self._chunks(loop),
            _FORMATS.get(given.format) or Format.of_name(self.upload.name),
            template_of(given),
            defaults_of(job.spec),
            id_field=given.id_field,
            skipped=self.skipped,
            stop=stop,
        )
        for index, one in enumerate(items, self.skipped):
            yield one_of(job, index, one)

    def _chunks(self, loop: asyncio.AbstractEventLoop) -> Iterator[bytes]:
        for number in range(self.upload.chunks):
            read = asyncio.run_coroutine_threadsafe(self._chunk(number), loop)
            self.chunks_read = number + 1
            yield read.result()

    async def _chunk(self, number: int) -> bytes:
        return await patiently(
            lambda: self.process.store.read_chunk(self.record.upload_id, number),
            (TransportUnavailable,),
            bound_s=CHUNK_S,
            wait_s=RETRY_AFTER_S,
        )


class Blocks:
    """Entries in blocks. What cannot be read ends a block; the next one raises the error."""

    def __init__(self, entries: Iterator[Entry | ItemOutcome]) -> None:
        self._entries = entries
        self._error: SluiceError | None = None

    def next(self) -> Block:
        """Return `BLOCK` of them, or fewer that have `BLOCK_BYTES`; none at the end."""
        if self._error is not None:
            raise self._error
        block: Block = []
        size = 0
        try:
            while len(block) < BLOCK and size < BLOCK_BYTES:
                if (one := next(self._entries, None)) is None:
                    break
                block.append(one)
                size += one.request.ByteSize() if isinstance(one, Entry) else 0
        except SluiceError as error:
            if not block:
                raise
            self._error = error
        return block


def defaults_of(spec: JobSpec) -> GenerateRequest:
    """What holds where a line does not say otherwise."""
    request = GenerateRequest(model=spec.model, labels=spec.labels)
    request.sampling.CopyFrom(spec.sampling)
    return request


def template_of(given: JobInput) -> Template | None:
    """What makes the prompts of rows."""
    return Template(given.template) if given.template else None


def one_of(job: Job, index: int, one: Item | BadLine) -> Entry | ItemOutcome:
    """What is at ``index`` of the input."""
    return entry_of(job, index, one) if isinstance(one, Item) else bad_line(index, one)


def entry_of(job: Job, index: int, item: Item) -> Entry:
    """The item at ``index`` of the input."""
    request, spec = item.request, job.spec
    if isinstance(request, EmbedRequest):
        request.priority = spec.priority or PRIORITY_BULK
    else:
        ask_whole(request, spec)
    hashed = b"" if spec.dedupe.disabled else input_hash(request)
    if isinstance(request, GenerateRequest):
        name_request(request, job, item.custom_id)
    return Entry(index, index, item.line, item.custom_id, item.url, request, hashed)


def ask_whole(request: GenerateRequest, spec: JobSpec) -> None:
    """Gives the item the job's class, and asks for an answer in one piece."""
    request.priority = spec.priority or PRIORITY_BULK
    request.gather.seconds = WHOLE_S


def name_request(request: GenerateRequest, job: Job, item: str) -> None:
    """The key of an item is the same whoever sends it: a gateway that has its answer gives it again.

    A job that is created again with the key of a deleted one has its id; its items are others.
    """
    named = f"{job.id}\0{job.create_time.ToNanoseconds()}\0{item}".encode()
    request.idempotency_key = hashlib.blake2b(named, digest_size=16).hexdigest()
    request.idempotency_key_generated = True


REASON_CHARS_MAX: Final = 1000


def bad_line(index: int, line: BadLine) -> ItemOutcome:
    """The outcome of a line that is no item."""
    # The reason may quote a field of the line, which may be as long as the line.
    error = JobItemError(code=3, reason=line.code, message=line.reason[:REASON_CHARS_MAX])
    result = JobResult(index=index, line=line.line, custom_id=line.custom_id or "", error=error)
    return ItemOutcome(result=result, place=index)


def index_of(one: Entry | ItemOutcome) -> int:
    """Return the index of what is in a block."""
    return one.index if isinstance(one, Entry) else one.result.index


async def retried(
    source: AsyncIterator[Block], store: JobStore, record: JobRecord, stage: int
) -> AsyncIterator[Block]:
    """Yield the entries of ``source`` that were dead letters before this round and are to run again."""
    job, reasons = record.job.id, set(record.retry_reasons)
    checkpoint = await last_checkpoint(store, job, stage)
    unfinished = checkpoint.unfinished if checkpoint.HasField("unfinished") else None
    before = merged(store, job, stage, record.round - 1)
    outcomes = Lookup(failed(before) if unfinished is None else before)
    place = 0
    async for block in source:
        kept: Block = []
        for one in block:
            outcome = await outcomes.at(index_of(one))
            result = JobResult(error=unfinished) if outcome is None else outcome.result
            if not (isinstance(one, Entry) and result.HasField("error")):
                continue
            if not reasons or result.error.reason in reasons:
                one.place, one.earlier_reason = place, result.error.reason
                one.earlier_bytes = len(encoded_line(job, result_of(one, result)))
                kept.append(one)
                place += 1
        if kept:
            yield kept
        if unfinished is None and outcomes.head is None:
            return  # no dead letter is left


def result_of(entry: Entry, outcome: JobResult) -> JobResult:
    """Return ``outcome`` with the name and place of ``entry``."""
    result = JobResult(
        index=entry.index,
        line=entry.line,
        custom_id=entry.custom_id,
        url=entry.url,
        part=entry.part,
        parts=entry.parts,
    )
    result.MergeFrom(outcome)
    return result
