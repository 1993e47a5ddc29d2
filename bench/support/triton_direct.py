"""Asks a worker without the mesh: one channel and one batch straight into Triton, as the batcher does it."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from batcher.workers.client import infer_request, step_report
from sluice.internal.v1 import task_pb2, worker_pb2

ANSWER_S = 120.0


def rows(
    prompts: list[list[int]], max_tokens: int, stop_token_ids: list[int]
) -> list[worker_pb2.Row]:
    """Greedy rows, one a prompt."""
    return [
        worker_pb2.Row(
            task=task_pb2.Task(
                request_id=f"bench-{uuid.uuid4().hex}",
                prompt_token_ids=prompt,
                priority_class="interactive",
                sampling=task_pb2.Sampling(
                    max_tokens=max_tokens,
                    top_p=1.0,
                    repetition_penalty=1.0,
                    stop_token_ids=stop_token_ids,
                ),
            )
        )
        for prompt in prompts
    ]


class DirectWorker:
    """A channel to one model in Triton."""

    def __init__(self, url: str, model: str, heartbeat_ms: int = 1000) -> None:
        self._heartbeat_ms = heartbeat_ms
        self._channel = grpc.aio.insecure_channel(url)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._model = model
        self._id = f"bench-{uuid.uuid4().hex[:8]}"
        self._frames: Any = None
        self._open = 0
        self._first: dict[str, asyncio.Future[None]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        opening = worker_pb2.WorkerRequest(
            open_channel=worker_pb2.OpenChannel(batcher=self._id, heartbeat_ms=self._heartbeat_ms)
        )
        self._frames = self._stub.ModelStreamInfer(self._requests(opening, hold=True))
        while not (await self._next()).ready:
            pass
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._frames.cancel()
        await self._channel.close()

    async def send(self, batch: list[worker_pb2.Row]) -> None:
        """Sends the batch, and returns when the worker has queued it."""
        await self._send(batch)
        self._open += len(batch)

    async def report(self) -> worker_pb2.StepReport:
        """The next report of the channel."""
        step = await self._next()
        self._open -= sum(frame.HasField("final") for frame in step.frames)
        return step

    async def first_token(self, batch: list[worker_pb2.Row]) -> None:
        """Sends the batch and returns at its first token; `finish` must be called before the next batch."""
        await self._send(batch)
        self._open = len(batch)
        while not await self._read():
            pass

    async def first_ms(self, batch: list[worker_pb2.Row]) -> float:
        """Milliseconds to the first token of a batch of one row; many calls at a time, and no other method then."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read_all())
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._first[batch[0].task.request_id] = arrived
        begun = time.perf_counter()
        sending = asyncio.ensure_future(self._send(batch))
        await asyncio.wait_for(arrived, ANSWER_S)
        elapsed_ms = (time.perf_counter() - begun) * 1000
        await sending
        return elapsed_ms

    async def _read_all(self) -> None:
        while True:
            for frame in (await self._next()).frames:
                self._first.pop(frame.request_id).set_result(None)

    async def finish(self) -> int:
        """Reads to the end of the rows that are under way; the number of tokens."""
        tokens = 0
        while self._open:
            tokens += await self._read()
        return tokens

    async def answer(self, batch: list[worker_pb2.Row]) -> int:
        """Sends the batch and reads to the end of all rows; the number of tokens."""
        await self._send(batch)
        self._open = len(batch)
        return await self.finish()

    async def _read(self) -> int:
        """Takes one report; the number of tokens in it."""
        return sum(len(frame.token_ids) for frame in (await self.report()).frames)

    async def _send(self, batch: list[worker_pb2.Row]) -> None:
        request = worker_pb2.WorkerRequest(
            batch=worker_pb2.Batch(batch_id=uuid.uuid4().hex, batcher=self._id, rows=batch)
        )
        call = self._stub.ModelStreamInfer(self._requests(request, hold=False))
        try:
            assert await self._read_from(call) is None
        finally:
            call.cancel()

    async def _next(self) -> worker_pb2.StepReport:
        report = await self._read_from(self._frames)
        if report is None:
            raise ConnectionError("the worker closed the channel")
        refused = [refusal for admission in report.admissions for refusal in admission.refused]
        assert not refused, f"refused: {refused}"
        return report

    async def _read_from(self, call: Any) -> worker_pb2.StepReport | None:
        """The next report; None: the request is complete."""
        reply = await asyncio.wait_for(call.read(), ANSWER_S)
        if reply is grpc.aio.EOF:
            raise ConnectionError("Triton closed the stream")
        return step_report(reply)

    async def _requests(
        self, message: worker_pb2.WorkerRequest, hold: bool
    ) -> AsyncIterator[service_pb2.ModelInferRequest]:
        yield infer_request(self._model, message, ends=True)
        if hold:
            await asyncio.Event().wait()
