"""Everything of one model: its tasks in, its worker, its frames out.

Events only change the ledger and wake the loop; the loop alone carries out what the ledger wants, so that frames keep
their order:

    wake -> advance the ledger -> carry out its effects -> let the intake pull as far as there is room -> sleep
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from nats.aio.client import Client

from batcher.core.effects import Effects, Formed
from batcher.core.ledger import Ledger
from batcher.core.rows import Row
from batcher.delivery import Delivery
from batcher.held import ask_held
from batcher.intake import LOOKAHEAD_ROWS, Arrival, Intake
from batcher.settlement import HeldMessages
from batcher.spans import RowSpans
from batcher.workers import Worker
from sluice.errors import EngineFailed
from sluice.internal.v1 import control_pb2, frame_pb2, worker_pb2
from sluice.settings import BatcherSettings, ModelSettings
from sluice.wire import clock, subjects
from sluice.wire.jetstream import MAX_DELIVER

log = logging.getLogger(__name__)

TIMEOUT_MS_MAX: Final = 2**32 - 1
CLOSE_S: Final = 3.0
"""How long questions and dead letters may still take when the batcher ends."""


class Line:
    """One model of the batcher.

    Args:
        on_readiness: called when the model's readiness changed.
    """

    def __init__(
        self,
        nats_client: Client,
        batcher: str,
        model: ModelSettings,
        triton_url: str,
        settings: BatcherSettings,
        delivery: Delivery,
        spans: RowSpans,
        on_readiness: Callable[[], None],
    ) -> None:
        self._nats = nats_client
        self._batcher = batcher
        self._model = model
        self._delivery = delivery
        self._spans = spans
        self._on_readiness = on_readiness
        self._ledger = Ledger(
            batcher,
            policy=settings.policy_of(model.name),
            final_retry_s=settings.final_retry_s,
        )
        self._messages = HeldMessages(nats_client.jetstream())
        self.intake = Intake(nats_client, model, self._messages, self)
        self._worker = Worker(triton_url, model.name, batcher, settings, self)
        self._woken = asyncio.Event()
        self._idle = asyncio.Event()
        self._chores: set[asyncio.Task[None]] = set()

    # The loop.

    async def run(self) -> None:
        """Runs the model until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._worker.run())
            group.create_task(self._messages.keep_alive())
            group.create_task(self._pump())

    async def drain(self, drain_s: float) -> None:
        """Gives back what waits, lets the rest end for at most ``drain_s`` seconds, and gives back what is left.

        The intake must have stopped; `run` must go on until this returns.
        """
        self._ledger.drain(time.monotonic())
        try:
            async with asyncio.timeout(drain_s):
                await self._until_idle()
        except TimeoutError:
            log.warning("%d rows of %s are given back", len(self._ledger), self._model.name)
            self._ledger.release(time.monotonic())
            await self._until_idle()

    async def close(self) -> None:
        """Ends what is still asked, and closes the connection to the worker."""
        if self._chores:
            await asyncio.wait(self._chores, timeout=CLOSE_S)
        await self._worker.close()

    def report(self) -> control_pb2.ModelReport:
        """The model's state now."""
        return control_pb2.ModelReport(
            model=self._model.name,
            workers=int(self._worker.live),
            slots=self._worker.slots,
            running=self._worker.running,
            queued=self._ledger.queued,
        )

    async def _pump(self) -> None:
        while True:
            self._woken.clear()
            self._ledger.advance(time.monotonic(), self._capacity())
            await self._carry_out(self._ledger.take())
            self.intake.nudge()
            if not len(self._ledger) and not self._woken.is_set():
                self._idle.set()
            await self._sleep()

    async def _sleep(self) -> None:
        wake_at = self._ledger.wake_at()
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
        for move in effects.moves:
            self._spans.moved(move)
        for batch in effects.batches:
            self._send(batch)
        await self._delivery.send(effects.frames)
        if effects.cancels:
            self._spawn(self._worker.cancel(effects.cancels))
        for row in effects.dead:
            assert row.final is not None
            self._spawn(self._messages.bury(row.id, row.final.error.message))
        for row in effects.questions:
            self._spawn(self._ask(row))
        for request_id, how in effects.settled:
            await self._messages.settle(request_id, how)

    def _capacity(self) -> int:
        return self._worker.capacity(self._ledger.in_flight, self._ledger.unanswered)

    def _new_row(self, arrival: Arrival) -> Row | None:
        if arrival.task.request_id in self._ledger:
            return None  # Delivered again while it is becoming a dead letter.
        self._spans.arrived(arrival.task, arrival.headers)
        return _row(arrival, time.monotonic())

    def _send(self, formed: Formed) -> None:
        own, *rows = self._spans.formed(formed, self._worker.id)
        now = time.monotonic()
        batch = worker_pb2.Batch(
            batch_id=formed.batch_id,
            batcher=self._batcher,
            rows=[
                _wire_row(member.row, traceparent, now)
                for member, traceparent in zip(formed.rows, rows, strict=True)
            ],
        )
        self._worker.send(batch, own)

    async def _ask(self, row: Row) -> None:
        answer = await ask_held(self._nats, row.task.gateway, row.id)
        self._ledger.held(row.id, answer, time.monotonic())
        self._woken.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    # Events of the intake.

    def room(self, priority_class: str) -> int:
        """See `batcher.intake.Sink`."""
        if not self._worker.live:
            return 0
        urgent = subjects.CLASSES[: subjects.CLASSES.index(priority_class)]
        ahead = sum(self._ledger.waiting(name) for name in urgent)
        free = max(0, self._capacity() - ahead)
        return free + LOOKAHEAD_ROWS - self._ledger.waiting(priority_class)

    def on_arrival(self, arrival: Arrival) -> None:
        """See `batcher.intake.Sink`."""
        row = self._new_row(arrival)
        if row is not None:
            self._ledger.add(row, time.monotonic())
            self._woken.set()

    def on_exhausted(self, arrival: Arrival) -> None:
        """See `batcher.intake.Sink`."""
        row = self._new_row(arrival)
        if row is not None:
            message = f"the task was delivered {MAX_DELIVER} times without an end"
            error = frame_pb2.RowError(reason=EngineFailed.reason, message=message)
            self._ledger.bury(row, error, time.monotonic())
            self._woken.set()

    def on_unwanted(self, request_id: str) -> None:
        """See `batcher.intake.Sink`."""
        self._ledger.drop(request_id)
        self._woken.set()

    # Events of the gateways.

    def on_control(self, message: control_pb2.ControlMessage) -> None:
        """See `batcher.delivery.ControlEvents`."""
        now = time.monotonic()
        match message.WhichOneof("message"):
            case "cancel":
                self._ledger.cancel(message.cancel.request_ids, now)
            case "confirm":
                self._ledger.confirm(message.confirm.request_ids, now)
            case "resend":
                self._ledger.resend(message.resend.request_id, message.resend.from_index)
        self._woken.set()

    # Events of the worker.

    def on_live(self) -> None:
        """See `batcher.workers.WorkerEvents`."""
        self._on_readiness()
        self._woken.set()

    def on_step(self, report: worker_pb2.StepReport) -> bool:
        """See `batcher.workers.WorkerEvents`."""
        self._woken.set()
        return self._ledger.step(report.frames, time.monotonic())

    def on_admission(self, batch_id: str, admission: worker_pb2.Admission) -> None:
        """See `batcher.workers.WorkerEvents`."""
        self._ledger.admitted(batch_id, admission, time.monotonic())
        self._woken.set()

    def on_lost(self) -> list[str]:
        """See `batcher.workers.WorkerEvents`."""
        self._on_readiness()
        self._woken.set()
        return self._ledger.lost(time.monotonic())


def _row(arrival: Arrival, now: float) -> Row:
    due_ms = arrival.task.deadline_unix_ms
    left_s = (due_ms - clock.unix_ms()) / 1e3 if due_ms else float("inf")
    return Row(
        arrival.task,
        deliveries=arrival.deliveries,
        produced=arrival.produced,
        deadline=now + left_s,
        now=now,
    )


def _wire_row(row: Row, traceparent: str, now: float) -> worker_pb2.Row:
    wire = worker_pb2.Row(attempt=row.attempt, traceparent=traceparent)
    wire.task.CopyFrom(row.task)
    del wire.task.produced_token_ids[:]
    wire.task.produced_token_ids.extend(row.produced)
    left_ms = (row.deadline - now) * 1e3
    if left_ms < TIMEOUT_MS_MAX:
        wire.timeout_ms = max(1, int(left_ms))
    return wire
