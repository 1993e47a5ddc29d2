"""Items of an attempt from a file or from messages, in blocks; `jobs/stages.py` has those of jobs with stages."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from jobs.answers import input_hash
from jobs.core.leases import OVER
from jobs.core.window import BLOCK, BLOCK_BYTES
from jobs.input import Template, read_items
from jobs.input.read import Format, ItemParser
from jobs.input.tables import json_row
from jobs.items import Item
from jobs.process import JobProcess, input_unreadable
from jobs.results import OutcomeReader, failed, merge_attempts
from jobs.store import CHUNK_BYTES, RETRY_AFTER_S, Fenced, JobStore
from jobs.threads import StopSignal
from sluice.client.openai_lines import encoded_line
from sluice.errors import InvalidRequest, SluiceError, TransportUnavailable
from sluice.internal.v1.job_pb2 import JobRecord, MessageChunk, UploadRecord
from sluice.v1 import jobs_pb2
from sluice.v1.inference_pb2 import PRIORITY_BULK, EmbedRequest, GenerateRequest
from sluice.v1.jobs_pb2 import Job, JobInput, JobResult, JobSpec
from sluice.wire.clock import ms_of, unix_ms
from sluice.wire.patience import patiently

Block = list[Item]

CHUNK_S: Final = 60.0
"""How long a chunk is waited for while JetStream does not respond, in seconds."""
MESSAGE_BYTES_MAX: Final = 1_000_000
"""Longest line, in bytes; a chunk with a longer one would exceed the message limit of NATS."""
POLL_S: Final = 0.1
"""Interval at which new messages are looked for, in seconds."""
COALESCE_S: Final = 0.25
"""How long a message waits for others before they are stored, in seconds."""
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
            Overloaded: too many calls of the tenant wait for threads.
            TransportUnavailable: JetStream does not respond.
            UploadUnknown: the upload was deleted.
        """
        stop = StopSignal()
        blocks = blocks_of(self._entries(asyncio.get_running_loop(), stop))
        tenant, threads = self.record.job.tenant, self.process.outside.reading
        reading = asyncio.ensure_future(threads.run(tenant, next, blocks, []))
        try:
            # Parse the next block in the thread while the caller works on this one.
            while block := await asyncio.shield(reading):
                reading = asyncio.ensure_future(threads.run(tenant, next, blocks, []))
                yield block
        finally:
            # Nobody waits for the last block: its error, such as ReadingStopped, is not logged.
            reading.add_done_callback(lambda task: task.cancelled() or task.exception())
            stop.set_result(None)
            reading.cancel()

    def _entries(self, loop: asyncio.AbstractEventLoop, stop: StopSignal) -> Iterator[Item]:
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
        for index, item in enumerate(items, self.skipped):
            yield place_item(job, index, item)

    def _chunks(self, loop: asyncio.AbstractEventLoop) -> Iterator[bytes]:
        for number in range(self.upload.chunks):
            read = partial(self.process.store.read_chunk, self.record.upload_id, number)
            passing = (TransportUnavailable,)
            reading = patiently(read, passing, bound_s=CHUNK_S, wait_s=RETRY_AFTER_S)
            self.chunks_read = number + 1
            yield asyncio.run_coroutine_threadsafe(reading, loop).result()


