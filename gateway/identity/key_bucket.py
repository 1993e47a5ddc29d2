"""The API keys of the mesh, as JetStream has them.

Once a second the state of the bucket is asked for, and when it has changed all keys are read. While JetStream does not
answer the last keys stay in force.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from nats.aio.client import Client

from sluice.errors import SluiceError
from sluice.internal.v1.identity_pb2 import ApiKeyRecord
from sluice.wire import jetstream
from sluice.wire.bucket import Bucket

POLL_S: Final = 1.0
"""A key that is revoked is refused this long after that, and what two questions to JetStream take."""

_log = logging.getLogger(__name__)


class KeyBucket:
    """The API keys of the mesh, read again when they change.

    Attributes:
        records: by id, as last read.
    """

    def __init__(self, replicas: int, on_change: Callable[[], None]) -> None:
        self.records: Mapping[str, ApiKeyRecord] = {}
        self._on_change = on_change
        self._bucket = Bucket(jetstream.API_KEYS, replicas)
        self._state: object = None

    async def start(self, client: Client) -> None:
        """Creates the bucket and reads it; raises as `Bucket`."""
        await self._bucket.start(client)
        await self.refresh()

    async def refresh(self) -> None:
        """Reads the keys if they have changed; raises TransportUnavailable."""
        state = await self._bucket.state()
        if state == self._state:
            return
        self.records = {key: record async for key, record in self._bucket.read_all(ApiKeyRecord)}
        self._state = state
        self._on_change()

    async def run(self) -> None:
        """Keeps `records` up to date, until it is cancelled."""
        reached = True
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.refresh()
                reached = True
            except SluiceError as error:
                if reached:  # one line, however long it lasts
                    _log.warning("API keys stay as they were: %s", error)
                reached = False
