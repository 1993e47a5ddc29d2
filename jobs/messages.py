"""Inputs from NATS: the messages of a subject, in a stream of the operator, are the lines of a job.

They are copied into the store, a chunk at a time, when the job has capacity for them. A chunk says
where in the stream it ends, and is stored only if there is none yet: of two processes that read for
the same job one is refused, and continues behind the other's chunk. So every message is in the
input once, whatever is killed, and copied messages may leave the stream. Nothing is acknowledged:
the stream and its other readers are not affected.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Final

from jobs.core.leases import OVER
from jobs.core.window import BLOCK
from jobs.input.read import ItemParser
from jobs.input.tables import json_row
from jobs.process import JobProcess, input_unreadable
from jobs.sources import Block, defaults_of, place_line, template_of
from jobs.store import CHUNK_BYTES, Fenced
from sluice.errors import InvalidRequest, TransportUnavailable
from sluice.internal.v1.job_pb2 import JobRecord, MessageChunk, UploadRecord
from sluice.wire.clock import ms_of, unix_ms

MESSAGE_BYTES_MAX: Final = 1_000_000
"""Longest line, in bytes; a chunk with a longer one would exceed the message limit of NATS."""
POLL_S: Final = 0.1
"""Interval at which new messages are looked for, in seconds."""
COALESCE_S: Final = 0.25
"""How long a message waits for others before they are stored, in seconds."""


class MessageSource:
    """Messages of a subject.

    Attributes:
        share_read: share of the input that was read, 0 to 1; 0 while unknown.
        sequence: sequence of the last message that was read; 0: none was.
    """

    def __init__(self, process: JobProcess, record: JobRecord, skipped: int = 0) -> None:
        """Create it; `skipped` messages at the start are left out.

        The input of a job that has ended, or is retried, ends with the last message that was
        stored.
        """
        self._follows = record.job.state not in OVER and not record.attempt
        self._process, self._tenant = process, record.job.tenant
        self.share_read = 0.0
        self.sequence = 0
        self._store = process.store
        self._record = UploadRecord(tenant=self._tenant, create_unix_ms=unix_ms())
        self._job, self._upload = record.job, record.upload_id
        self._source = source = record.job.spec.input
        self._template = template_of(source)
        self._parser = ItemParser(defaults_of(record.job.spec), source.id_field, skipped)

    async def blocks(self) -> AsyncIterator[Block]:
        """Yield all of them, as they come.

        Raises:
            JobStopped: they may no longer be read, or the stream is gone.
            StorageFull: the store is full.
            TransportUnavailable: JetStream does not respond.
        """
        async for chunk in self._chunks():
            self.sequence, self.share_read = chunk.sequence, float(chunk.ended)
            reading = self._process.outside.reading
            if block := await reading.run(self._tenant, self._block, chunk):
                yield block

    def _block(self, chunk: MessageChunk) -> Block:
        first, block = chunk.count - len(chunk.messages), Block()
        for index, message in enumerate(chunk.messages, first):
            row = json_row(message, MESSAGE_BYTES_MAX)
            line = self._parser.parse(index + 1, row, self._template)
            if line is not None:
                block.append(place_line(self._job, index, line))
        return block

    async def _chunks(self) -> AsyncIterator[MessageChunk]:
        chunk, number = MessageChunk(sequence=max(1, self._source.nats_start_sequence) - 1), 0
        while not chunk.ended:
            stored = await self._store.read_messages(self._upload, number)
            if stored is None and not self._follows:
                return
            try:
                chunk = stored or await self._store_chunk(number, await self._read_chunk(chunk))
            except InvalidRequest as error:
                raise input_unreadable(error) from error
            number += 1
            await self._count(chunk, number, written=stored is None)
            yield chunk

    async def _count(self, chunk: MessageChunk, number: int, *, written: bool) -> None:
        """Record how many bytes are stored; earlier chunks were counted when they were read."""
        self._record.size_bytes += chunk.ByteSize()
        self._record.chunks = number
        if written:
            await self._store.write_upload(self._upload, self._record)
            self._process.quotas.upload(self._upload, self._record)
            self._process.quotas.check_inputs(self._tenant)

    async def _store_chunk(self, number: int, chunk: MessageChunk) -> MessageChunk:
        """Store a chunk as the next one; return it, or that of another process."""
        try:
            await self._store.write_messages(self._upload, number, chunk)
        except Fenced:
            # Another process read the same messages first: continue from its chunk.
            stored = await self._store.read_messages(self._upload, number)
            if stored is None:
                raise TransportUnavailable("the jobs store is unavailable") from None
            return stored
        return chunk

    async def _read_chunk(self, before: MessageChunk) -> MessageChunk:
        """Return the next messages: a block of them, or those that came within `COALESCE_S`."""
        stream = self._process.outside.stream_of(self._tenant, self._source)
        chunk = MessageChunk(count=before.count, sequence=before.sequence)
        size, idle_s = 0, ms_of(self._source.nats_idle) / 1e3
        begun_at = came_at = time.monotonic()
        while len(chunk.messages) < BLOCK and not chunk.ended:
            stored = await self._store.read_message(
                stream, self._source.nats_subject, chunk.sequence + 1
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
            chunk.ended = not message or chunk.count == self._source.nats_message_count
        return chunk
