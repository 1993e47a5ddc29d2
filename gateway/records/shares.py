"""Bound each tenant's share of a stream: of a tenant that exceeds it, the oldest messages are deleted."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from nats.errors import Error as NatsError
from nats.js import JetStreamContext

logger = logging.getLogger(__name__)

MESSAGE_BYTES: Final = 32
"""Bytes that JetStream stores for a message beside its subject and its payload."""
CHECK_FRACTION: Final = 0.1
"""A tenant's messages are trimmed each time it has written this fraction of its share."""
TENANTS_MAX: Final = 10_000
"""Most tenants whose written messages are counted; with one more, counting starts again."""
RETRY_S: Final = 1.0
"""Pause after a failed trim, in seconds."""


class TenantShares:
    """A bound on each tenant's bytes in a stream, so that no tenant displaces the messages of others.

    JetStream can limit messages by subject but not bytes, so the number to keep follows from the average length of the
    tenant's latest messages.
    """

    def __init__(self, stream: str, subject_of: Callable[[str], str], limit_bytes: float) -> None:
        """Limit each tenant to `limit_bytes` of `stream`; `subject_of` returns the subject of all its messages."""
        self._stream = stream
        self._subject_of = subject_of
        self._limit_bytes = limit_bytes
        self._written: dict[str, tuple[int, int]] = {}
        """Number and bytes of messages since the last trim, by tenant."""
        self._grown = asyncio.Event()

    def count(self, tenant: str, subject: str, payload_bytes: int) -> None:
        """Count a message that `tenant` writes."""
        count, size = self._written.get(tenant, (0, 0))
        # Forgetting what was written only delays the next trim.
        if not count and len(self._written) >= TENANTS_MAX:
            self._written.clear()
        size += MESSAGE_BYTES + len(subject) + payload_bytes
        self._written[tenant] = count + 1, size
        if size >= CHECK_FRACTION * self._limit_bytes:
            self._grown.set()

    async def keep(self, js: JetStreamContext) -> None:
        """Trim the messages of tenants that exceed their share, until cancelled."""
        while True:
            await self._grown.wait()
            self._grown.clear()
            for tenant, (count, size) in list(self._written.items()):
                if size >= CHECK_FRACTION * self._limit_bytes:
                    await self._trim(js, tenant, max(1, int(self._limit_bytes * count / size)))

    async def _trim(self, js: JetStreamContext, tenant: str, keep: int) -> None:
        try:
            await js.purge_stream(self._stream, subject=self._subject_of(tenant), keep=keep)
        except (TimeoutError, NatsError) as error:
            logger.warning(
                "trimming %s to the share of tenant %s failed: %s", self._stream, tenant, error
            )
            await asyncio.sleep(RETRY_S)
        else:
            self._written.pop(tenant, None)