@dataclass
class MessageSource:
    """Messages of a NATS subject, in a stream of the operator.

    They are copied into the store, a chunk at a time, when the job has capacity for them. A chunk says
    where in the stream it ends, and is stored only if there is none yet: of two processes that read for
    the same job one is refused, and continues behind the other's chunk. So every message is in the
    input once, whatever is killed, and copied messages may leave the stream. Nothing is acknowledged:
    the stream and its other readers are not affected. The input of a job that has ended, or is retried,
    ends with the last message that was stored.

    Attributes:
        skipped: messages at the start that are left out.
        share_read: share of the input that was read, 0 to 1; 0 while unknown.
        sequence: sequence of the last message that was read; 0: none was.
    """

    process: JobProcess
    record: JobRecord
    skipped: int = 0
    share_read: float = 0.0
    sequence: int = 0

    async def blocks(self) -> AsyncIterator[Block]:
        """Yield all of them, as they come.

        Raises:
            JobStopped: they may no longer be read, or the stream is gone.
            Overloaded: too many calls of the tenant wait for threads.
            StorageFull: the store is full, or the tenant has used its share of the inputs.
            TransportUnavailable: JetStream does not respond.
        """
        job, threads = self.record.job, self.process.outside.reading
        parser = ItemParser(defaults_of(job.spec), job.spec.input.id_field, self.skipped)
        async for chunk in self._chunks():
            self.sequence, self.share_read = chunk.sequence, float(chunk.ended)
            if block := await threads.run(job.tenant, _messages_of, job, parser, chunk):
                yield block

    async def _chunks(self) -> AsyncIterator[MessageChunk]:
        store, quotas, upload_id = self.process.store, self.process.quotas, self.record.upload_id
        job, number = self.record.job, 0
        chunk = MessageChunk(sequence=max(1, job.spec.input.nats_start_sequence) - 1)
        upload = UploadRecord(tenant=job.tenant, create_unix_ms=unix_ms())
        while not chunk.ended:
            stored = await store.read_messages(upload_id, number)
            if stored is None:
                if job.state in OVER or self.record.attempt:
                    return
                try:
                    fresh = await self._read_chunk(chunk)
                    await store.write_messages(upload_id, number, fresh)
                except InvalidRequest as error:
                    raise input_unreadable(error) from error
                except Fenced:  # Another process read the same messages first: take its chunk.
                    continue
            chunk = stored or fresh
            number += 1
            upload.size_bytes += chunk.ByteSize()
            if stored is None:
                await store.write_upload(upload_id, upload)
                quotas.upload(upload_id, upload)
                quotas.check_bytes(job.tenant, "inputs")
            yield chunk

    async def _read_chunk(self, before: MessageChunk) -> MessageChunk:
        """Return the next messages: a block of them, or those that came within `COALESCE_S`."""
        source = self.record.job.spec.input
        stream = self.process.outside.stream_of(self.record.job.tenant, source)
        chunk = MessageChunk(count=before.count, sequence=before.sequence)
        size, idle_s = 0, ms_of(source.nats_idle) / 1e3
        begun_at = came_at = time.monotonic()
        while len(chunk.messages) < BLOCK and not chunk.ended:
            stored = await self.process.store.read_message(
                stream, source.nats_subject, chunk.sequence + 1
            )
            if stored is None:
                now = time.monotonic()
                if chunk.messages and now - begun_at >= COALESCE_S:
                    break
                chunk.ended = 0 < idle_s <= now - came_at
                await asyncio.sleep(POLL_S)
                continue
            message, sequence = stored
            size += len(message)
            if size > CHUNK_BYTES and chunk.messages:
                break  # The message starts the next chunk.
            chunk.sequence, came_at = sequence, time.monotonic()
            if message:
                chunk.count += 1
                chunk.messages.append(message[: MESSAGE_BYTES_MAX + 1])
            chunk.ended = not message or chunk.count == source.nats_message_count
        return chunk


def _messages_of(job: Job, parser: ItemParser, chunk: MessageChunk) -> Block:
    """Return the items of the messages of a chunk."""
    first, template = chunk.count - len(chunk.messages), template_of(job.spec.input)
    block: Block = []
    for index, message in enumerate(chunk.messages, first):
        item = parser.parse(index + 1, json_row(message, MESSAGE_BYTES_MAX), template)
        if item is not None:
            block.append(place_item(job, index, item))
    return block


def blocks_of(items: Iterable[Item]) -> Iterator[Block]:
    """Yield items in blocks of `BLOCK`, or fewer that have `BLOCK_BYTES`; an error comes behind the last block."""
    block, size, raised = Block(), 0, None
    try:
        for item in items:
            block.append(item)
            size += item.request.ByteSize()
            if len(block) == BLOCK or size >= BLOCK_BYTES:
                yield block
                block, size = [], 0
    except SluiceError as error:
        raised = error
    if block:
        yield block
    if raised is not None:
        raise raised


def defaults_of(spec: JobSpec) -> GenerateRequest:
    """Return the values for what a line leaves out."""
    request = GenerateRequest(model=spec.model, labels=spec.labels)
    request.sampling.CopyFrom(spec.sampling)
    return request


def template_of(source: JobInput) -> Template | None:
    """Return the template of rows, if there is one."""
    return Template(source.template) if source.template else None


def place_item(job: Job, index: int, item: Item) -> Item:
    """Return the item at `index` of the input, ready to be sent unless it is a bad line."""
    request, spec = item.request, job.spec
    item.index = item.position = index
    if item.outcome is not None:
        return item
    if isinstance(request, EmbedRequest):
        request.priority = spec.priority or PRIORITY_BULK
    else:
        request_whole_answer(request, spec)
    if not spec.dedupe.disabled:
        item.input_hash = input_hash(request)
    # The key is no part of the hash: it differs for identical requests.
    if isinstance(request, GenerateRequest):
        set_idempotency_key(request, job, item.custom_id)
    return item


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


async def retry_dead_letters(
    source: AsyncIterator[Block], store: JobStore, record: JobRecord, stage: int
) -> AsyncIterator[Block]:
    """Yield the entries of `source` that are dead letters of earlier attempts and are to be retried."""
    job, reasons = record.job.id, set(record.retry_reasons)
    checkpoint = (await store.last_segment(job, stage, 0))[0].checkpoint
    unfinished = checkpoint.unfinished if checkpoint.HasField("unfinished") else None
    before = merge_attempts(store, job, stage, record.attempt - 1)
    outcomes = OutcomeReader(failed(before) if unfinished is None else before)
    position = 0
    async for block in source:
        retried_items: Block = []
        for line in block:
            outcome = await outcomes.at(line.index)
            result = JobResult(error=unfinished) if outcome is None else outcome.result
            if line.outcome is not None or not result.HasField("error"):
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


def result_of(item: Item, outcome: JobResult) -> JobResult:
    """Return an outcome with the name and index of an item."""
    result = JobResult()
    result.CopyFrom(outcome)
    result.index, result.part, result.parts = item.index, item.part, item.parts
    result.line, result.custom_id, result.url = item.line, item.custom_id, item.url
    return result
