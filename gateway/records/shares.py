"""The share of each tenant of a stream: of a tenant that writes more the oldest messages are deleted."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from nats.errors import Error as NatsError
from nats.js import JetStreamContext

_log = logging.getLogger(__name__)

MESSAGE_BYTES: Final = 32
"""What JetStream keeps of a message beside its subject and its bytes."""
LOOK_SHARE: Final = 0.1
"""When the messages of a tenant have grown by this part of its share, its oldest are looked at."""
TENANTS_MAX: Final = 10_000
"""Of which it is known what they have written since."""
RETRY_S: Final = 1.0


class TenantShares:
    """Bounds what one tenant may have in a stream, so that it does not push out the messages of others.

    JetStream bounds messages by subject, not bytes: of a tenant as many are kept as fit, were they all as long as those
    that came last.
    """

    def __init__(self, stream: str, subject_of: Callable[[str], str], limit_bytes: float) -> None:
        """Let one tenant have ``limit_bytes`` of ``stream``; ``subject_of`` matches all messages of a tenant."""
        self._stream = stream
        self._subject_of = subject_of
        self._limit_bytes = limit_bytes
        self._written: dict[str, tuple[int, int]] = {}
        """By tenant: messages and their bytes since its share was looked at."""
        self._grown = asyncio.Event()

    def count(self, tenant: str, subject: str, payload_bytes: int) -> None:
        """Count a message of ``tenant`` that is written."""
        count, size = self._written.get(tenant, (0, 0))
        if not count and len(self._written) >= TENANTS_MAX:
            self._written.clear()
        size += MESSAGE_BYTES + len(subject) + payload_bytes
        self._written[tenant] = count + 1, size
        if size >= LOOK_SHARE * self._limit_bytes:
            self._grown.set()

    async def keep(self, js: JetStreamContext) -> None:
        """Delete the oldest messages of tenants that have more than their share, until it is cancelled."""
        while True:
            await self._grown.wait()
            self._grown.clear()
            for tenant, (count, size) in list(self._written.items()):
                if size >= LOOK_SHARE * self._limit_bytes:
                    await self._trim(js, tenant, max(1, int(self._limit_bytes * count / size)))

    async def _trim(self, js: JetStreamContext, tenant: str, keep: int) -> None:
        try:
            await js.purge_stream(self._stream, subject=self._subject_of(tenant), keep=keep)
        except (TimeoutError, NatsError) as error:
            _log.warning(
                "trimming of %s to the share of tenant %s failed: %s", self._stream, tenant, error
            )
            await asyncio.sleep(RETRY_S)
        else:
            self._written.pop(tenant, None)
