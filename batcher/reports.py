"""Tells the gateways every second, and at every change of readiness, what this batcher can do."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import nats.errors
from nats.aio.client import Client

from sluice.internal.v1 import control_pb2
from sluice.wire import subjects
from sluice.wire.codec import pack

log = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0


class Reporter:
    """Publishes `BatcherReport`.

    Args:
        models: the state of every model now.
    """

    def __init__(
        self,
        nats_client: Client,
        batcher: str,
        models: Callable[[], Sequence[control_pb2.ModelReport]],
    ) -> None:
        self._nats = nats_client
        self._batcher = batcher
        self._models = models
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Readiness is not what it was: do not wait for the next second."""
        self._changed.set()

    async def run(self) -> None:
        """Reports until it is cancelled."""
        while True:
            self._changed.clear()
            await self._send(leaving=False)
            try:
                async with asyncio.timeout(INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def leave(self) -> None:
        """The last report."""
        await self._send(leaving=True)

    async def _send(self, *, leaving: bool) -> None:
        report = control_pb2.BatcherReport(
            batcher=self._batcher, models=self._models(), leaving=leaving
        )
        try:
            await self._nats.publish(subjects.REPORTS, pack(report))
        except nats.errors.Error as error:
            log.warning("report: %s", error)
