"""Which workers operators have drained: read from JetStream at the start, when a gateway tells of a change, and now and
then."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from nats.aio.client import Client

from sluice.errors import SluiceError
from sluice.internal.v1.gateway_pb2 import DrainRecord
from sluice.wire import jetstream, subjects
from sluice.wire.bucket import Bucket

log = logging.getLogger(__name__)

READ_S: Final = 10.0
"""How often the record is read when nobody tells of a change, seconds."""
RETRY_S: Final = 1.0

Drained = Mapping[str, frozenset[str]]
"""Names of workers, by model."""


class Drains:
    """Reads the record of drained workers.

    Args:
        changed: called with those that are drained, when they are others than before.
    """

    def __init__(self, nats_client: Client, changed: Callable[[Drained], None]) -> None:
        self._bucket = Bucket(jetstream.DRAINS)
        self._bucket.open(nats_client)
        self._changed = changed
        self._drained: Drained = {}
        self._told = asyncio.Event()

    def read_now(self) -> None:
        """The record has changed, or may have."""
        self._told.set()

    async def run(self) -> None:
        """Reads until it is cancelled; what was read last stays in force while JetStream does not answer."""
        while True:
            self._told.clear()
            wait_s = READ_S
            try:
                await self._read()
            except SluiceError as error:
                log.debug("the record of drained workers is not read: %s", error)
                wait_s = RETRY_S
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._told.wait()

    async def _read(self) -> None:
        found = await self._bucket.read(subjects.DRAINED_WORKERS, DrainRecord)
        names: defaultdict[str, set[str]] = defaultdict(set)
        for one in found[0].workers if found else ():
            names[one.model].add(one.worker)
        drained = {model: frozenset(workers) for model, workers in names.items()}
        if drained != self._drained:
            self._drained = drained
            log.info("drained workers: %s", sorted(set().union(*drained.values())) or "none")
            self._changed(drained)
