"""The workers of one model. Each has one long-lived channel for frames and cancels, one stream per batch.

A worker is lost when its channel breaks, when it sent nothing for ``stall_s``, when responses are missing, or when a
batch was not answered. Then every row it had is requeued, and a new channel is opened, with growing pauses. Rows of the
previous channel are cancelled on the new one before anything else is sent: a worker that only stalled must not compute
rows that another one has by now.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from batcher.workers.client import (
    FAULTS,
    Call,
    WorkerClient,
    next_response,
    read_to_end,
    reason_of,
)
from sluice.internal.v1 import worker_pb2
from sluice.settings import BatcherSettings, ModelSettings

log = logging.getLogger(__name__)

BACKOFF_MIN_S: Final = 0.1
BACKOFF_MAX_S: Final = 2.0


class WorkerEvents(Protocol):
    """Receives the events of workers. A worker has a name, which stays the same when its process restarts."""

    def on_live(self, worker: str) -> None:
        """The channel is open: batches may be sent."""

    def on_step(self, worker: str, report: worker_pb2.StepReport) -> None:
        """Frames or a heartbeat.

        Raises:
            ChannelBroken: earlier frames are missing.
        """

    def on_admission(self, worker: str, batch_id: str, admission: worker_pb2.Admission) -> None:
        """A batch was answered."""

    def on_lost(self, worker: str) -> list[str]:
        """The worker is lost; returns the rows it had."""


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
    ) -> None:
        self.name = name_of(url, triton_model)
        self._client = WorkerClient(url, triton_model)
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
        await self._client.close()

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
        """Runs one channel until it breaks: returns why, and whether it was ever open."""
        self._fault = ""
        call = self._client.stream()
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
        cancelled, worker_id = not self._orphans, ""
        if self._orphans:
            await self._write(call, self._cancel_rows(sorted(self._orphans)))
        while not (cancelled and worker_id):
            response = await next_response(call)
            if response.HasField("admission"):
                cancelled = True
            else:
                self._events.on_step(self.name, response.step)
                worker_id = response.step.worker
        self._orphans.clear()
        self._call = call
        self._missed = False
        log.info("worker %s at %s is live", worker_id, self.name)
        self._events.on_live(self.name)

    async def _read(self, call: Call) -> None:
        # Only here the time limit is extended: while the channel opens, heartbeats do not replace missing answers.
        while True:
            response = await next_response(call)
            if response.HasField("step"):
                self._events.on_step(self.name, response.step)
                if self._limit is not None:
                    self._limit.reschedule(
                        asyncio.get_running_loop().time() + self._settings.stall_s
                    )

    async def _send(self, batch: worker_pb2.Batch, traceparent: str) -> None:
        call = self._client.stream(traceparent)
        try:
            async with asyncio.timeout(self._settings.stall_s):
                await self._client.write(call, worker_pb2.WorkerRequest(batch=batch))
                await call.done_writing()
                response = await next_response(call)
            self._events.on_admission(self.name, batch.batch_id, response.admission)
            await read_to_end(call)
        except (TimeoutError, *FAULTS) as error:
            self._reset(f"batch {batch.batch_id}: {reason_of(error)}")
        finally:
            call.cancel()

    async def _write(self, call: Call, request: worker_pb2.WorkerRequest) -> None:
        async with self._writing:
            await self._client.write(call, request)

    def _cancel_rows(self, request_ids: list[str]) -> worker_pb2.WorkerRequest:
        rows = worker_pb2.CancelRows(batcher=self._batcher, request_ids=request_ids)
        return worker_pb2.WorkerRequest(cancel_rows=rows)

    def _reset(self, fault: str) -> None:
        """Closes the channel, because the worker's rows are no longer certain."""
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


def name_of(url: str, triton_model: str) -> str:
    """What a batcher calls a worker."""
    return f"{url}/{triton_model}"


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
            name_of(url, name): Worker(url, name, batcher, settings, events)
            for url in urls
            for name in model.triton_models
        }

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
