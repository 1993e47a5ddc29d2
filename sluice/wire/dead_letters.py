"""Dead letters: copies of tasks that were given up, for operators, with the reason in a header."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

import nats.errors
from nats.aio.client import Client

from sluice.wire import subjects
from sluice.wire.codec import header_bytes

log = logging.getLogger(__name__)

REASON_HEADER: Final = "Sluice-Reason"
STORE_TRIES: Final = 5
STORE_S: Final = 2.0


async def store_dead_letter(
    client: Client,
    model: str,
    priority_class: str,
    payload: bytes,
    headers: Mapping[str, str] | None,
    reason: str,
) -> None:
    """Store a task with `reason`; retry for a bounded time while JetStream does not take it, then only log the loss."""
    subject = subjects.dead_letters(model, priority_class)
    marked = {**(headers or {}), REASON_HEADER: reason}
    if len(payload) + header_bytes(marked) > client.max_payload:
        # The reason made it too large for NATS: without the payload it still tells the reason.
        payload = b""
    for _ in range(STORE_TRIES):
        try:
            await client.jetstream().publish(subject, payload, timeout=STORE_S, headers=marked)
        except nats.errors.Error as error:
            log.warning("dead letter on %s is not stored yet: %s", subject, error)
            await asyncio.sleep(STORE_S)
        else:
            log.error("dead letter on %s: %s", subject, reason)
            return
    log.error("a dead letter on %s is lost: %s", subject, reason)
