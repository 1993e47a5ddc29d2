"""Tells gateways and other batchers what this batcher can do: every second, more often while tasks wait, and at once
when readiness changes.
"""

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
BUSY_INTERVAL_S: Final = 0.25
"""While tasks wait: what a new one has to expect changes quickly."""


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
            report = self._report(leaving=False)
            await self._send(report)
            busy = any(model.queued for model in report.models)
            try:
                async with asyncio.timeout(BUSY_INTERVAL_S if busy else INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def leave(self) -> None:
        """The last report."""
        await self._send(self._report(leaving=True))

    def _report(self, *, leaving: bool) -> control_pb2.BatcherReport:
        return control_pb2.BatcherReport(
            batcher=self._batcher, models=self._models(), leaving=leaving
        )

    async def _send(self, report: control_pb2.BatcherReport) -> None:
        try:
            await self._nats.publish(subjects.REPORTS, pack(report))
        except nats.errors.Error as error:
            log.warning("report: %s", error)
