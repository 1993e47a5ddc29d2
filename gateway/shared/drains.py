"""Workers that operators have drained: a record in JetStream, which batchers read."""

import logging
from typing import Final

from nats.aio.client import Client
from nats.errors import Error as NatsError

from sluice.errors import RETRY_AFTER_S, TransportUnavailable
from sluice.internal.v1.control_pb2 import ControlMessage, DrainsChanged
from sluice.internal.v1.gateway_pb2 import DrainedWorker, DrainRecord
from sluice.wire import subjects
from sluice.wire.bucket import Bucket
from sluice.wire.codec import pack

_log = logging.getLogger(__name__)

_TRIES: Final = 8
"""Writes of several operators at the same moment."""


class Drains:
    """Writes the record."""

    def __init__(self, gateway_id: str, bucket: Bucket) -> None:
        self._gateway = gateway_id
        self._bucket = bucket
        self._client: Client | None = None

    def use(self, client: Client) -> None:
        """Batchers are told over it."""
        self._client = client

    async def change(self, model: str, worker: str, *, drained: bool) -> DrainRecord:
        """Adds a worker to the record, or takes it out; returns the record.

        Raises:
            TransportUnavailable: JetStream does not answer.
        """
        for _ in range(_TRIES):
            found = await self._bucket.read(subjects.DRAINED_WORKERS, DrainRecord)
            record, revision = found or (DrainRecord(), 0)
            one = DrainedWorker(model=model, worker=worker)
            if (one in record.workers) is drained:
                return record
            if drained:
                record.workers.append(one)
            else:
                record.workers.remove(one)
            if await self._bucket.write(subjects.DRAINED_WORKERS, record, revision) is not None:
                await self._tell()
                return record
        raise TransportUnavailable(
            "others change drained workers at the same time", retry_after_s=RETRY_AFTER_S
        )

    async def _tell(self) -> None:
        """Batchers read the record now and then; this is quicker."""
        assert self._client is not None, "started"
        message = ControlMessage(gateway=self._gateway, drains_changed=DrainsChanged())
        try:
            await self._client.publish(subjects.CONTROL, pack(message))
        except NatsError as error:
            _log.debug("batchers are not told of drained workers: %s", error)
