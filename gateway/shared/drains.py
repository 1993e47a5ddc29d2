"""Workers that operators have drained: a record in JetStream that gateways read, and of which they tell batchers."""

import asyncio
import logging
from contextlib import suppress
from typing import Final

from nats.aio.client import Client
from nats.errors import Error as NatsError

from sluice.errors import RETRY_AFTER_S, SluiceError, TransportUnavailable
from sluice.internal.v1.control_pb2 import (
    BatcherReport,
    ControlMessage,
    DrainedWorker,
    DrainRecord,
    DrainsChanged,
)
from sluice.wire import subjects
from sluice.wire.bucket import Bucket
from sluice.wire.codec import pack

_log = logging.getLogger(__name__)

READ_S: Final = 30.0
"""How often the record is read although no batcher knows a later one, seconds."""
_TRIES: Final = 8
"""Writes of several operators at the same moment."""


class Drains:
    """Reads and writes the record; batchers need no JetStream."""

    def __init__(self, gateway_id: str, bucket: Bucket) -> None:
        self._gateway = gateway_id
        self._bucket = bucket
        self._client: Client | None = None
        self._record, self._revision = DrainRecord(), 0
        self._changed = asyncio.Event()

    def use(self, client: Client) -> None:
        """Batchers are told over it."""
        self._client = client

    async def run(self) -> None:
        """Reads until it is cancelled; what was read last is told while JetStream does not answer."""
        while True:
            self._changed.clear()
            try:
                await self._read()
            except SluiceError as error:
                _log.debug("the record of drained workers is not read: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(READ_S):
                    await self._changed.wait()

    async def on_report(self, report: BatcherReport) -> None:
        """Tells a batcher that does not know the record; reads it when another gateway has told one of a later one."""
        if report.drains_revision < self._revision:
            await self._tell(subjects.control_to(report.batcher))
        elif report.drains_revision > self._revision:
            self._changed.set()

    async def change(self, model: str, worker: str, *, drained: bool) -> DrainRecord:
        """Adds a worker to the record, or takes it out; returns the record.

        Raises:
            TransportUnavailable: JetStream does not answer.
        """
        for _ in range(_TRIES):
            record = await self._read()
            one = DrainedWorker(model=model, worker=worker)
            if (one in record.workers) is drained:
                return record
            changed = DrainRecord(workers=record.workers)
            if drained:
                changed.workers.append(one)
            else:
                changed.workers.remove(one)
            if await self._bucket.write(subjects.DRAINED_WORKERS, changed, self._revision):
                await self._read()
                await self._tell(subjects.CONTROL)
                return changed
        raise TransportUnavailable(
            "others change drained workers at the same time", retry_after_s=RETRY_AFTER_S
        )

    async def _read(self) -> DrainRecord:
        found = await self._bucket.read(subjects.DRAINED_WORKERS, DrainRecord)
        self._record, self._revision = found or (DrainRecord(), 0)
        return self._record

    async def _tell(self, subject: str) -> None:
        assert self._client is not None, "started"
        told = DrainsChanged(record=self._record, revision=self._revision)
        message = ControlMessage(gateway=self._gateway, drains_changed=told)
        try:
            await self._client.publish(subject, pack(message))
        except NatsError as error:
            _log.debug("batchers are not told of drained workers: %s", error)
