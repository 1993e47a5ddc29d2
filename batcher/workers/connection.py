"""Connections to the workers of one model: a long-lived channel for reports, batches and cancels.

Triton reads the trace context of its own spans from the metadata of a stream, so a traced batch has
a stream of its own. Streams cost CPU time and Triton's spans only show the hand-over: a worker gets
`OWN_STREAMS_PER_S` of them, and other traced batches use the channel, without spans of Triton.

A worker is lost if its channel breaks or ends, if it is silent for `stall_s` with requests or on a
new channel, or for `idle_stall_s` without requests, if reports are missing, or if a message could not
be sent or a batch not be queued.
Then its requests return to their gateways, and a new channel is opened after a growing pause. Opening
a channel ends the requests of the previous one, so that a worker that only stalled does not compute
what another one has by now. A step may take long: nothing here waits for the engine.

The channel of a lost worker is kept open, without sending, until the worker reports again, at most
`SILENT_S_MAX`: its process may be suspended. Triton 2.51 does not survive streams that are cancelled
meanwhile: it aborts, or never reaches the process again.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

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

logger = logging.getLogger(__name__)

OWN_STREAMS_PER_S: Final = 10.0
"""Rate of streams for traced batches to a worker; after an idle second as many may be opened at once."""
BACKOFF_MIN_S: Final = 0.1
"""Pause before a channel is opened again, in seconds; it doubles until a channel succeeds."""
BACKOFF_MAX_S: Final = 0.5
"""Longest pause before a channel is opened again, in seconds."""
SILENT_S_MAX: Final = 60.0
"""How long the channel of a lost worker is kept, in seconds.

