"""The JetStream messages of the tasks that this batcher holds, unsettled until the end of their rows."""

import asyncio
import logging

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from batcher.core.effects import Settlement
from batcher.dead_letters import DeadLetters
from sluice.wire.jetstream import ACK_PROGRESS_S

log = logging.getLogger(__name__)


class HeldMessages:
    """Messages by request id; keeps JetStream from delivering them to anybody else."""

    def __init__(self, nats_client: Client) -> None:
        self._letters = DeadLetters(nats_client)
        self._messages: dict[str, Msg] = {}
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes of all held messages."""
        return self._size

    def keep(self, request_id: str, message: Msg) -> bool:
        """Holds ``message``; False when the request was held before: then this is a newer delivery of the same task."""
        known = self._forget(request_id)
        self._messages[request_id] = message
        self._size += len(message.data)
        return known is None

    async def settle(self, request_id: str, how: Settlement) -> None:
        """Tells JetStream; a request that is not held is ignored."""
        message = self._forget(request_id)
        if message is None or how is Settlement.LEAVE:
            return
        try:
            await (message.ack() if how is Settlement.ACK else message.nak())
        except nats.errors.Error as error:
            # It will be delivered again, and the gateway will say that it does not wait.
            log.warning("request %s cannot be settled: %s", request_id, error)

    async def bury(self, request_id: str, reason: str) -> None:
        """Makes the task of a held request a dead letter."""
        # Not held from here on: the confirmation of its end must not acknowledge what is terminated.
        message = self._forget(request_id)
        if message is not None:
            await self.bury_message(message, reason)

    async def bury_message(self, message: Msg, reason: str) -> None:
        """Copies a message to the dead letters, and takes it out of the work queue when it is stored there."""
        if await self._letters.store(message.subject, message.data, message.headers, reason):
            try:
                await message.term()
            except nats.errors.Error as error:
                log.warning("a dead letter will come again: %s", error)

    async def keep_alive(self) -> None:
        """Says every `ACK_PROGRESS_S` that the held tasks are worked on, until it is cancelled."""
        while True:
            await asyncio.sleep(ACK_PROGRESS_S)
            for message in list(self._messages.values()):
                try:
                    await message.in_progress()
                except nats.errors.Error as error:
                    log.warning("in-progress acknowledgement: %s", error)
                    break

    def _forget(self, request_id: str) -> Msg | None:
        message = self._messages.pop(request_id, None)
        if message is not None:
            self._size -= len(message.data)
        return message
