"""All workers of one model."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence

from batcher.core.ledger import Ledger
from batcher.core.peers import Share
from batcher.core.scheduler.capacity import Capacity
from batcher.workers.worker import Worker, WorkerEvents
from sluice.internal.v1 import worker_pb2
from sluice.settings import BatcherSettings, ModelSettings


class Fleet:
    """Every Triton model of every address, each a `Worker`.

    Raises:
        ValueError: no address.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: ModelSettings,
        batcher: str,
        settings: BatcherSettings,
        events: WorkerEvents,
    ) -> None:
        self._workers = {
            worker.name: worker
            for url in urls
            for worker in (
                Worker(url, name, batcher, settings, events) for name in model.triton_models
            )
        }

    @property
    def live(self) -> int:
        """Workers that batches may be sent to."""
        return sum(worker.live for worker in self._workers.values())

    @property
    def slots(self) -> int:
        """Rows that live workers compute at once."""
        return sum(worker.channel.slots for worker in self._workers.values() if worker.live)

    @property
    def running(self) -> int:
        """Rows in live workers, of all batchers."""
        return sum(worker.channel.running for worker in self._workers.values() if worker.live)

    def id_of(self, worker: str) -> str:
        """What the worker calls itself now."""
        return self._workers[worker].channel.worker

    def capacities(self, ledger: Ledger, share: Share) -> list[Capacity]:
        """What may be sent to each live worker."""
        return [
            worker.channel.capacity(name, ledger.sent(name), share)
            for name, worker in self._workers.items()
            if worker.live
        ]

    async def run(self) -> None:
        """Keeps all channels open until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for worker in self._workers.values():
                group.create_task(worker.run())

    async def close(self) -> None:
        """Ends what is on its way."""
        for worker in self._workers.values():
            await worker.close()

    def send(self, worker: str, batch: worker_pb2.Batch, traceparent: str) -> None:
        """See `Worker.send`."""
        self._workers[worker].send(batch, traceparent)

    async def cancel(self, rows: Iterable[tuple[str, str]]) -> None:
        """Makes workers drop rows: worker and request."""
        by_worker: defaultdict[str, list[str]] = defaultdict(list)
        for worker, request_id in rows:
            by_worker[worker].append(request_id)
        async with asyncio.TaskGroup() as group:
            for name, request_ids in by_worker.items():
                group.create_task(self._workers[name].cancel(request_ids))
