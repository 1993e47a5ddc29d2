"""The event loop of one model: its tasks, its workers, its frames. All events arrive here.

Events only change the request table and wake the loop; only the loop carries out the table's effects, so that frames
keep their order:

    wake -> advance the table -> carry out its effects -> let the inbox pull as far as there is room -> sleep
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nats.aio.client import Client

from batcher.core.effects import Effects
from batcher.core.requests import Requests
from batcher.core.row import Row
from batcher.core.workers import Peers
from batcher.gateways import Gateways, ask_held
from batcher.jetstream.acks import HeldMessages
from batcher.jetstream.inbox import Inbox
from batcher.spans import RowSpans
from batcher.workers.worker import Fleet, name_of
from sluice.internal.v1 import control_pb2, worker_pb2
from sluice.settings import BatcherSettings, ModelSettings, Settings

log = logging.getLogger(__name__)

CLOSE_S: Final = 3.0
"""How long questions and dead letters may still take when the batcher ends."""


@dataclass(frozen=True)
class Process:
    """The state that all models of one batcher process share.

    Attributes:
        batcher: its id.
        peers: the other batchers.
        on_readiness: called when the readiness of a model changed.
    """

    nats_client: Client
    batcher: str
    gateways: Gateways
    spans: RowSpans
    peers: Peers
    on_readiness: Callable[[], None]


class ModelLoop:
    """One model of the batcher.

    Attributes:
        inbox: its tasks.
    """

    def __init__(
        self, process: Process, model: ModelSettings, urls: Sequence[str], settings: Settings
    ) -> None:
        batcher = settings.batcher
        workers = [name_of(url, name) for url in urls for name in model.triton_models]
        self._model = model.name
        self._process = process
        self._requests = Requests(
            process.batcher,
            policy=batcher.policy_of(model.name),
            final_retry_s=batcher.final_retry_s,
            weights=settings.weights,
            ranked=workers,
            standby=model.standby,
        )
        self._messages = HeldMessages(process.nats_client)
        self._fleet = Fleet(urls, model, process.batcher, batcher, self)
        self.inbox = Inbox(
            process.nats_client,
            model.name,
            _pending_max(model, len(workers), batcher),
            batcher,
            self._requests,
            self._messages,
            process.spans.arrived,
            self.wake,
        )
        self._woken = asyncio.Event()
        self._idle = asyncio.Event()
        self._chores: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Runs the model until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._fleet.run())
            group.create_task(self._messages.keep_alive())
            group.create_task(self._loop())

    async def drain(self, drain_s: float) -> None:
        """Returns waiting tasks, lets running rows end for at most ``drain_s`` seconds, and returns the rest.

        The inbox must have stopped; `run` must go on until this returns.
        """
        await self.inbox.settle()
        self._requests.drain(time.monotonic())
        try:
            async with asyncio.timeout(drain_s):
                await self._until_idle()
        except TimeoutError:
            log.warning(
                "%d rows of %s are returned to the work queue", len(self._requests), self._model
            )
            self._requests.release(time.monotonic())
            await self._until_idle()

    async def close(self) -> None:
        """Waits a bounded time for open questions and dead letters; closes the connections to the workers."""
        if self._chores:
            await asyncio.wait(self._chores, timeout=CLOSE_S)
        await self._fleet.close()

    def change(self, settings: Settings) -> None:
        """Takes another policy, other weights and limits; see `batcher.app.check_change`."""
        self.inbox.settings = settings.batcher
        self._requests.change_policy(settings.batcher.policy_of(self._model), settings.weights)
        self.wake()

    def report(self) -> control_pb2.ModelReport:
        """The report on the model for gateways and other batchers."""
        workers, queue = self._requests.active_workers().values(), self._requests.queue
        return control_pb2.ModelReport(
            model=self._model,
            workers=len(workers),
            slots=sum(worker.slots for worker in workers),
            running=sum(worker.running for worker in workers),
            queued=len(queue),
            classes=queue.class_reports(self.inbox.backlog, time.monotonic()),
            tokens_per_s=queue.tokens_per_s,
        )

    def wake(self) -> None:
        """Wakes the loop to advance the table."""
        self._woken.set()

    # Events of gateways and workers.

    def on_control(self, message: control_pb2.ControlMessage) -> None:
        """A cancel, resend or confirm; requests that are not held are ignored."""
        now = time.monotonic()
        match message.WhichOneof("message"):
            case "cancel":
                self._requests.cancel(message.cancel.request_ids, now)
            case "confirm":
                self._requests.confirm(message.confirm.request_ids, now)
            case "resend":
                self._requests.resend(message.resend.request_id, message.resend.from_index)
        self.wake()

    def on_step(self, worker: str, report: worker_pb2.StepReport) -> None:
        """See `batcher.workers.worker.WorkerEvents`."""
        self.wake()
        self._requests.step(worker, report, time.monotonic())

    def on_live(self, worker: str) -> None:
        """See `batcher.workers.worker.WorkerEvents`."""
        self._process.on_readiness()

    def on_queued(self, worker: str, batch_id: str) -> None:
        """See `batcher.workers.worker.WorkerEvents`."""
        self._requests.queued(worker, batch_id, time.monotonic())
        self.wake()

    def on_lost(self, worker: str) -> None:
        """See `batcher.workers.worker.WorkerEvents`."""
        self._requests.lost(worker, time.monotonic())
        self._process.on_readiness()
        self.wake()

    # The loop.

    async def _loop(self) -> None:
        while True:
            self._woken.clear()
            now = time.monotonic()
            share = self._process.peers.share(self._model, now)
            self._requests.advance(now, self._requests.capacities(share, now))
            await self._carry_out(self._requests.take())
            self.inbox.nudge()
            if not len(self._requests) and not self._woken.is_set():
                self._idle.set()
            await self._sleep()

    async def _sleep(self) -> None:
        wake_at = self._requests.wake_at()
        left_s = None if wake_at is None else max(0.0, wake_at - time.monotonic())
        try:
            async with asyncio.timeout(left_s):
                await self._woken.wait()
        except TimeoutError:
            return

    async def _until_idle(self) -> None:
        self._idle.clear()
        self._woken.set()
        await self._idle.wait()

    async def _carry_out(self, effects: Effects) -> None:
        process = self._process
        for move in effects.moves:
            process.spans.moved(move)
        for formed in effects.batches:
            own, *rows = process.spans.formed(formed)
            batch = formed.message(process.batcher, rows, time.monotonic())
            self._fleet.send(formed.batch.worker, batch, own)
        await process.gateways.send(effects.frames)
        if effects.cancels:
            self._spawn(self._fleet.cancel(effects.cancels))
        for row in effects.dead:
            assert row.final is not None
            self._spawn(self._messages.bury(row.request_id, row.final.error.message))
        for row in effects.questions:
            self._spawn(self._ask(row))
        for request_id, how in effects.settled:
            await self._messages.settle(request_id, how)

    async def _ask(self, row: Row) -> None:
        answer = await ask_held(self._process.nats_client, row.task.gateway, row.request_id)
        self._requests.resumed(row.request_id, answer, time.monotonic())
        self.wake()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)


def _pending_max(model: ModelSettings, workers: int, settings: BatcherSettings) -> int:
    """Tasks of a class that all batchers may hold together: never reached, since each has its own limit.

    Twice what the workers take, as some ends wait for a confirm, and what `batchers_max` batchers hold ahead.
    """
    in_workers = workers * (model.slots + model.max_waiting_rows)
    return 2 * in_workers + settings.batchers_max * settings.prefetch_rows
