"""A worker that does what a test says, behind Triton's gRPC protocol in the test's own loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from sluice.internal.v1 import frame_pb2, worker_pb2

BOUND_S = 60.0
HEARTBEAT_S = 0.1
SLOTS = 4


class WorkerDouble(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """One worker.

    Attributes:
        address: where it listens.
        worker: the id in its reports.
        received: what came, in order.
        streams: metadata of each stream, in order.
        silent: nothing is sent on the channel, and batches are not queued.
        error: Triton's answer to batches; empty: they go on to the worker.
        steps_slowly: batches are queued, and heartbeats sent; nothing else, as in a step that takes long.
        receipts: unset: it does not say that it has queued the batch of a stream of its own.
        busy: slots that are taken, as its reports say.
        ready: whether the engine serves channels.
    """

    def __init__(self) -> None:
        self.address = ""
        self.worker = "w1"
        self.received: list[worker_pb2.WorkerRequest] = []
        self.streams: list[dict[str, str]] = []
        self.silent = False
        self.error = ""
        self.steps_slowly = False
        self.busy = 0
        self.ready = True
        self._channel: Any = None
        self._sequence = self._taken = 0
        self._here = set[str]()
        self._changed = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._beaten = asyncio.Event()
        self.receipts = asyncio.Event()
        self.receipts.set()

    @staticmethod
    @asynccontextmanager
    async def running() -> AsyncIterator["WorkerDouble"]:
        """A worker that listens and sends heartbeats."""
        double, server = WorkerDouble(), grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(double, server)
        double.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        beating = asyncio.create_task(double._beat())
        try:
            yield double
        finally:
            beating.cancel()
            await server.stop(grace=None)

    @property
    def batches(self) -> list[worker_pb2.Batch]:
        """The batches that came."""
        return [r.batch for r in self.received if r.HasField("batch")]

    @property
    def cancels(self) -> list[list[str]]:
        """The cancels that came."""
        return [
            [row.request_id for row in request.cancel_tasks.tasks]
            for request in self.received
            if request.HasField("cancel_tasks")
        ]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until something that came makes ``holds`` true."""
        async with asyncio.timeout(BOUND_S), self._changed:
            await self._changed.wait_for(holds)

    async def opened(self, number: int) -> None:
        """Waits for the ``number``-th channel, from 1."""
        await self.until(lambda: sum(r.HasField("open_channel") for r in self.received) >= number)

    async def beaten(self) -> None:
        """Waits for the next heartbeat."""
        async with asyncio.timeout(BOUND_S):
            await self._beaten.wait()

    async def batch(self, number: int) -> worker_pb2.Batch:
        """Waits for the ``number``-th batch, from 0."""
        await self.until(lambda: len(self.batches) > number)
        return self.batches[number]

    async def step(
        self,
        *frames: frame_pb2.Frame,
        skip: int = 0,
        admissions: Sequence[worker_pb2.Admission] = (),
    ) -> None:
        """Sends a report on the channel, ``skip`` numbers late."""
        async with self._writing:  # gRPC takes one write at a time, and heartbeats come between
            self._sequence += skip
            self._here -= {frame.request_id for frame in frames if frame.HasField("final")}
            free = max(0, SLOTS - max(self.busy, len(self._here)))
            report = worker_pb2.StepReport(
                worker=self.worker,
                sequence=self._sequence,
                frames=frames,
                load=worker_pb2.WorkerLoad(slots=SLOTS, running=self.busy),
                admissions=admissions,
                ready=self.ready,
                task_grants=[self._taken + free] * 3,
            )
            self._sequence += 1
            await _write(self._channel, report.SerializeToString())

    async def admit(self, batch: worker_pb2.Batch) -> None:
        """The engine takes a batch."""
        await self.step(admissions=[worker_pb2.Admission(batch_id=batch.batch_id)])

    async def end_channel(self) -> None:
        """Ends the channel, as a worker does whose engine hangs."""
        async with self._writing:
            await _write(self._channel)

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> None:
        """See Triton's GRPCInferenceService."""
        self.streams.append({key: str(value) for key, value in context.invocation_metadata()})
        async for infer in requests:
            request = worker_pb2.WorkerRequest.FromString(infer.raw_input_contents[0])
            self.received.append(request)
            async with self._changed:
                self._changed.notify_all()
            ends = infer.parameters["triton_enable_empty_final_response"].bool_param
            await self._answer(request, context, ends=ends)

    async def _answer(self, request: worker_pb2.WorkerRequest, context: Any, *, ends: bool) -> None:
        if request.HasField("open_channel"):
            self._channel, self._sequence, self._taken, self._here = context, 0, 0, set()
            if not self.silent:
                await self.step()
        elif self.error and request.HasField("batch"):
            await context.write(service_pb2.ModelStreamInferResponse(error_message=self.error))
        elif request.HasField("cancel_tasks"):
            self._here -= {row.request_id for row in request.cancel_tasks.tasks}
        elif not self.silent and request.HasField("batch"):
            self._taken += len(request.batch.tasks)
            self._here |= {row.task.request_id for row in request.batch.tasks}
            if ends:
                await self.receipts.wait()
                await _write(context)
            if not self.steps_slowly:
                await self.admit(request.batch)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._channel is not None and not self.silent and not self._channel.done():
                await self.step()
                self._beaten.set()
                self._beaten.clear()


def frame(
    row: worker_pb2.BatchedTask, start: int, token_ids: Sequence[int], end: int = 0
) -> frame_pb2.Frame:
    """A frame of ``row``."""
    made = frame_pb2.Frame(
        request_id=row.task.request_id, attempt=row.attempt, start_index=start, token_ids=token_ids
    )
    if end:
        made.final.end = frame_pb2.TaskEnd.ValueType(end)
    return made


async def _write(context: Any, *contents: bytes) -> None:
    """Without contents: Triton's response that a request is complete."""
    infer = service_pb2.ModelInferResponse(raw_output_contents=contents)
    await context.write(service_pb2.ModelStreamInferResponse(infer_response=infer))
