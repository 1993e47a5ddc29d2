"""One worker: one long-lived channel for frames and cancels, one stream per batch.

A worker is lost when its channel breaks, when it was silent for ``stall_s``, when responses are missing, or when a
batch was not answered. Then every row it had is given back, and a new channel is opened, with growing pauses. Rows of
the channel before are cancelled on the new one before anything else is sent: a worker that only stalled must not
compute what another one has by now.
"""

import asyncio
import logging
import time
from typing import Final, Protocol

from batcher.core.channel import Channel, ChannelBroken
from batcher.workers.endpoint import (
    FAULTS,
    Call,
    Endpoint,
    next_response,
    read_to_end,
    reason_of,
)
from sluice.internal.v1 import worker_pb2
from sluice.settings import BatcherSettings

log = logging.getLogger(__name__)

BACKOFF_MIN_S: Final = 0.1
BACKOFF_MAX_S: Final = 2.0


class WorkerEvents(Protocol):
    """Who is told what workers do. A worker is known by its name, which outlives its process."""

    def on_live(self, worker: str) -> None:
        """The channel stands: batches may be sent."""

    def on_step(self, worker: str, report: worker_pb2.StepReport) -> bool:
        """Frames or a heartbeat; False when frames before them are missing."""

    def on_admission(self, worker: str, batch_id: str, admission: worker_pb2.Admission) -> None:
        """A batch was answered."""

    def on_lost(self, worker: str) -> list[str]:
        """The worker is lost; returns the rows it had."""


class Worker:
    """One worker of a model, from this batcher's side.

    Attributes:
        name: the address and the Triton model.
        channel: what is known of it; a new one for every opening.
    """

    def __init__(
        self,
        url: str,
        triton_model: str,
        batcher: str,
        settings: BatcherSettings,
        events: WorkerEvents,
    ) -> None:
        self.name = f"{url}/{triton_model}"
        self.channel = Channel()
        self._endpoint = Endpoint(url, triton_model)
        self._batcher = batcher
        self._settings = settings
        self._events = events
        self._call: Call | None = None
        self._limit: asyncio.Timeout | None = None
        self._fault = ""
        self._writing = asyncio.Lock()
        self._orphans: set[str] = set()
        self._sending: set[asyncio.Task[None]] = set()
        self._missed = False

    @property
    def live(self) -> bool:
        """Whether batches may be sent."""
        return self._call is not None

    async def run(self) -> None:
        """Keeps a channel open until it is cancelled."""
        pause_s = BACKOFF_MIN_S
        while True:
            fault, stood = await self._serve()
            self._log_loss(fault, stood)
            pause_s = BACKOFF_MIN_S if stood else min(2 * pause_s, BACKOFF_MAX_S)
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Ends what is on its way."""
        self._end_sending()
        await self._endpoint.close()

    def send(self, batch: worker_pb2.Batch, traceparent: str) -> None:
        """Sends a batch; its answer, or the loss of the worker, comes as an event."""
        task = asyncio.create_task(self._send(batch, traceparent))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def cancel(self, request_ids: list[str]) -> None:
        """Makes the worker drop rows; one that is lost drops them when it comes back."""
        if self._call is None:
            return
        try:
            async with asyncio.timeout(self._settings.stall_s):
                await self._write(self._call, self._cancel_rows(request_ids))
        except (TimeoutError, *FAULTS) as error:
            self._reset(f"cancel: {reason_of(error)}")

    async def _serve(self) -> tuple[str, bool]:
        """One channel until it breaks: why it did, and whether it ever stood."""
        self.channel, self._fault = Channel(), ""
        call = self._endpoint.stream()
        stood = False
        try:
            async with asyncio.timeout(self._settings.stall_s) as self._limit:
                await self._open(call)
                stood = True
                await self._read(call)
            fault = "the worker closed the channel"
        except TimeoutError:
            fault = self._fault or f"silent for {self._settings.stall_s:g} s"
        except FAULTS as error:
            fault = reason_of(error)
        finally:
            self._limit = self._call = None
            call.cancel()
            self._end_sending()
            self._orphans.update(self._events.on_lost(self.name))
        return fault, stood

    async def _open(self, call: Call) -> None:
        opening = worker_pb2.OpenChannel(
            batcher=self._batcher, heartbeat_ms=self._settings.heartbeat_ms
        )
        await self._write(call, worker_pb2.WorkerRequest(open_channel=opening))
        cancelled = not self._orphans
        if self._orphans:
            await self._write(call, self._cancel_rows(sorted(self._orphans)))
        while not (cancelled and self.channel.live):
            response = await next_response(call)
            if response.HasField("admission"):
                cancelled = True
            else:
                self._step(response.step)
        self._orphans.clear()
        self._call = call
        self._missed = False
        log.info("worker %s at %s is live", self.channel.worker, self.name)
        self._events.on_live(self.name)

    async def _read(self, call: Call) -> None:
        while True:
            response = await next_response(call)
            if response.HasField("step"):
                self._step(response.step)

    def _step(self, report: worker_pb2.StepReport) -> None:
        self.channel.step(report, time.monotonic())
        if not self._events.on_step(self.name, report):
            raise ChannelBroken("frames are missing")
        # While the channel opens its time is fixed: heartbeats do not stand for the answers that are still missing.
        if self._limit is not None and self.live:
            self._limit.reschedule(asyncio.get_running_loop().time() + self._settings.stall_s)

    async def _send(self, batch: worker_pb2.Batch, traceparent: str) -> None:
        call = self._endpoint.stream(traceparent)
        try:
            async with asyncio.timeout(self._settings.stall_s):
                await self._endpoint.write(call, worker_pb2.WorkerRequest(batch=batch))
                await call.done_writing()
                response = await next_response(call)
            self.channel.admitted(response.admission)
            self._events.on_admission(self.name, batch.batch_id, response.admission)
            await read_to_end(call)
        except (TimeoutError, *FAULTS) as error:
            self._reset(f"batch {batch.batch_id}: {reason_of(error)}")
        finally:
            call.cancel()

    async def _write(self, call: Call, request: worker_pb2.WorkerRequest) -> None:
        async with self._writing:
            await self._endpoint.write(call, request)

    def _cancel_rows(self, request_ids: list[str]) -> worker_pb2.WorkerRequest:
        rows = worker_pb2.CancelRows(batcher=self._batcher, request_ids=request_ids)
        return worker_pb2.WorkerRequest(cancel_rows=rows)

    def _reset(self, fault: str) -> None:
        """Gives the channel up: what the worker holds is not certain any more."""
        if self._limit is not None:
            self._fault = fault
            self._limit.reschedule(asyncio.get_running_loop().time())

    def _end_sending(self) -> None:
        for task in self._sending:
            task.cancel()

    def _log_loss(self, fault: str, stood: bool) -> None:
        if stood:
            log.warning("worker at %s is lost: %s", self.name, fault)
        elif not self._missed:
            log.info("no worker at %s yet: %s", self.name, fault)
            self._missed = True
