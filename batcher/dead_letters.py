"""Copies of tasks that were given up, for operators: the message as it came, the reason in a header."""

import logging
from collections.abc import Mapping
from typing import Final

import nats.errors
from nats.aio.client import Client

from sluice.wire import subjects
from sluice.wire.codec import header_bytes

log = logging.getLogger(__name__)

REASON_HEADER: Final = "Sluice-Reason"
TRIES: Final = 5
STORE_S: Final = 2.0


class DeadLetters:
    """The stream of dead letters."""

    def __init__(self, nats_client: Client) -> None:
        self._nats = nats_client
        self._js = nats_client.jetstream()

    async def store(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None, reason: str
    ) -> bool:
        """Stores what came on ``subject`` of the work queue; whether JetStream has it.

        The id of the message goes with it, so that a second try does not store it twice.
        """
        letter = subjects.DEAD_LETTERS + subject.removeprefix(subjects.TASKS)
        marked = {**(headers or {}), REASON_HEADER: reason}
        if len(data) + header_bytes(marked) > self._nats.max_payload:
            # The reason made it too large for NATS: without the payload it still tells what happened.
            data = b""
        for _ in range(TRIES):
            try:
                await self._js.publish(letter, data, timeout=STORE_S, headers=marked)
            except nats.errors.Error as error:
                log.warning("dead letter on %s is not stored yet: %s", letter, error)
            else:
                log.error("dead letter on %s: %s", letter, reason)
                return True
        return False
