"""The workers of one model. Each has one long-lived channel for its reports, and for batches and cancels.

Triton takes the trace context of its own spans from the metadata of a stream, so a traced batch has a stream of its
own. Streams cost CPU time, and Triton's spans tell of the hand-over alone: a worker gets `OWN_STREAMS_PER_S` of them,
and other traced batches go over the channel, without spans of Triton.

A worker is lost when its channel breaks or ends, when it has rows and sent nothing for ``stall_s``, when it has none
and sent nothing for ``idle_stall_s``, when reports are missing, or when a batch could not be queued. Then every row it
had returns to its gateway, and a new channel is opened, with growing pauses. Opening it ends the rows of the previous
one: a worker that only stalled must not compute rows that another one has by now. A step may take long: nothing here
waits for the engine.

The channel of a lost worker is kept, and nothing is sent, until the worker speaks again: its process may be stopped.
Triton 2.51 does not survive streams that are cancelled meanwhile: it aborts, or never reaches the process again.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, Protocol

import grpc

from batcher.workers.client import (
    FAULTS,
    Call,
    Reports,
    WorkerClient,
    next_report,
    read_to_end,
    reason_of,
)
from sluice.background import BackgroundTasks
from sluice.internal.v1 import frame_pb2, worker_pb2
from sluice.settings import BatcherSettings

log = logging.getLogger(__name__)

OWN_STREAMS_PER_S: Final = 10.0
"""Streams of traced batches to a worker; as many at once after a second without any."""
BACKOFF_MIN_S: Final = 0.1
BACKOFF_MAX_S: Final = 0.5
SILENT_S_MAX: Final = 60.0
"""How long that is; a process that was killed beside a Triton that goes on never speaks again."""


class WorkerEvents(Protocol):
    """Receives the events of workers. A worker has a name, which stays the same when its process restarts."""

    def on_step(self, worker: str, report: worker_pb2.StepReport) -> bool:
        """A report; whether the worker still has rows that were sent to it.

        Raises:
            ChannelBroken: earlier ones are missing.
        """

    def on_live(self, worker: str) -> None:
        """The engine serves the channel."""

    def on_lost(self, worker: str) -> None:
        """The worker is lost, and its rows with it."""


class Worker:
    """The connection to one worker of a model.

    Attributes:
        name: the address and the Triton model.
    """

    def __init__(
        self,
        url: str,
        triton_model: str,
        batcher: str,
        settings: BatcherSettings,
        events: WorkerEvents,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.name = f"{url}/{triton_model}"
        self._client = WorkerClient(url, triton_model, credentials)
        self._batcher = batcher
        self._settings = settings
        self._events = events
        self._call: Call | None = None
        self._limit: asyncio.Timeout | None = None
        self._watching: asyncio.TimerHandle
        self._is_lost = self._stood = self._has_rows = False
        self._writing = asyncio.Lock()
        self._epoch = 0
        self._sending = BackgroundTasks()
        self._unqueued: set[asyncio.Future[None]] = set()
        """Of batches on streams of their own, until the worker has queued them."""
        self._streams_until = 0.0
        self._missed = False

    async def run(self) -> None:
        """Keeps a channel open until it is cancelled."""
        pause_s = BACKOFF_MIN_S
        while True:
            stood = await self._serve()
            pause_s = BACKOFF_MIN_S if stood else min(2 * pause_s, BACKOFF_MAX_S)
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Ends what is on its way."""
        self._sending.cancel()
        await self._client.close()

    def send(self, batch: worker_pb2.Batch, traceparent: str) -> None:
        """Sends a batch; ``traceparent`` is for Triton's spans; empty: it makes none."""
        batch.epoch = self._epoch
        if not self._has_rows:
            self._has_rows = True
            self._watching.cancel()
            self._expect(self._settings.stall_s)
        if traceparent and self._may_stream():
            queued = asyncio.get_running_loop().create_future()
            self._unqueued.add(queued)
            self._sending.spawn(self._send_traced(batch, traceparent, queued))
        else:
            self._sending.spawn(self._send(worker_pb2.WorkerRequest(batch=batch)))

    def _may_stream(self) -> bool:
        """Whether a batch may have a stream of its own."""
        now = asyncio.get_running_loop().time()
        if self._streams_until > now + 1:
            return False
        self._streams_until = max(self._streams_until, now) + 1 / OWN_STREAMS_PER_S
        return True

    def demand(self, waiting: Sequence[int]) -> None:
        """Says how many rows wait for it, by class."""
        message = worker_pb2.Demand(batcher=self._batcher, epoch=self._epoch, queued=waiting)
        self._sending.spawn(self._send(worker_pb2.WorkerRequest(demand=message)))

    def cancel(self, rows: Sequence[frame_pb2.TaskRef]) -> None:
        """Makes the worker drop rows that were sent; one that is lost drops all of them when it comes back."""
        cancel = worker_pb2.CancelTasks(batcher=self._batcher, tasks=rows)
        self._sending.spawn(self._send(worker_pb2.WorkerRequest(cancel_tasks=cancel)))

    async def _serve(self) -> bool:
        """Runs one channel until it breaks; returns whether the engine ever served it."""
        self._is_lost, self._stood, fault = False, False, ""
        call = self._client.stream()
        self._expect(self._settings.stall_s)
        try:
            async with asyncio.timeout(None) as self._limit:
                await self._read(call)
        except (TimeoutError, *FAULTS) as error:
            fault = reason_of(error)
        finally:
            self._limit = None
            self._watching.cancel()
            call.cancel()
            self._sending.cancel()
            self._unqueued.clear()
            self._lose(fault)
        return self._stood

    async def _read(self, call: Call) -> None:
        """Opens a channel and takes its reports until it breaks, or is opened anew because the worker was lost."""
        self._epoch += 1
        opening = worker_pb2.OpenChannel(
            batcher=self._batcher,
            heartbeat_ms=self._settings.heartbeat_ms,
            idle_heartbeat_ms=self._settings.idle_heartbeat_ms,
            epoch=self._epoch,
        )
        await self._client.write(call, worker_pb2.WorkerRequest(open_channel=opening), ends=True)
        reports = Reports(call)
        while True:
            report = await reports.next()
            if self._is_lost:
                return
            if self._call is call and reports.wants_renewal:
                # Only the request is replaced; nothing else changes.
                reports.renewing = opening.renews = True
                self._sending.spawn(self._send(worker_pb2.WorkerRequest(open_channel=opening)))
            self._watching.cancel()
            self._has_rows = self._events.on_step(self.name, report)
            self._expect(self._settings.stall_s if self._has_rows else self._settings.idle_stall_s)
            if report.ready and self._call is None:
                self._call, self._stood, self._missed = call, True, False
                log.info("worker %s at %s is live", report.worker, self.name)
                self._events.on_live(self.name)

    def _expect(self, within_s: float) -> None:
        """A worker that says nothing in this time is lost."""
        self._watching = asyncio.get_running_loop().call_later(
            within_s, self._lose, f"silent for {within_s:g} s"
        )

    async def _send(self, request: worker_pb2.WorkerRequest) -> None:
        """Over the channel: Triton passes on in order what comes there, so a cancel never overtakes a batch.

        Nothing is sent to a worker that was lost meanwhile: its rows have left.
        """
        if self._unqueued and request.HasField("cancel_tasks"):
            await asyncio.wait(self._unqueued)
        if self._call is None:
            return
        try:
            async with self._writing:
                ends = request.HasField("open_channel")
                await self._client.write(self._call, request, ends=ends)
        except FAULTS as error:
            self._lose(f"{request.WhichOneof('message')}: {reason_of(error)}")

    async def _send_traced(
        self, batch: worker_pb2.Batch, traceparent: str, queued: asyncio.Future[None]
    ) -> None:
        """Over a stream of its own: cancels wait until the worker has queued it."""
        call = self._client.stream(traceparent)
        try:
            await self._client.write(call, worker_pb2.WorkerRequest(batch=batch), ends=True)
            await call.done_writing()
            receipt = asyncio.ensure_future(next_report(call))
            # When this task is cancelled meanwhile, nobody else takes its error.
            receipt.add_done_callback(lambda done: done.cancelled() or done.exception())
            # No time-out, which would cancel the stream: the task ends with the channel.
            if not (await asyncio.wait([receipt], timeout=2 * self._settings.stall_s))[0]:
                self._lose(f"batch {batch.batch_id}: not queued in time")
            await receipt
            self._unqueued.discard(queued)
            queued.set_result(None)
            await read_to_end(call)
        except FAULTS as error:
            self._lose(f"batch {batch.batch_id}: {reason_of(error)}")
        finally:
            call.cancel()

    def _lose(self, fault: str) -> None:
        """The worker's rows leave. Its channel is kept until it speaks again, or for a limited time."""
        if self._is_lost:
            return
        self._is_lost, self._call = True, None
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time() + SILENT_S_MAX)
        if fault and self._stood:
            log.warning("worker at %s is lost: %s", self.name, fault)
        elif fault and not self._missed:
            log.info("no worker at %s yet: %s", self.name, fault)
            self._missed = True
        self._events.on_lost(self.name)
