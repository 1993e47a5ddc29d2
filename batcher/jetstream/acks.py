"""Settles the JetStream messages of tasks: acknowledged at the end of the row, returned, or made a dead letter.

A dead letter is a copy of a failed task for operators: the original message, with the reason in a header.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from batcher.core.effects import Settlement
from sluice.wire import subjects
from sluice.wire.codec import header_bytes
from sluice.wire.jetstream import ACK_PROGRESS_S

log = logging.getLogger(__name__)

REASON_HEADER: Final = "Sluice-Reason"
STORE_TRIES: Final = 5
STORE_S: Final = 2.0

ADVISORY: Final = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{subjects.TASKS_STREAM}.*"
ADVISORY_GROUP: Final = "batchers"
MAX_DELIVERIES_REASON: Final = "delivered {} times, and no batcher said what became of it"


class DeadLetters:
    """The stream of dead letters."""

    def __init__(self, nats_client: Client) -> None:
        self._nats = nats_client
        self._js = nats_client.jetstream()

    async def store(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None, reason: str
    ) -> bool:
        """Stores a message of ``subject`` of the work queue; returns whether JetStream has it.

        The id of the message goes with it, so that a second try does not store it twice.
        """
        letter = subjects.DEAD_LETTERS + subject.removeprefix(subjects.TASKS)
        marked = {**(headers or {}), REASON_HEADER: reason}
        if len(data) + header_bytes(marked) > self._nats.max_payload:
            # The reason made it too large for NATS: without the payload it still tells the reason.
            data = b""
        for _ in range(STORE_TRIES):
            try:
                await self._js.publish(letter, data, timeout=STORE_S, headers=marked)
            except nats.errors.Error as error:
                log.warning("dead letter on %s is not stored yet: %s", letter, error)
            else:
                log.error("dead letter on %s: %s", letter, reason)
                return True
        return False


class HeldMessages:
    """Messages by request id; keeps JetStream from redelivering them."""

    def __init__(self, nats_client: Client) -> None:
        self._letters = DeadLetters(nats_client)
        self._messages: dict[str, Msg] = {}
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes of all held messages."""
        return self._size

    def keep(self, request_id: str, message: Msg) -> bool:
        """Holds ``message``; False when the request was held already: a newer delivery of the task."""
        known = self._forget(request_id)
        self._messages[request_id] = message
        self._size += len(message.data)
        return known is None

    async def settle(self, request_id: str, how: Settlement) -> None:
        """Settles the message of a request; one that is not held is ignored."""
        message = self._forget(request_id)
        if message is None or how is Settlement.LEAVE:
            return
        try:
            await (message.ack() if how is Settlement.ACK else message.nak())
        except nats.errors.Error as error:
            # It will be redelivered, and the gateway will answer that it does not wait for it.
            log.warning("request %s cannot be settled: %s", request_id, error)

    async def bury(self, request_id: str, reason: str) -> None:
        """Makes the task of a held request a dead letter."""
        # Not held from here on: the confirmation of its end must not acknowledge what is terminated.
        message = self._forget(request_id)
        if message is not None:
            await self.bury_message(message, reason)

    async def bury_message(self, message: Msg, reason: str) -> None:
        """Copies a message to the dead letters, and removes it from the work queue once it is stored there."""
        if await self._letters.store(message.subject, message.data, message.headers, reason):
            try:
                await message.term()
            except nats.errors.Error as error:
                log.warning("the task of a dead letter stays in the work queue: %s", error)

    async def keep_alive(self) -> None:
        """Sends in-progress acknowledgements for the held tasks every `ACK_PROGRESS_S`, until it is cancelled."""
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


class MaxDeliveries:
    """Makes dead letters of tasks that reached the delivery limit without being settled.

    JetStream no longer delivers them but keeps them, and publishes an advisory, which one of the batchers gets.
    """

    def __init__(self, nats_client: Client) -> None:
        self._nats = nats_client
        self._js = nats_client.jetstream()
        self._letters = DeadLetters(nats_client)

    async def listen(self) -> None:
        """Takes advisories until the connection closes; each goes to one batcher."""
        await self._nats.subscribe(ADVISORY, queue=ADVISORY_GROUP, cb=self._take)

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
            reason, data = MAX_DELIVERIES_REASON.format(deliveries), stored.data or b""
            if await self._letters.store(stored.subject, data, stored.headers, reason):
                await self._js.delete_msg(subjects.TASKS_STREAM, sequence)
        except NotFoundError:
            return  # Its batcher was slow, not dead.
        except nats.errors.Error as error:
            log.error("task %d stays in the work queue: %s", sequence, error)
