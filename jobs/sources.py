"""Items of an attempt from the input, in blocks. `jobs/stages.py` has those of jobs with stages."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Final

from jobs.answers import input_hash
from jobs.core.window import BLOCK, BLOCK_BYTES
from jobs.input import Template, read_items
from jobs.input.read import Format
from jobs.items import BadLine, Item
from jobs.process import JobProcess
from jobs.results import OutcomeReader, failed, last_checkpoint, merge_attempts
from jobs.store import RETRY_AFTER_S, JobStore
from jobs.threads import StopSignal
from sluice.client.openai_lines import encoded_line
from sluice.errors import SluiceError, TransportUnavailable
from sluice.internal.v1.job_pb2 import ItemOutcome, JobRecord, UploadRecord
from sluice.v1 import jobs_pb2
from sluice.v1.inference_pb2 import PRIORITY_BULK, EmbedRequest, GenerateRequest
from sluice.v1.jobs_pb2 import Job, JobInput, JobItemError, JobResult, JobSpec
from sluice.wire.patience import patiently

Block = list[Item | ItemOutcome]
"""Items, and outcomes of bad lines."""

CHUNK_S: Final = 60.0
"""How long a chunk is waited for while JetStream does not respond, in seconds."""
WHOLE_S: Final = 3600
"""Coalescing time of an item's tokens, longer than any answer takes: nobody reads a part of the
answer."""
_FORMATS: Final = {
    jobs_pb2.JOB_INPUT_FORMAT_OPENAI: Format.JSONL,
    jobs_pb2.JOB_INPUT_FORMAT_JSONL: Format.JSONL,
    jobs_pb2.JOB_INPUT_FORMAT_CSV: Format.CSV,
    jobs_pb2.JOB_INPUT_FORMAT_PARQUET: Format.PARQUET,
}


@dataclass
class InputSource:
    """Lines of an upload. They are parsed in a thread of the tenant, a block at a time.

    Attributes:
        skipped: lines at the start that are left out.
        chunks_read: chunks that were read so far, of `upload.chunks`.
    """

    process: JobProcess
    record: JobRecord
    upload: UploadRecord
    skipped: int = 0
    chunks_read: int = 0

    @property
    def share_read(self) -> float:
        """Share of the input's bytes that was read, 0 to 1."""
        return self.chunks_read / max(1, self.upload.chunks)

    async def blocks(self) -> AsyncIterator[Block]:
        """Yield all of it.

        Raises:
            InputInvalid: it cannot be read on.
            TransportUnavailable: JetStream does not respond.
        """
        stop = StopSignal()
        entries = Blocks(self._entries(asyncio.get_running_loop(), stop))
        tenant, threads = self.record.job.tenant, self.process.outside.reading
        reading = asyncio.ensure_future(threads.run(tenant, entries.next))
        try:
            # Parse the next block in the thread while the caller works on this one.
            while block := await asyncio.shield(reading):
                reading = asyncio.ensure_future(threads.run(tenant, entries.next))
                yield block
        finally:
            # Nobody waits for the last block: its error, such as ReadingStopped, is not logged.
            reading.add_done_callback(lambda task: task.cancelled() or task.exception())
            stop.set()
            reading.cancel()

    def _entries(
        self, loop: asyncio.AbstractEventLoop, stop: StopSignal
    ) -> Iterator[Item | ItemOutcome]:
        job, source = self.record.job, self.record.job.spec.input
        items = read_items(
            self._chunks(loop),
            _FORMATS.get(source.format) or Format.of_name(self.upload.name),
            template_of(source),
            defaults_of(job.spec),
            id_field=source.id_field,
            skipped=self.skipped,
            stop=stop,
        )
        for index, line in enumerate(items, self.skipped):
            yield place_line(job, index, line)

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
    """Groups lines into blocks. An error ends a block; the next one raises it."""

    def __init__(self, entries: Iterator[Item | ItemOutcome]) -> None:
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
                if (line := next(self._entries, None)) is None:
                    break
                block.append(line)
                size += line.request.ByteSize() if isinstance(line, Item) else 0
        except SluiceError as error:
            if not block:
                raise
            self._error = error
        return block


