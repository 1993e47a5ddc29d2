"""A worker that does what a test says, behind Triton's gRPC protocol in the test's own loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from sluice.internal.v1 import frame_pb2, worker_pb2

BOUND_S = 10.0
HEARTBEAT_S = 0.1
SLOTS = 4


class WorkerDouble(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """One worker.

    Attributes:
        address: where it listens.
        worker: the id in its reports.
        received: what came, in order.
        streams: metadata of each stream, in order.
        silent: nothing is sent on the channel, and batches get no answer.
        answers_cancels: whether cancels are answered.
        refuse: rows that are refused, retryable.
        busy: slots that are taken, as its reports say.
    """

    def __init__(self) -> None:
        self.address = ""
        self.worker = "w1"
        self.received: list[worker_pb2.WorkerRequest] = []
        self.streams: list[dict[str, str]] = []
        self.silent = False
        self.answers_cancels = True
        self.refuse: set[str] = set()
        self.busy = 0
        self._channel: Any = None
        self._sequence = 0
        self._changed = asyncio.Condition()
        self._writing = asyncio.Lock()

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
        return [list(r.cancel_rows.request_ids) for r in self.received if r.HasField("cancel_rows")]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until something that came makes ``holds`` true."""
        async with asyncio.timeout(BOUND_S), self._changed:
            await self._changed.wait_for(holds)

    async def batch(self, number: int) -> worker_pb2.Batch:
        """Waits for the ``number``-th batch, from 0."""
        await self.until(lambda: len(self.batches) > number)
        return self.batches[number]

    async def step(self, *frames: frame_pb2.Frame, skip: int = 0) -> None:
        """Sends a report on the channel, ``skip`` numbers late."""
        async with self._writing:  # gRPC takes one write at a time, and heartbeats come between
            self._sequence += skip
            report = worker_pb2.StepReport(
                worker=self.worker,
                sequence=self._sequence,
                frames=frames,
                load=worker_pb2.WorkerLoad(slots=SLOTS, running=self.busy),
            )
            self._sequence += 1
            await _write(self._channel, worker_pb2.WorkerResponse(step=report))

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> None:
        """See Triton's GRPCInferenceService."""
        self.streams.append({key: str(value) for key, value in context.invocation_metadata()})
        async for infer in requests:
            request = worker_pb2.WorkerRequest.FromString(infer.raw_input_contents[0])
            self.received.append(request)
            async with self._changed:
                self._changed.notify_all()
            await self._answer(request, context)

    async def _answer(self, request: worker_pb2.WorkerRequest, context: Any) -> None:
        if request.HasField("open_channel"):
            self._channel, self._sequence = context, 0
            if not self.silent:
                await self.step()
        elif not self.silent and (request.HasField("batch") or self.answers_cancels):
            await _write(context, worker_pb2.WorkerResponse(admission=self._admit(request.batch)))

    def _admit(self, batch: worker_pb2.Batch) -> worker_pb2.Admission:
        names = [row.task.request_id for row in batch.rows]
        return worker_pb2.Admission(
            accepted=[name for name in names if name not in self.refuse],
            refused=[
                worker_pb2.Refusal(request_id=name, retryable=True)
                for name in names
                if name in self.refuse
            ],
        )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._channel is not None and not self.silent and not self._channel.done():
                await self.step()


def frame(
    row: worker_pb2.Row, start: int, token_ids: Sequence[int], end: int = 0
) -> frame_pb2.Frame:
    """A frame of ``row``."""
    made = frame_pb2.Frame(
        request_id=row.task.request_id,
        attempt=row.attempt,
        start_index=start,
        token_ids=token_ids,
    )
    if end:
        made.final.end = frame_pb2.RowEnd.ValueType(end)
    return made


async def _write(context: Any, response: worker_pb2.WorkerResponse) -> None:
    infer = service_pb2.ModelInferResponse(raw_output_contents=[response.SerializeToString()])
    await context.write(service_pb2.ModelStreamInferResponse(infer_response=infer))
