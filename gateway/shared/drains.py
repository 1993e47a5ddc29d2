"""Workers that operators have drained: a record in JetStream that gateways pass on to batchers.

Batchers need no JetStream: they report the revision of the record that they know, and a gateway
with a later one sends it.
"""

import asyncio
import logging
from typing import Final

from gateway.shared.peers import Peers
from sluice.background import wait_for_event
from sluice.errors import SluiceError, TransportUnavailable
from sluice.internal.v1.control_pb2 import (
    BatcherReport,
    ControlMessage,
    DrainedWorker,
    DrainRecord,
    DrainsChanged,
)
from sluice.wire import subjects
from sluice.wire.bucket import Bucket

logger = logging.getLogger(__name__)

READ_S: Final = 30.0
"""Interval at which the record is read even if no batcher reports a later one, in seconds."""
_TRIES: Final = 8
"""Attempts to change the record while other operators change it."""


class Drains:
    """Reads, changes and announces the record of drained workers."""

    def __init__(self, peers: Peers, bucket: Bucket) -> None:
        self._peers = peers
        self._bucket = bucket
        self._record, self._revision = DrainRecord(), 0
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Keep the record up to date until it is cancelled; without JetStream the last one stays in use."""
        while True:
            self._changed.clear()
            try:
                await self._read()
            except SluiceError as error:
                logger.debug("reading the record of drained workers failed: %s", error)
            await wait_for_event(self._changed, READ_S)

    async def on_report(self, report: BatcherReport) -> None:
        """Send the record to a batcher with an older one; read it again if a batcher has a newer one."""
        # A batcher that has just started, or that missed a change.
        if report.drains_revision < self._revision:
            await self._announce(subjects.control_to(report.batcher))
        elif report.drains_revision > self._revision:
            self._changed.set()

    async def change(self, model: str, worker: str, *, drained: bool) -> DrainRecord:
        """Add a worker to the record, or remove it, and announce the change.

        Returns:
            The record in force afterwards.

        Raises:
            TransportUnavailable: JetStream does not respond, or others change the record at the same time.
        """
        for _ in range(_TRIES):
            record = await self._read()
            entry = DrainedWorker(model=model, worker=worker)
            # Nothing to do, or another operator was first.
            if (entry in record.workers) is drained:
                return record
            changed = DrainRecord(workers=record.workers)
            if drained:
                changed.workers.append(entry)
            else:
                changed.workers.remove(entry)
            if await self._bucket.write(subjects.DRAINED_WORKERS, changed, self._revision):
                await self._read()
                await self._announce(subjects.CONTROL)
                return changed
        raise TransportUnavailable(
            "drained workers: others change them at the same time; try again"
        )

    async def _read(self) -> DrainRecord:
        stored = await self._bucket.read(subjects.DRAINED_WORKERS, DrainRecord)
        self._record, self._revision = stored or (DrainRecord(), 0)
        return self._record

    async def _announce(self, subject: str) -> None:
        change = DrainsChanged(record=self._record, revision=self._revision)
        gateway = self._peers.gateway_id
        await self._peers.publish(subject, ControlMessage(gateway=gateway, drains_changed=change))