def defaults_of(spec: JobSpec) -> GenerateRequest:
    """Return the values for what a line leaves out."""
    request = GenerateRequest(model=spec.model, labels=spec.labels)
    request.sampling.CopyFrom(spec.sampling)
    return request


def template_of(source: JobInput) -> Template | None:
    """Return the template of rows, if there is one."""
    return Template(source.template) if source.template else None


def place_line(job: Job, index: int, line: Item | BadLine) -> Item | ItemOutcome:
    """Return the item at `index` of the input, ready to be sent, or the outcome of a bad line."""
    if isinstance(line, BadLine):
        return bad_line_outcome(index, line)
    request, spec = line.request, job.spec
    line.index = line.position = index
    if isinstance(request, EmbedRequest):
        request.priority = spec.priority or PRIORITY_BULK
    else:
        request_whole_answer(request, spec)
    if not spec.dedupe.disabled:
        line.input_hash = input_hash(request)
    # The key is no part of the hash: it differs for identical requests.
    if isinstance(request, GenerateRequest):
        set_idempotency_key(request, job, line.custom_id)
    return line


def request_whole_answer(request: GenerateRequest, spec: JobSpec) -> None:
    """Give a request the job's class, and ask for its answer in one piece."""
    request.priority = spec.priority or PRIORITY_BULK
    request.gather.seconds = WHOLE_S


def set_idempotency_key(request: GenerateRequest, job: Job, item: str) -> None:
    """Set a key that is the same whoever sends the item: a gateway that has its answer returns it again.

    A job that is created again with the key of a deleted one has its id, but other items.
    """
    name = f"{job.id}\0{job.create_time.ToNanoseconds()}\0{item}".encode()
    request.idempotency_key = hashlib.blake2b(name, digest_size=16).hexdigest()
    request.idempotency_key_generated = True


REASON_CHARS_MAX: Final = 1000
"""Longest reason of a bad line."""


def bad_line_outcome(index: int, line: BadLine) -> ItemOutcome:
    """Return the outcome of a bad line."""
    # The reason may quote a field of the line, which may be as long as the line.
    error = JobItemError(code=3, reason=line.code, message=line.reason[:REASON_CHARS_MAX])
    result = JobResult(index=index, line=line.line, custom_id=line.custom_id or "", error=error)
    return ItemOutcome(result=result, position=index)


def index_of(line: Item | ItemOutcome) -> int:
    """Return the index of an entry of a block."""
    return line.index if isinstance(line, Item) else line.result.index


async def retry_dead_letters(
    source: AsyncIterator[Block], store: JobStore, record: JobRecord, stage: int
) -> AsyncIterator[Block]:
    """Yield the entries of `source` that are dead letters of earlier attempts and are to be retried."""
    job, reasons = record.job.id, set(record.retry_reasons)
    checkpoint = await last_checkpoint(store, job, stage)
    unfinished = checkpoint.unfinished if checkpoint.HasField("unfinished") else None
    before = merge_attempts(store, job, stage, record.attempt - 1)
    outcomes = OutcomeReader(failed(before) if unfinished is None else before)
    position = 0
    async for block in source:
        retried_items: Block = []
        for line in block:
            outcome = await outcomes.at(index_of(line))
            result = JobResult(error=unfinished) if outcome is None else outcome.result
            if not (isinstance(line, Item) and result.HasField("error")):
                continue
            if not reasons or result.error.reason in reasons:
                line.position, line.earlier_reason = position, result.error.reason
                line.earlier_bytes = len(encoded_line(job, result_of(line, result)))
                retried_items.append(line)
                position += 1
        if retried_items:
            yield retried_items
        if unfinished is None and outcomes.head is None:
            return  # no dead letter is left


def result_of(entry: Item, outcome: JobResult) -> JobResult:
    """Return an outcome with the name and index of an item."""
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
