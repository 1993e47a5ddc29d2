"""Write messages to JetStream in the background.

The queue is bounded in bytes. Its owner decides what happens when it is full: records are dropped, while requests that
must be audited are refused.
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

logger = logging.getLogger(__name__)

QUEUE_MAX_BYTES: Final = 32 * 1024 * 1024
"""Most bytes of pending messages, including those that are being written."""
MESSAGE_BYTES: Final = 512
"""Bytes that a pending message takes beside its payload."""
BATCH_MAX: Final = 64
"""Most messages that are written at once."""
WRITE_S: Final = 5.0
"""Timeout of a write, in seconds."""
_RETRY_S: Final = 1.0
"""Pause after a failed write, in seconds."""

Message = tuple[str, bytes, float | None]
"""Subject, payload, and retention in seconds (None for that of the stream)."""
Results = Sequence[object]
"""One result for each message; an exception means that it was not stored."""


class BackgroundWriter:
    """A queue of pending messages, and the task that writes them.

    Args:
        coalesce_s: How long messages are coalesced, in seconds. JetStream then confirms only the last of a batch, as it
            stores messages of one connection in order. With 0 it confirms each.
        max_bytes: Bound of the queue, see `QUEUE_MAX_BYTES`.

    Attributes:
        is_full: Whether the queue has reached its bound.
    """

    def __init__(self, coalesce_s: float = 0.0, max_bytes: int = QUEUE_MAX_BYTES) -> None:
        self._coalesce_s = coalesce_s
        self._max_bytes = max_bytes
        self._queue: dict[str, Message] = {}
        """Pending messages by subject, oldest first."""
        self._bytes = 0
        self.is_full = False
        self._wakeup = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, subject: str, payload: bytes, keep_s: float | None = None) -> None:
        """Queue a message, which replaces a pending one of the same subject."""
        self._forget(self._queue.get(subject))
        self._queue[subject] = subject, payload, keep_s
        self._count(MESSAGE_BYTES + len(payload))
        self._empty.clear()
        self._wakeup.set()

    async def run(self, client: Client) -> None:
        """Write queued messages until cancelled."""
        write = self._write_last_confirmed if self._coalesce_s else self._write_confirmed
        while True:
            await self._wakeup.wait()
            await asyncio.sleep(self._coalesce_s)  # so that one write has several messages
            while self._queue:
                try:
                    await self._write_batch(partial(write, client))
                except (
                    Exception
                ):  # otherwise the task would end, and nothing would be written any more
                    logger.exception("writing a batch of messages failed")
            self._wakeup.clear()
            self._empty.set()

    async def flush(self, limit_s: float) -> None:
        """Wait until the queue is empty, at most `limit_s` seconds; `run` must be running."""
        try:
            async with asyncio.timeout(limit_s):
                await self._empty.wait()
        except TimeoutError:
            logger.warning("%d messages were not written within %g s", len(self._queue), limit_s)

    def _forget(self, message: Message | None) -> None:
        if message is not None:
            self._count(-MESSAGE_BYTES - len(message[1]))

    def _count(self, size: int) -> None:
        self._bytes += size
        self.is_full = self._bytes >= self._max_bytes

    async def _write_batch(self, write: Callable[[Sequence[Message]], Awaitable[Results]]) -> None:
        """Write the oldest messages; queue failed ones again, unless a newer message of the subject is pending."""
        batch = dict(islice(self._queue.items(), BATCH_MAX))
        for key in batch:
            del self._queue[key]
        results = await write(list(batch.values()))
        failed = {}
        for (key, message), result in zip(batch.items(), results, strict=True):
            # A newer message of the same subject makes the failed one obsolete.
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
        except MaxPayloadError:  # one message is too large: write the others one by one
            return await BackgroundWriter._write_confirmed(client, messages)
        except (TimeoutError, NatsError) as error:
            return [error] * len(messages)
        return [None] * len(messages)


def _failed(result: object) -> bool:
    """Return whether a message must be written again; log and give up one that NATS will never accept."""
    if not isinstance(result, BaseException):
        return False
    if isinstance(result, MaxPayloadError) or not isinstance(result, TimeoutError | NatsError):
        logger.error("dropped a message that NATS does not accept", exc_info=result)
        return False
    return True
