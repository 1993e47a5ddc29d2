"""The Triton client of one model: one long-lived channel for frames and cancels, one stream per batch.

The worker is lost when its channel breaks, when it was silent for ``stall_s``, when responses are missing, or when a
batch was not answered. Then every row it had is given back, and a new channel is opened, with growing pauses. Rows of
the channel before are cancelled on the new one before anything else is sent: a worker that only stalled must not
compute them twice.
"""

import asyncio
import logging
from typing import Final, Protocol

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from batcher.core.channel import Channel, ChannelBroken
from batcher.triton import (
    GRPC_OPTIONS,
    STREAM_METADATA,
    WorkerRefused,
    infer_request,
    worker_response,
)
from sluice.internal.v1 import worker_pb2
from sluice.settings import BatcherSettings
from sluice.telemetry.tracing import TRACEPARENT
from sluice.wire.codec import MalformedMessage

log = logging.getLogger(__name__)

BACKOFF_MIN_S: Final = 0.1
BACKOFF_MAX_S: Final = 2.0
BATCH_END_S: Final = 1.0
"""How long an answered batch's stream may take to end by itself, so that Triton's spans are complete."""

_Stream = grpc.aio.StreamStreamCall[
    service_pb2.ModelInferRequest, service_pb2.ModelStreamInferResponse
]

_FAULTS = (
    grpc.aio.AioRpcError,
    grpc.aio.UsageError,
    asyncio.InvalidStateError,
    ChannelBroken,
    WorkerRefused,
    MalformedMessage,
)


class WorkerEvents(Protocol):
    """Who is told what the worker does."""

    def on_live(self) -> None:
        """The channel stands: batches may be sent."""

    def on_step(self, report: worker_pb2.StepReport) -> bool:
        """Frames or a heartbeat; False when frames before them are missing."""

    def on_admission(self, batch_id: str, admission: worker_pb2.Admission) -> None:
        """A batch was answered."""

    def on_lost(self) -> list[str]:
        """The worker is lost; returns the rows it had."""


class Worker:
    """The worker of one model, from this batcher's side."""

    def __init__(
        self,
        url: str,
        model: str,
        batcher: str,
        settings: BatcherSettings,
        events: WorkerEvents,
    ) -> None:
        self._model = model
        self._batcher = batcher
        self._settings = settings
        self._events = events
        self._grpc = grpc.aio.insecure_channel(url, options=GRPC_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._grpc)
        self._channel = Channel()
        self._call: _Stream | None = None
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

    @property
    def id(self) -> str:
        """The worker's id; empty until it has spoken."""
        return self._channel.worker

    @property
    def slots(self) -> int:
        """Rows it computes at once; 0 while it is lost."""
        return self._channel.slots if self.live else 0

    @property
    def running(self) -> int:
        """Rows in it; 0 while it is lost."""
        return self._channel.running if self.live else 0

    def capacity(self, in_flight: int, unanswered: int) -> int:
        """Rows that may be sent now; see `Channel.capacity`."""
        return self._channel.capacity(in_flight, unanswered) if self.live else 0

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
        await self._grpc.close()

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
        except (TimeoutError, *_FAULTS) as error:
            self._reset(f"cancel: {_reason(error)}")

    async def _serve(self) -> tuple[str, bool]:
        """One channel until it breaks: why it did, and whether it ever stood."""
        self._channel, self._fault = Channel(), ""
        call: _Stream = self._stub.ModelStreamInfer(metadata=STREAM_METADATA)
        stood = False
        try:
            async with asyncio.timeout(self._settings.stall_s) as self._limit:
                await self._open(call)
                stood = True
                await self._read(call)
            fault = "the worker closed the channel"
        except TimeoutError:
            fault = self._fault or f"silent for {self._settings.stall_s:g} s"
        except _FAULTS as error:
            fault = _reason(error)
        finally:
            self._limit = self._call = None
            call.cancel()
            self._end_sending()
            self._orphans.update(self._events.on_lost())
        return fault, stood

    async def _open(self, call: _Stream) -> None:
        opening = worker_pb2.OpenChannel(
            batcher=self._batcher, heartbeat_ms=self._settings.heartbeat_ms
        )
        await self._write(call, worker_pb2.WorkerRequest(open_channel=opening))
        cancelled = not self._orphans
        if self._orphans:
            await self._write(call, self._cancel_rows(sorted(self._orphans)))
        while not (cancelled and self._channel.live):
            response = await self._next(call)
            if response.HasField("admission"):
                cancelled = True
            else:
                self._step(response.step)
        self._orphans.clear()
        self._call = call
        self._missed = False
        log.info("worker %s of model %s is live", self.id, self._model)
        self._events.on_live()

    async def _read(self, call: _Stream) -> None:
        while True:
            response = await self._next(call)
            if response.HasField("step"):
                self._step(response.step)

    async def _next(self, call: _Stream) -> worker_pb2.WorkerResponse:
        while True:
            streamed = await call.read()
            if streamed is grpc.aio.EOF:
                raise ChannelBroken("the worker closed the channel")
            response = worker_response(streamed)
            if response is not None:
                return response

    def _step(self, report: worker_pb2.StepReport) -> None:
        self._channel.step(report)
        if not self._events.on_step(report):
            raise ChannelBroken("frames are missing")
        # While the channel opens its time is fixed: heartbeats do not stand for the answers that are still missing.
        if self._limit is not None and self.live:
            self._limit.reschedule(asyncio.get_running_loop().time() + self._settings.stall_s)

    async def _send(self, batch: worker_pb2.Batch, traceparent: str) -> None:
        metadata = (
            (*STREAM_METADATA, (TRACEPARENT, traceparent)) if traceparent else STREAM_METADATA
        )
        call: _Stream = self._stub.ModelStreamInfer(metadata=metadata)
        try:
            async with asyncio.timeout(self._settings.stall_s):
                request = worker_pb2.WorkerRequest(batch=batch)
                await call.write(infer_request(self._model, request))
                await call.done_writing()
                response = await self._next(call)
            self._channel.admitted(response.admission)
            self._events.on_admission(batch.batch_id, response.admission)
            await _read_to_end(call)
        except (TimeoutError, *_FAULTS) as error:
            self._reset(f"batch {batch.batch_id}: {_reason(error)}")
        finally:
            call.cancel()

    async def _write(self, call: _Stream, request: worker_pb2.WorkerRequest) -> None:
        async with self._writing:
            await call.write(infer_request(self._model, request))

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
            log.warning("worker of model %s is lost: %s", self._model, fault)
        elif not self._missed:
            log.info("no worker for model %s yet: %s", self._model, fault)
            self._missed = True


async def _read_to_end(call: _Stream) -> None:
    try:
        async with asyncio.timeout(BATCH_END_S):
            while await call.read() is not grpc.aio.EOF:
                pass
    except (TimeoutError, grpc.aio.AioRpcError):
        pass  # The batch was answered; how its stream ends changes nothing.


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "not answered in time"
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
