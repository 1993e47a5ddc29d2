"""Writes messages to JetStream beside the answers.

The queue is bounded: when JetStream cannot keep up, the newest messages are dropped and counted. No answer waits for
its record.
"""

import asyncio
import logging
from itertools import count, islice
from typing import Final

from google.protobuf.message import Message
from nats.errors import Error as NatsError
from nats.js import JetStreamContext

from sluice.wire.codec import MAX_MESSAGE_BYTES

_log = logging.getLogger(__name__)

QUEUE_MAX: Final = 8192
"""Messages that may wait to be written."""
BATCH_MAX: Final = 64
"""Messages that are written at once."""
WRITE_S: Final = 5.0
_RETRY_S: Final = 1.0


class BackgroundWriter:
    """The queue of messages to be written, and the task that writes them.

    Attributes:
        dropped: messages that were too large or found the queue full.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._queue: dict[str, tuple[str, bytes]] = {}
        """Subject and payload by key, oldest first."""
        self._numbers = count()
        self._wakeup = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, subject: str, message: Message, *, replace: bool) -> None:
        """Queues ``message``; with ``replace`` instead of one for the same subject that still waits."""
        payload, key = message.SerializeToString(), subject if replace else f"{next(self._numbers)}"
        full = len(self._queue) >= QUEUE_MAX and key not in self._queue
        if full or len(payload) > MAX_MESSAGE_BYTES:
            self._drop()
            return
        self._queue[key] = subject, payload
        self._empty.clear()
        self._wakeup.set()

    async def run(self, js: JetStreamContext) -> None:
        """Writes until it is cancelled."""
        while True:
            await self._wakeup.wait()
            while self._queue:
                try:
                    await self._write_batch(js)
                except Exception:  # the task would end, and nothing would be written any more
                    _log.exception("records were not written")
            self._wakeup.clear()
            self._empty.set()

    async def flush(self, limit_s: float) -> None:
        """Returns when the queue is empty, or after ``limit_s`` seconds; `run` must be running."""
        try:
            async with asyncio.timeout(limit_s):
                await self._empty.wait()
        except TimeoutError:
            _log.warning("%d records were not written", len(self._queue))

    def _drop(self) -> None:
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # 1, 2, 4, 8 ...: a flood does not fill the log
            _log.warning(
                "%d records dropped: too large, or JetStream does not follow", self.dropped
            )

    async def _write_batch(self, js: JetStreamContext) -> None:
        """Writes the oldest; what failed is queued again in its place, unless there is something newer."""
        batch = list(islice(self._queue.items(), BATCH_MAX))
        for key, _ in batch:
            del self._queue[key]
        results = await asyncio.gather(
            *(js.publish(*message, timeout=WRITE_S) for _, message in batch), return_exceptions=True
        )
        failed = [one for one, result in zip(batch, results, strict=True) if _failed(result)]
        if failed:
            self._queue = {**dict(failed), **self._queue}
            await asyncio.sleep(_RETRY_S)


def _failed(result: object) -> bool:
    if not isinstance(result, BaseException):
        return False
    if not isinstance(result, TimeoutError | NatsError):
        raise result
    return True
