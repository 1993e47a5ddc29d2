"""Event loop of one model: its tasks, its workers, its frames. All events arrive here.

Events only change the request table and wake the loop; only the loop carries out the table's
actions, so that frames keep their order:

    wake -> advance the table -> carry out its actions -> sleep

A fault in any part ends all of it: `run` raises, and the owner creates a new one. The requests are
forgotten, and their gateways send them again.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import grpc

from batcher.core.frames import final_frame
from batcher.core.queued_request import QueuedRequest, batch_message
from batcher.core.requests import Actions, RequestTable
from batcher.core.workers import WorkerTable
from batcher.gateways import GatewayTransport, Reporter
from batcher.metrics import BatcherMetrics
from batcher.spans import RequestSpans
from batcher.workers.connection import WorkerConnection
from sluice.background import BackgroundTasks
from sluice.errors import EngineFailed, Overloaded
from sluice.internal.v1 import control_pb2, frame_pb2, task_pb2, worker_pb2
from sluice.settings import ModelSettings, Settings
from sluice.settings.batching import Policy, policy_notes
from sluice.wire.subjects import CLASSES

logger = logging.getLogger(__name__)

CLOSE_S: Final = 3.0
"""How long messages on their way may still take when a loop is closed, in seconds."""
MINUTE_S: Final = 60.0
"""Longest sleep of the loop, in seconds."""
BOUNDED_CLASSES: Final = len(CLASSES) - 1
"""Classes that share the bytes granted to gateways, which hold back no tasks of the most urgent class."""


@dataclass(frozen=True)
class BatcherProcess:
    """What all models of one batcher process share.

    Attributes:
        batcher: the id of the process.
        worker_credentials: for calls to Triton; None: unencrypted.
    """

    batcher: str
    gateways: GatewayTransport
    reporter: Reporter
    spans: RequestSpans
    metrics: BatcherMetrics
    worker_credentials: grpc.ChannelCredentials | None = None


class ModelLoop:
    """One model of the batcher.

    Attributes:
        policy: its batching policy at this moment, as its schedule changes it over time.
        table: its requests; read-only for others.
        workers: connections to its workers, by name.
    """

    def __init__(
        self, process: BatcherProcess, model: ModelSettings, urls: Sequence[str], settings: Settings
    ) -> None:
        batcher = settings.batcher
        workers = [
            WorkerConnection(
                url,
                name,
                process.batcher,
                batcher,
                on_report=self.on_report,
                on_lost=self.on_lost,
                credentials=process.worker_credentials,
            )
            for url in urls
            for name in model.triton_models
        ]
        self.workers = {worker.name: worker for worker in workers}
        self._model, self._settings = model.task_name, model
        self._scheduled = settings.policy_of(model)
        self.policy = self._scheduled.at(datetime.now(UTC))
        self._process = process
        self.table = RequestTable(
            process.batcher,
            policy=self.policy,
            weights=settings.weights,
            workers=WorkerTable(list(self.workers), model.standby),
        )
        process.metrics.on_model(self._model, list(self.workers), self.table)
        self._room = batcher
        self._woken = asyncio.Event()
        self._idle = asyncio.Event()
        self._background = BackgroundTasks(self._on_fault)
        self._fault: Exception | None = None
        self._was_full = False

    async def run(self) -> None:
        """Run the model until cancelled."""
        async with asyncio.TaskGroup() as group:
            for worker in self.workers.values():
                group.create_task(worker.run())
            group.create_task(self._loop())

    async def drain(self, drain_s: float) -> None:
        """Return waiting requests, let running ones end for up to `drain_s`, and return the rest.

        `run` must continue until this returns.
        """
        self.table.drain(time.monotonic())
        try:
            async with asyncio.timeout(drain_s):
                await self._until_idle()
        except TimeoutError:
            active = self.table.active
            logger.warning(
                "drain of model %s timed out, returning %d requests", self._model, active
            )
            self.table.drain(time.monotonic(), running=True)
            await self._until_idle()

    async def close(self) -> None:
        """Wait up to `CLOSE_S` for messages on their way, and close the connections to the workers."""
        await self._background.settle(CLOSE_S)
        for worker in self.workers.values():
            await worker.close()

    def change(self, settings: Settings) -> None:
        """Activate another policy and other weights; see `batcher.app.check_change`."""
        self._room = settings.batcher
        before, self._scheduled = self._scheduled, settings.policy_of(self._settings)
        self._activate(self._scheduled.at(datetime.now(UTC)), settings.weights)
        if self._scheduled != before:
            self.log_notes()

    def follow_schedule(self, moment: datetime, weights: Mapping[str, float]) -> None:
        """Activate the policy that is scheduled for this moment, if it is another one."""
        policy = self._scheduled.at(moment)
        if policy == self.policy:
            return
        values = policy.model_dump(exclude={"name", "classes"}).items()
        text = ", ".join(f"{key} {value}" for key, value in values)
        logger.info(
            "activated scheduled policy %s for model %s (%s)", policy.name, self._model, text
        )
        self._activate(policy, weights)

    def _activate(self, policy: Policy, weights: Mapping[str, float]) -> None:
        self.policy = policy
        self.table.queue.reconfigure(policy, weights)
        self.wake()

    def log_notes(self) -> None:
        """Log which parts of the policy have no effect on the model's engine."""
        model, streams = self._settings, not self._settings.computes_whole
        for note in policy_notes(self._scheduled, model.name, model.engine, streams=streams):
            logger.info("%s", note)

    def drain_workers(self, names: frozenset[str]) -> None:
        """Send no new requests to these workers; all others get some again."""
        self.table.workers.drained = names
        self._process.reporter.on_readiness()
        self.wake()

    def report(self, gateways: int) -> control_pb2.ModelReport:
        """Return the report on the model; `gateways` share its capacity for waiting requests."""
        now, queue = time.monotonic(), self.table.queue
        active = self.table.workers.active()
        workers = active.values()
        closed_s = min((worker.load.paused_ms for worker in workers), default=0.0) / 1e3
        capacities = self.table.workers.capacities(active, now)
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
            entry.room_rows = self._room.room_rows + report.slots
            entry.room_bytes = self._room.room_bytes // (BOUNDED_CLASSES * max(gateways, 1))
        self._process.metrics.on_report(report)
        return report

    def wake(self) -> None:
        """Wake the loop to advance the table."""
        self._woken.set()

    # Events of gateways.

    @contextmanager
    def _event(self) -> Iterator[None]:
        """Run the body as an event: wake the loop after it, and let the loop raise what it raises."""
        try:
            yield
        except Exception as error:
            self._fault = error
        finally:
            self.wake()

    def on_task(self, task: task_pb2.Task, headers: Mapping[str, str], size: int) -> None:
        """Add a task from its gateway, or return it if the model's tasks here would exceed `room_bytes`."""
        with self._event():
            now = time.monotonic()
            request = QueuedRequest(task, now, headers, size, self._settings.prefix_cache)
            if self.table.size + size > self._room.room_bytes:
                error = frame_pb2.TaskError(
                    reason=Overloaded.reason,
                    message=f"this batcher has too many waiting requests of model {self._model}",
                )
                self.table.refuse(request, error)
                self._process.metrics.on_ended(request)
            else:
                self._add(request, now)

    def _add(self, request: QueuedRequest, now: float) -> None:
        try:
            self.table.add(request, now)
        except Exception:
            # A request that breaks the table would break it again: fail it, so that nobody resends it.
            request.final = frame_pb2.Final(
                end=frame_pb2.TASK_END_FAILED,
                error=frame_pb2.TaskError(
                    reason=EngineFailed.reason, message="the batcher cannot process the request"
                ),
            )
            frames = [final_frame(request)]
            bundle = frame_pb2.FrameBundle(batcher=self._process.batcher, frames=frames)
            self._background.spawn(self._process.gateways.send(request.task.gateway, bundle))
            raise

    def on_cancel(self, refs: Sequence[frame_pb2.TaskRef]) -> None:
        """Cancel requests; unknown ones are ignored."""
        with self._event():
            self.table.cancel(refs, time.monotonic())

    def on_query(self, row: control_pb2.TaskProgress) -> bool:
        """Answer a gateway's query about a request; return False if the request is unknown."""
        is_known = False
        with self._event():
            is_known = self.table.answer_query(row)
        return is_known  # noqa: RET504, the event may have raised

    def drop_gateway(self, gateway: str, *, waiting_only: bool) -> None:
        """Drop the requests of a gateway, with `waiting_only` those that no worker has."""
        with self._event():
            self.table.drop_gateway(gateway, time.monotonic(), waiting_only=waiting_only)

    # Events of workers.

    def on_report(self, worker: str, report: worker_pb2.StepReport) -> bool:
        """Handle a report; return whether the worker still has requests.

        Raises:
            ChannelBroken: see `RequestTable.on_report`.
        """
        state = self.table.workers.states[worker]
        served = state.serves
        self.table.on_report(worker, report, time.monotonic())
        if state.serves != served:
            self._process.reporter.on_readiness()
        if self.table.pending:
            self.wake()
        return bool(self.table.workers.states[worker].requests)

    def on_lost(self, worker: str) -> None:
        """Handle the loss of a worker: return its requests to their gateways."""
        self.table.on_lost(worker, time.monotonic())
        # Before its requests return: their gateways look for another worker at once.
        self._process.reporter.on_readiness()
        self.wake()

    # The loop.

    async def _loop(self) -> None:
        while True:
            wake_at = await self.advance()
            left_s = min(wake_at - time.monotonic(), MINUTE_S)
            alarm = asyncio.get_running_loop().call_later(left_s, self.wake)
            await self._woken.wait()
            alarm.cancel()

    async def advance(self) -> float:
        """Advance the table once and carry out its actions; raise the fault of an event.

        Returns:
            When to advance it again if no event comes before.
        """
        self._woken.clear()
        if self._fault is not None:
            raise self._fault
        wake_at = self.table.advance(time.monotonic())
        if self._was_full != (is_full := self.table.queue.waits.speeds.is_full):
            self._was_full = is_full
            self._process.reporter.on_capacity()
        await self._carry_out(self.table.take())
        if not self.table.active and not self._woken.is_set():
            self._idle.set()
        return wake_at

    async def _until_idle(self) -> None:
        self._idle.clear()
        self._woken.set()
        await self._idle.wait()

    async def _carry_out(self, actions: Actions) -> None:
        process = self._process
        for gateway, bundle in actions.bundles:
            await process.gateways.send(gateway, bundle)
        for request in actions.added:
            process.spans.on_added(request)
        for batch in actions.batches:
            process.metrics.on_batch(batch, process.spans.of_request)
            own, *traces = process.spans.on_batch(batch)
            now, waiting = time.monotonic(), actions.waiting
            message = batch_message(batch, process.batcher, traces, now, waiting)
            self.workers[batch.worker].send(message, own)
        for request in actions.ended:
            process.metrics.on_ended(request)
            process.spans.on_ended(request)
        for worker, waiting in actions.demands:
            self.workers[worker].announce_demand(waiting)
        for worker, refs in actions.cancels.items():
            self.workers[worker].cancel(refs)

    def _on_fault(self, fault: Exception) -> None:
        self._fault = fault
        self.wake()
