"""Writes messages to JetStream beside the answers.

The queue is bounded in bytes. Its owner decides what happens when it has no room: records are dropped and counted, and
a request that would have to be audited is refused.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import islice
from typing import Final

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError
from nats.js.api import Header

_log = logging.getLogger(__name__)

QUEUE_MAX_BYTES: Final = 32 * 1024 * 1024
"""Bytes that may wait to be written, and are being written."""
MESSAGE_BYTES: Final = 512
"""What a message that waits takes beside its payload."""
BATCH_MAX: Final = 64
"""Messages that are written at once."""
WRITE_S: Final = 5.0
_RETRY_S: Final = 1.0

Message = tuple[str, bytes, float | None]
"""Subject, payload, and how long JetStream keeps it, seconds (None: as long as the stream)."""
Results = Sequence[object]
"""Of each message; an exception: it was not stored."""


class BackgroundWriter:
    """The queue of messages to be written, and the task that writes them.

    Args:
        gather_s: how long messages are gathered, seconds; JetStream then confirms the last of them, because it takes
            those of one connection in order. With 0 it confirms each.

    Attributes:
        is_full: no other message may be queued.
    """

    def __init__(self, gather_s: float = 0.0) -> None:
        self._gather_s = gather_s
        self._queue: dict[str, Message] = {}
        """By subject, oldest first."""
        self._bytes = 0
        self.is_full = False
        self._wakeup = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, subject: str, payload: bytes, keep_s: float | None = None) -> None:
        """Queues a message, instead of one for the same subject that still waits."""
        self._forget(self._queue.get(subject))
        self._queue[subject] = subject, payload, keep_s
        self._count(MESSAGE_BYTES + len(payload))
        self._empty.clear()
        self._wakeup.set()

    async def run(self, client: Client) -> None:
        """Writes until it is cancelled."""
        write = self._write_last_confirmed if self._gather_s else self._write_confirmed
        while True:
            await self._wakeup.wait()
            await asyncio.sleep(self._gather_s)
            while self._queue:
                try:
                    await self._write_batch(partial(write, client))
                except Exception:  # the task would end, and nothing would be written any more
                    _log.exception("messages were not written")
            self._wakeup.clear()
            self._empty.set()

    async def flush(self, limit_s: float) -> None:
        """Returns when the queue is empty, or after ``limit_s`` seconds; `run` must be running."""
        try:
            async with asyncio.timeout(limit_s):
                await self._empty.wait()
        except TimeoutError:
            _log.warning("%d messages were not written", len(self._queue))

    def _forget(self, message: Message | None) -> None:
        if message is not None:
            self._count(-MESSAGE_BYTES - len(message[1]))

    def _count(self, size: int) -> None:
        self._bytes += size
        self.is_full = self._bytes >= QUEUE_MAX_BYTES

    async def _write_batch(self, write: Callable[[Sequence[Message]], Awaitable[Results]]) -> None:
        """Writes the oldest; what failed is queued again in its place, unless there is something newer."""
        batch = dict(islice(self._queue.items(), BATCH_MAX))
        for key in batch:
            del self._queue[key]
        results = await write(list(batch.values()))
        failed = {}
        for (key, message), result in zip(batch.items(), results, strict=True):
            if _failed(result) and key not in self._queue:
                failed[key] = message
            else:
                self._forget(message)
        if failed:
            self._queue = {**failed, **self._queue}
            await asyncio.sleep(_RETRY_S)

    @staticmethod
    async def _write_confirmed(client: Client, messages: Sequence[Message]) -> Results:
        js = client.jetstream()
        sent = (
            js.publish(subject, payload, timeout=WRITE_S, msg_ttl=keep_s)
            for subject, payload, keep_s in messages
        )
        return await asyncio.gather(*sent, return_exceptions=True)

    @staticmethod
    async def _write_last_confirmed(client: Client, messages: Sequence[Message]) -> Results:
        *before, (subject, payload, keep_s) = messages
        try:
            for name, data, ttl_s in before:
                headers = None if ttl_s is None else {Header.MSG_TTL.value: f"{ttl_s:.0f}s"}
                await client.publish(name, data, headers=headers)
            await client.jetstream().publish(subject, payload, timeout=WRITE_S, msg_ttl=keep_s)
        except MaxPayloadError:  # of one; the others shall not be given up with it
            return await BackgroundWriter._write_confirmed(client, messages)
        except (TimeoutError, NatsError) as error:
            return [error] * len(messages)
        return [None] * len(messages)


def _failed(result: object) -> bool:
    """Whether a message must be written again. One that NATS will never take is given up."""
    if not isinstance(result, BaseException):
        return False
    if isinstance(result, MaxPayloadError) or not isinstance(result, TimeoutError | NatsError):
        _log.error("a message was given up", exc_info=result)
        return False
    return True
