"""Inputs from NATS: the messages of a subject, in a stream of the operator's, are the lines of a job.

They are copied into the store, a chunk at a time, when the job has room for them. A chunk says where in the stream it
ends, and is stored only where there is none yet: of two processes that read for the same job one is refused, and goes
on behind the other's chunk. So every message is in the input once, whatever is killed, and what is copied may leave the
stream. Nothing is acknowledged: the stream, and whoever else reads it, are left as they are.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Final

from jobs.core.leases import OVER
from jobs.core.window import BLOCK
from jobs.input.read import ItemParser
from jobs.process import JobProcess, input_unreadable
from jobs.sources import Block, defaults_of, one_of, template_of
from jobs.store import CHUNK_BYTES, Fenced
from sluice.errors import InvalidRequest, TransportUnavailable
from sluice.internal.v1.job_pb2 import JobRecord, MessageChunk, UploadRecord
from sluice.wire.clock import ms_of, unix_ms

MESSAGE_BYTES_MAX: Final = 1_000_000
"""The longest line; a chunk with a longer one would be more than NATS takes."""
POLL_S: Final = 0.1
"""How often new messages are looked for."""
GATHER_S: Final = 0.25
"""How long a message waits for others before they are stored."""


class MessageSource:
    """The messages of a subject.

    Attributes:
        share_read: of the input; 0: not known.
        sequence: of the last message that was taken; 0: none was.
    """

    def __init__(self, process: JobProcess, record: JobRecord, skipped: int = 0) -> None:
        """``skipped``: messages at the begin that are left out.

        The input of a job that is over, or runs again, ends with the last message that was stored.
        """
        self._follows = record.job.state not in OVER and not record.round
        self._process, self._tenant = process, record.job.tenant
        self.share_read = 0.0
        self.sequence = 0
        self._store = process.store
        self._kept = UploadRecord(tenant=self._tenant, create_unix_ms=unix_ms())
        self._job, self._upload = record.job, record.upload_id
        self._given = given = record.job.spec.input
        self._parser = ItemParser(
            template_of(given),
            defaults_of(record.job.spec),
            given.id_field,
            MESSAGE_BYTES_MAX,
            skipped,
        )

    async def blocks(self) -> AsyncIterator[Block]:
        """All of them, as they come.

        Raises:
            JobStops: they may not be read any more, or the stream is gone.
            StorageFull, TransportUnavailable.
        """
        async for chunk in self._chunks():
            self.sequence, self.share_read = chunk.sequence, float(chunk.ended)
            reading = self._process.outside.reading
            if block := await reading.run(self._tenant, self._block, chunk):
                yield block

    def _block(self, chunk: MessageChunk) -> Block:
        first, block = chunk.count - len(chunk.messages), Block()
        for index, message in enumerate(chunk.messages, first):
            one = self._parser.once(self._parser.of_json(index + 1, message))
            if one is not None:
                block.append(one_of(self._job, index, one))
        return block

    async def _chunks(self) -> AsyncIterator[MessageChunk]:
        chunk, number = MessageChunk(sequence=max(1, self._given.nats_start_sequence) - 1), 0
        while not chunk.ended:
            stored = await self._store.read_messages(self._upload, number)
            if stored is None and not self._follows:
                return
            try:
                chunk = stored or await self._stored(number, await self._gathered(chunk))
            except InvalidRequest as error:
                raise input_unreadable(error) from error
            number += 1
            await self._count(chunk, number, written=stored is None)
            yield chunk

    async def _count(self, chunk: MessageChunk, number: int, *, written: bool) -> None:
        """Tells how many bytes are stored; the chunks before were counted when they were read."""
        self._kept.size_bytes += chunk.ByteSize()
        self._kept.chunks = number
        if written:
            await self._store.write_upload(self._upload, self._kept)
            self._process.quotas.upload(self._upload, self._kept)
            self._process.quotas.check_inputs(self._tenant)

    async def _stored(self, number: int, chunk: MessageChunk) -> MessageChunk:
        """``chunk`` as the next one, or that of another process."""
        try:
            await self._store.write_messages(self._upload, number, chunk)
        except Fenced:
            stored = await self._store.read_messages(self._upload, number)
            if stored is None:
                raise TransportUnavailable("what jobs keep cannot be read") from None
            return stored
        return chunk

    async def _gathered(self, before: MessageChunk) -> MessageChunk:
        """The next messages: a block of them, or those that came in a moment."""
        stream = self._process.outside.stream_of(self._tenant, self._given)
        chunk = MessageChunk(count=before.count, sequence=before.sequence)
        size, idle_s = 0, ms_of(self._given.nats_idle) / 1e3
        begun_at = came_at = time.monotonic()
        while len(chunk.messages) < BLOCK and not chunk.ended:
            found = await self._store.read_message(
                stream, self._given.nats_subject, chunk.sequence + 1
            )
            if found is None:
                now = time.monotonic()
                if chunk.messages and now - begun_at >= GATHER_S:
                    break
                chunk.ended = 0 < idle_s <= now - came_at
                await asyncio.sleep(POLL_S)
                continue
            message, sequence = found
            size += len(message)
            if size > CHUNK_BYTES and chunk.messages:
                break  # it begins the next one
            chunk.sequence, came_at = sequence, time.monotonic()
            if message:
                chunk.count += 1
                chunk.messages.append(message[: MESSAGE_BYTES_MAX + 1])
            chunk.ended = not message or chunk.count == self._given.nats_message_count
        return chunk