A stub that was killed under a live Triton never reports again."""


class WorkerConnection:
    """The connection to one worker of a model.

    Attributes:
        name: address and Triton model; stays the same when the worker restarts.
    """

    def __init__(
        self,
        url: str,
        triton_model: str,
        batcher: str,
        settings: BatcherSettings,
        *,
        on_report: Callable[[str, worker_pb2.StepReport], bool],
        on_lost: Callable[[str], None],
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """Create a connection that is opened by `run`. Callbacks get the name of the worker.

        Args:
            url: address of the Triton server.
            triton_model: name of its model.
            batcher: id of this batcher.
            settings: heartbeat and stall times.
            on_report: handles a report; returns whether the worker still has requests, and raises
                `ChannelBroken` if earlier reports are missing.
            on_lost: called when the worker is lost, with all its requests.
            credentials: of the connection; None: unencrypted.
        """
        self.name = f"{url}/{triton_model}"
        self._client = WorkerClient(url, triton_model, credentials)
        self._batcher = batcher
        self._settings = settings
        self._on_report, self._on_lost = on_report, on_lost
        self._call: Call | None = None
        self._limit: asyncio.Timeout | None = None
        self._watchdog: asyncio.TimerHandle
        self._is_lost = self._was_live = self._has_requests = False
        self._writing = asyncio.Lock()
        self._epoch = 0
        self._sending = BackgroundTasks()
        self._unqueued: set[asyncio.Future[None]] = set()
        """Batches on streams of their own that the worker has not queued yet."""
        self._streams_until = 0.0
        self._is_absence_logged = False

    async def run(self) -> None:
        """Keep a channel open until cancelled."""
        pause_s = BACKOFF_MIN_S
        while True:
            was_live = await self._serve()
            pause_s = BACKOFF_MIN_S if was_live else min(2 * pause_s, BACKOFF_MAX_S)
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Cancel messages on their way and close the connection."""
        self._sending.cancel()
        await self._client.close()

    def send(self, batch: worker_pb2.Batch, traceparent: str) -> None:
        """Start to send a batch; Triton makes spans under `traceparent` unless it is empty or too many are traced."""
        # The first request: from now on the worker may be silent for `stall_s` only.
        batch.epoch = self._epoch
        if not self._has_requests:
            self._has_requests = True
            self._watchdog.cancel()
            self._watch(self._settings.stall_s)
        # Triton reads a trace context from the metadata of a stream alone.
        if traceparent and self._may_open_stream():
            queued = asyncio.get_running_loop().create_future()
            self._unqueued.add(queued)
            self._sending.spawn(self._send_traced(batch, traceparent, queued))
        else:
            self._sending.spawn(self._send(worker_pb2.WorkerRequest(batch=batch)))

    def _may_open_stream(self) -> bool:
        """Return whether the rate limit lets a batch have a stream of its own, and count it."""
        now = asyncio.get_running_loop().time()
        if self._streams_until > now + 1:
            return False
        self._streams_until = max(self._streams_until, now) + 1 / OWN_STREAMS_PER_S
        return True

    def announce_demand(self, waiting: Sequence[int]) -> None:
        """Tell the worker how many requests wait at this batcher, by class."""
        message = worker_pb2.Demand(batcher=self._batcher, epoch=self._epoch, queued=waiting)
        self._sending.spawn(self._send(worker_pb2.WorkerRequest(demand=message)))

    def cancel(self, refs: Sequence[frame_pb2.TaskRef]) -> None:
        """Make the worker drop requests; a lost one drops all of them when it comes back."""
        cancel = worker_pb2.CancelTasks(batcher=self._batcher, tasks=refs)
        self._sending.spawn(self._send(worker_pb2.WorkerRequest(cancel_tasks=cancel)))

    async def _serve(self) -> bool:
        """Run one channel until it breaks; return whether the engine ever served it."""
        self._is_lost, self._was_live, fault = False, False, ""
        call = self._client.stream()
        self._watch(self._settings.stall_s)
        try:
            async with asyncio.timeout(None) as self._limit:
                await self._read(call)
        except (TimeoutError, *FAULTS) as error:
            fault = reason_of(error)
        finally:
            self._limit = None
            self._watchdog.cancel()
            call.cancel()
            self._sending.cancel()
            self._unqueued.clear()
            self._lose(fault)
        return self._was_live

    async def _read(self, call: Call) -> None:
        """Open a channel and read its reports until it breaks, or reports after the worker was lost."""
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
            # The worker is back: open a new channel, which ends the requests of this one.
            if self._is_lost:
                return
            if self._call is call and reports.wants_renewal:
                # Only the request is replaced; the channel and its requests continue.
                reports.is_renewing = opening.renews = True
                self._sending.spawn(self._send(worker_pb2.WorkerRequest(open_channel=opening)))
            self._watchdog.cancel()
            self._has_requests = self._on_report(self.name, report)
            settings = self._settings
            self._watch(settings.stall_s if self._has_requests else settings.idle_stall_s)
            if report.ready and self._call is None:
                self._call, self._was_live, self._is_absence_logged = call, True, False
                logger.info("worker %s at %s is live", report.worker, self.name)

    def _watch(self, within_s: float) -> None:
        """Lose the worker unless it reports within this time."""
        loop, fault = asyncio.get_running_loop(), f"silent for {within_s:g} s"
        self._watchdog = loop.call_later(within_s, self._lose, fault)

    async def _send(self, request: worker_pb2.WorkerRequest) -> None:
        """Send over the channel, which Triton keeps in order: a cancel never overtakes a batch.

        Nothing is sent to a worker that was lost meanwhile: it has no requests any more.
        """
        # Traced batches travel on other streams: a cancel must not overtake them.
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
        """Send over a stream of its own; cancels wait until the worker has queued the batch."""
        call = self._client.stream(traceparent)
        try:
            await self._client.write(call, worker_pb2.WorkerRequest(batch=batch), ends=True)
            await call.done_writing()
            receipt = asyncio.ensure_future(next_report(call))
            # If this task is cancelled meanwhile, nobody else retrieves the error.
            receipt.add_done_callback(lambda done: done.cancelled() or done.exception())
            # A timeout would cancel the stream, so only the waiting is bounded.
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
        """Lose the worker and its requests; its channel stays until it reports, or a limited time."""
        if self._is_lost:
            return
        self._is_lost, self._call = True, None
        # Keep reading for a while: cancelling the stream of a suspended process can crash Triton.
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time() + SILENT_S_MAX)
        if fault and self._was_live:
            logger.warning("lost worker at %s: %s", self.name, fault)
        elif fault and not self._is_absence_logged:
            logger.info("no worker at %s yet: %s", self.name, fault)
            self._is_absence_logged = True
        self._on_lost(self.name)
