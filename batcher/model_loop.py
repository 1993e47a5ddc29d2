"""The event loop of one model: its tasks, its workers, its frames. All events arrive here.

Events only change the request table and wake the loop; only the loop carries out the table's effects, so that frames
keep their order:

    wake -> advance the table -> carry out its effects -> sleep

A fault of any part ends all of it: `run` raises, and the owner makes a new one. What was held is forgotten, and its
gateways send it again.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import grpc
from typing_extensions import override

from batcher.core.frames import final_frame
from batcher.core.requests import Effects, Requests
from batcher.core.row import Row, batch_message
from batcher.core.workers import Workers
from batcher.gateways import Gateways
from batcher.metrics import BatcherMetrics
from batcher.policy_in_force import PolicyInForce
from batcher.spans import RowSpans
from batcher.workers.worker import Worker, WorkerEvents
from sluice.background import BackgroundTasks
from sluice.errors import EngineFailed, Overloaded
from sluice.internal.v1 import control_pb2, frame_pb2, task_pb2, worker_pb2
from sluice.settings import ModelSettings, Settings
from sluice.wire.subjects import CLASSES

log = logging.getLogger(__name__)

CLOSE_S: Final = 3.0
"""How long what is on its way may still take when the batcher ends."""
ROOM_CLASSES: Final = len(CLASSES) - 1
"""Classes that share the bytes: tasks of the most urgent one do not wait for room."""


@dataclass(frozen=True)
class Process:
    """The state that all models of one batcher process share.

    Attributes:
        batcher: its id.
        on_readiness: called when the readiness of a model changed.
        on_capacity: called when all granted capacity of a model is used, or not any more.
        metrics: what it counts.
        worker_credentials: for calls to Triton; None: not encrypted.
    """

    batcher: str
    gateways: Gateways
    spans: RowSpans
    on_readiness: Callable[[], None]
    on_capacity: Callable[[], None]
    metrics: BatcherMetrics
    worker_credentials: grpc.ChannelCredentials | None = None


class ModelLoop(WorkerEvents):
    """One model of the batcher."""

    def __init__(
        self, process: Process, model: ModelSettings, urls: Sequence[str], settings: Settings
    ) -> None:
        batcher = settings.batcher
        credentials = process.worker_credentials
        workers = [
            Worker(url, name, process.batcher, batcher, self, credentials)
            for url in urls
            for name in model.triton_models
        ]
        self._workers = {worker.name: worker for worker in workers}
        self._model = model.task_name
        self._prefix_cache = model.prefix_cache
        self._policy = PolicyInForce(model, settings, datetime.now(UTC))
        self._process = process
        self._requests = Requests(
            process.batcher,
            policy=self._policy.policy,
            weights=self._policy.weights,
            workers=Workers(list(self._workers), model.standby),
        )
        process.metrics.serves(self._model, list(self._workers), self._requests)
        self._room_rows, self._room_bytes = batcher.room_rows, batcher.room_bytes
        self._woken = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._idle = asyncio.Event()
        self._chores = BackgroundTasks(self._on_fault)
        self._fault: Exception | None = None
        self._was_full = False

    async def run(self) -> None:
        """Runs the model until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for worker in self._workers.values():
                group.create_task(worker.run())
            group.create_task(self._loop())

    async def drain(self, drain_s: float) -> None:
        """Returns waiting tasks, lets running rows end for at most ``drain_s`` seconds, and returns the rest.

        `run` must go on until this returns.
        """
        self._requests.drain(time.monotonic())
        try:
            async with asyncio.timeout(drain_s):
                await self._until_idle()
        except TimeoutError:
            log.warning(
                "%d rows of %s are returned to their gateways", self._requests.active, self._model
            )
            self._requests.drain(time.monotonic(), running=True)
            await self._until_idle()

    async def close(self) -> None:
        """Waits a bounded time for what is on its way; closes the connections to the workers."""
        await self._chores.settle(CLOSE_S)
        for worker in self._workers.values():
            await worker.close()

    def change(self, settings: Settings) -> None:
        """Take another policy, other weights and limits; see `batcher.app.check_change`."""
        self._room_rows, self._room_bytes = settings.batcher.room_rows, settings.batcher.room_bytes
        self._policy.change(settings, datetime.now(UTC))
        self._use_policy()

    def follow_schedule(self, moment: datetime) -> None:
        """Take the policy that the schedule puts in force at ``moment``, if that is another one."""
        if self._policy.follow(moment):
            self._use_policy()

    def log_notes(self) -> None:
        """Log in which respect the policy makes no difference to the model's engine."""
        self._policy.log_notes()

    def _use_policy(self) -> None:
        self._requests.change_policy(self._policy.policy, self._policy.weights)
        self.wake()

    def drain_workers(self, names: frozenset[str]) -> None:
        """Only these workers get no new rows."""
        self._requests.workers.drained = names
        self._process.on_readiness()
        self.wake()

    def report(self, gateways: int) -> control_pb2.ModelReport:
        """The report on the model for gateways; ``gateways``: how many share its room."""
        now, queue = time.monotonic(), self._requests.queue
        active = self._requests.workers.active()
        workers = active.values()
        closed_s = min((worker.load.paused_ms for worker in workers), default=0.0) / 1e3
        capacities = self._requests.workers.capacities(active, now)
        report = control_pb2.ModelReport(
            model=self._model,
            workers=sum(worker.serves for worker in workers),
            slots=sum(worker.load.slots for worker in workers),
            running=sum(worker.load.running for worker in workers),
            queued=queue.order.waiting,
            classes=queue.waits.class_reports(now, capacities, closed_s),
            tokens_per_s=queue.waits.tokens_per_s(now),
        )
        for entry in report.classes:
            entry.room_rows = self._room_rows + report.slots
            entry.room_bytes = self._room_bytes // (ROOM_CLASSES * max(gateways, 1))
        self._process.metrics.reported(report)
        return report

    def wake(self) -> None:
        """Wakes the loop to advance the table."""
        self._woken.set()

    # Events of gateways and workers.

    def on_task(self, task: task_pb2.Task, headers: Mapping[str, str], size: int) -> None:
        """A task from its gateway."""
        with self:
            now = time.monotonic()
            row = Row(task, now, headers, size, self._prefix_cache)
            if self._requests.size + size > self._room_bytes:
                error = frame_pb2.TaskError(
                    reason=Overloaded.reason,
                    message=f"this batcher has no room for more tasks of {self._model}",
                )
                self._requests.refuse(row, error)
                self._process.metrics.ended_row(row)
            else:
                self._add(row, now)

    def _add(self, row: Row, now: float) -> None:
        try:
            self._requests.add(row, now)
        except Exception:
            # Sent again it would do the same.
            row.final = frame_pb2.Final(
                end=frame_pb2.TASK_END_FAILED,
                error=frame_pb2.TaskError(
                    reason=EngineFailed.reason, message="the batcher cannot take the request"
                ),
            )
            bundle = frame_pb2.FrameBundle(batcher=self._process.batcher, frames=[final_frame(row)])
            self._chores.spawn(self._process.gateways.send(row.task.gateway, bundle))
            raise

    def on_cancel(self, rows: Sequence[frame_pb2.TaskRef]) -> None:
        """Nobody waits for these rows any more; rows that are not held are ignored."""
        with self:
            self._requests.cancel(rows, time.monotonic())

    def on_question(self, asked: control_pb2.TaskProgress) -> bool:
        """A gateway asks about a row; False when it is not held."""
        with self:
            return self._requests.answer(asked)

    def on_gateway_gone(self, gateway: str, *, waiting_only: bool) -> None:
        """Nobody waits for the rows of a gateway any more."""
        with self:
            self._requests.drop_gateway(gateway, time.monotonic(), waiting_only=waiting_only)

    def __enter__(self) -> None:
        """Around each event."""

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, *__: object
    ) -> None:
        """Callers of events take no exceptions: the loop raises them."""
        if isinstance(error, Exception):
            self._fault = error
        self.wake()

    @override
    def on_step(self, worker: str, report: worker_pb2.StepReport) -> bool:
        state = self._requests.workers.of(worker)
        served = state.serves
        self._requests.step(worker, report, time.monotonic())
        if state.serves != served:
            self._process.on_readiness()
        if self._requests.pending:
            self.wake()
        return bool(self._requests.workers.of(worker).rows)

    @override
    def on_live(self, worker: str) -> None:
        self._process.on_readiness()

    @override
    def on_lost(self, worker: str) -> None:
        now = time.monotonic()
        self._requests.lost(worker, now)
        self._process.spans.of_workers.lost(worker, now)
        self._process.on_readiness()  # before its rows: their gateways look for another worker
        self.wake()

    # The loop.

    async def _loop(self) -> None:
        while True:
            self._woken.clear()
            if self._fault is not None:
                raise self._fault
            wake_at = self._requests.advance(time.monotonic())
            if self._was_full != (is_full := self._requests.queue.waits.is_full):
                self._was_full = is_full
                self._process.on_capacity()
            await self._carry_out(self._requests.take())
            if not self._requests.active and not self._woken.is_set():
                self._idle.set()
            await self._sleep(wake_at)

    async def _sleep(self, wake_at: float) -> None:
        if wake_at < self._alarm_at and not self._woken.is_set():
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_at, left_s = wake_at, wake_at - time.monotonic()
            self._alarm = asyncio.get_running_loop().call_later(left_s, self._ring)
        await self._woken.wait()

    def _ring(self) -> None:
        """It is time, or was when the alarm was set: most turns of the loop need no other one."""
        self._alarm_at = math.inf
        self.wake()

    async def _until_idle(self) -> None:
        self._idle.clear()
        self._woken.set()
        await self._idle.wait()

    async def _carry_out(self, effects: Effects) -> None:
        process = self._process
        for gateway, bundle in effects.bundles:
            await process.gateways.send(gateway, bundle)
        for row in effects.added:
            process.spans.began(row)
        for batch in effects.batches:
            process.metrics.formed(batch, process.spans.of_row)
            own, *rows = process.spans.formed(batch)
            message = batch_message(batch, process.batcher, rows, time.monotonic(), effects.waiting)
            self._workers[batch.worker].send(message, own)
        for row in effects.ended:
            process.metrics.ended_row(row)
            process.spans.ended(row)
        for worker, waiting in effects.demands:
            self._workers[worker].demand(waiting)
        for worker, refs in effects.cancels.items():
            self._workers[worker].cancel(refs)

    def _on_fault(self, fault: Exception) -> None:
        self._fault = fault
        self.wake()
