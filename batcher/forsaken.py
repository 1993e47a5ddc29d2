"""Tasks whose last delivery ended without a word: whoever took them died of it each time, or was away too long.

JetStream delivers them to nobody any more and keeps them; only its advisory tells. One of the batchers makes them dead
letters.
"""

import json
import logging
from typing import Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from batcher.dead_letters import DeadLetters
from sluice.wire import subjects

log = logging.getLogger(__name__)

ADVISORY: Final = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{subjects.TASKS_STREAM}.*"
GROUP: Final = "batchers"
REASON: Final = "delivered {} times, and no batcher said what became of it"


class Forsaken:
    """Listens for advisories."""

    def __init__(self, nats_client: Client) -> None:
        self._nats = nats_client
        self._js = nats_client.jetstream()
        self._letters = DeadLetters(nats_client)

    async def listen(self) -> None:
        """Takes advisories until the connection closes; each goes to one batcher."""
        await self._nats.subscribe(ADVISORY, queue=GROUP, cb=self._take)

    async def _take(self, advisory: Msg) -> None:
        try:
            told = json.loads(advisory.data)
            sequence, deliveries = int(told["stream_seq"]), int(told["deliveries"])
        except (ValueError, KeyError, TypeError) as error:
            log.error("advisory of JetStream cannot be read: %s", error)
            return
        try:
            stored = await self._js.get_msg(subjects.TASKS_STREAM, sequence)
            assert stored.subject is not None
            reason, data = REASON.format(deliveries), stored.data or b""
            if await self._letters.store(stored.subject, data, stored.headers, reason):
                await self._js.delete_msg(subjects.TASKS_STREAM, sequence)
        except NotFoundError:
            return  # Its holder was slow, not dead.
        except nats.errors.Error as error:
            log.error("task %d of the work queue is left where it is: %s", sequence, error)
