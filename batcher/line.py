"""Everything of one model: its tasks in, its workers, its frames out. Events of all sides come here."""

import asyncio
import time
from collections.abc import Sequence

from batcher.core.ledger import Ledger
from batcher.core.rows import Row
from batcher.intake import Arrival, Intake
from batcher.load import model_report
from batcher.packing import row_of
from batcher.process import Process
from batcher.pump import Pump
from batcher.settlement import HeldMessages
from batcher.workers.fleet import Fleet
from sluice.errors import EngineFailed
from sluice.internal.v1 import control_pb2, frame_pb2, worker_pb2
from sluice.settings import BatcherSettings, ModelSettings, Settings
from sluice.wire.jetstream import MAX_DELIVER


class Line:
    """One model of the batcher.

    Attributes:
        model: its name.
        intake: its tasks.
    """

    def __init__(
        self,
        process: Process,
        model: ModelSettings,
        urls: Sequence[str],
        settings: Settings,
    ) -> None:
        self.model = model.name
        self._process = process
        self._settings = settings.batcher
        self._ledger = Ledger(
            process.batcher,
            policy=settings.batcher.policy_of(model.name),
            final_retry_s=settings.batcher.final_retry_s,
            weights=settings.weights,
        )
        self._messages = HeldMessages(process.nats_client)
        self._fleet = Fleet(urls, model, process.batcher, settings.batcher, self)
        self.intake = Intake(
            process.nats_client,
            model.name,
            _pending_max(model, len(urls), settings.batcher),
            self._messages,
            self,
        )
        self._pump = Pump(
            process, model.name, self._ledger, self._fleet, self._messages, self.intake.nudge
        )

    async def run(self) -> None:
        """Runs the model until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._fleet.run())
            group.create_task(self._messages.keep_alive())
            group.create_task(self._pump.run())

    async def drain(self, drain_s: float) -> None:
        """Gives back what waits, and lets what runs end for a while. The intake must have stopped; `run` must go on."""
        await self.intake.settle()
        await self._pump.drain(drain_s)

    async def close(self) -> None:
        """Ends what is still asked, and closes the connections to the workers."""
        await self._pump.close()
        await self._fleet.close()

    def change(self, settings: Settings) -> None:
        """Takes another policy, other weights and limits; see `batcher.changes`."""
        self._settings = settings.batcher
        self._ledger.change_policy(settings.batcher.policy_of(self.model), settings.weights)
        self._pump.wake()

    def report(self) -> control_pb2.ModelReport:
        """The model's state now."""
        return model_report(
            self.model, self._fleet, self._ledger.queue, self.intake.backlog, time.monotonic()
        )

    # Events of the intake.

    def room(self, priority_class: str) -> int:
        """See `batcher.intake.Sink`."""
        if not self._fleet.live or self.room_bytes() <= 0:
            return 0
        return self._settings.prefetch_rows - self._ledger.queue.waiting(priority_class)

    def room_bytes(self) -> int:
        """See `batcher.intake.Sink`."""
        return self._settings.prefetch_bytes - self._messages.size

    def on_arrival(self, arrival: Arrival) -> None:
        """See `batcher.intake.Sink`."""
        row = self._new_row(arrival)
        if row is not None:
            self._ledger.add(row, time.monotonic())
            self._pump.wake()

    def on_exhausted(self, arrival: Arrival) -> None:
        """See `batcher.intake.Sink`."""
        row = self._new_row(arrival)
        if row is not None:
            message = f"the task was delivered {MAX_DELIVER} times without an end"
            error = frame_pb2.RowError(reason=EngineFailed.reason, message=message)
            self._ledger.bury(row, error, time.monotonic())
            self._pump.wake()

    def on_unwanted(self, request_id: str) -> None:
        """See `batcher.intake.Sink`."""
        self._ledger.drop(request_id)
        self._pump.wake()

    # Events of the gateways and of other batchers.

    def on_control(self, message: control_pb2.ControlMessage) -> None:
        """See `batcher.delivery.Listener`."""
        now = time.monotonic()
        match message.WhichOneof("message"):
            case "cancel":
                self._ledger.cancel(message.cancel.request_ids, now)
            case "confirm":
                self._ledger.confirm(message.confirm.request_ids, now)
            case "resend":
                self._ledger.resend(message.resend.request_id, message.resend.from_index)
        self._pump.wake()

    def on_peers(self) -> None:
        """What is our share of the workers may have changed."""
        self._pump.wake()

    # Events of the workers.

    def on_live(self, worker: str) -> None:
        """See `batcher.workers.worker.WorkerEvents`."""
        self._ledger.live(worker, self._fleet.id_of(worker))
        self._process.on_readiness()
        self._pump.wake()

    def on_step(self, worker: str, report: worker_pb2.StepReport) -> bool:
        """See `batcher.workers.worker.WorkerEvents`."""
        self._pump.wake()
        return self._ledger.step(worker, report.frames, time.monotonic())

    def on_admission(self, worker: str, batch_id: str, admission: worker_pb2.Admission) -> None:
        """See `batcher.workers.worker.WorkerEvents`."""
        self._ledger.admitted(worker, batch_id, admission, time.monotonic())
        self._pump.wake()

    def on_lost(self, worker: str) -> list[str]:
        """See `batcher.workers.worker.WorkerEvents`."""
        self._process.on_readiness()
        self._pump.wake()
        return self._ledger.lost(worker, time.monotonic())

    def _new_row(self, arrival: Arrival) -> Row | None:
        if arrival.task.request_id in self._ledger:
            return None  # Delivered again while it is becoming a dead letter.
        self._process.spans.arrived(arrival.task, arrival.headers)
        return row_of(arrival, time.monotonic())


def _pending_max(model: ModelSettings, addresses: int, settings: BatcherSettings) -> int:
    """Tasks of a class that all batchers may hold together: no bound that is reached, each of them has its own.

    Twice what the workers take, as some ends wait for a confirm, and what `batchers_max` batchers hold ahead.
    """
    in_workers = addresses * model.replicas * (model.slots + model.max_waiting_rows)
    return 2 * in_workers + settings.batchers_max * settings.prefetch_rows
