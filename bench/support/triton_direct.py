"""Asks a worker without the mesh: one channel and batches straight into Triton, as the batcher sends them.

`ask` is what a program does that has Triton alone: rows that wait go together in one batch, at most `ROWS_MAX` are
under way (what a worker with the shipped settings takes), and with a queue delay a row waits so long for others, as
with `max_queue_delay_microseconds` of Triton's dynamic batcher.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from batcher.workers.client import infer_request, step_report
from sluice.internal.v1 import task_pb2, worker_pb2

ANSWER_S: Final = 120.0
ROWS_MAX: Final = 64


def row(prompt: list[int], max_tokens: int, min_tokens: int = 0) -> worker_pb2.BatchedTask:
    """A greedy row."""
    return worker_pb2.BatchedTask(
        task=task_pb2.Task(
            request_id=f"bench-{uuid.uuid4().hex}",
            prompt_token_ids=prompt,
            priority_class="interactive",
            sampling=task_pb2.Sampling(
                max_tokens=max_tokens, min_tokens=min_tokens, top_p=1.0, repetition_penalty=1.0
            ),
        )
    )


@dataclass
class Asked:
    """A row that is under way; seconds of the clock."""

    begun: float
    ended: "asyncio.Future[float]"
    first_ms: float = 0.0


class DirectWorker:
    """A channel to one model in Triton."""

    def __init__(
        self, url: str, model: str, *, queue_s: float = 0.0, heartbeat_ms: int = 1000
    ) -> None:
        self._heartbeat_ms = heartbeat_ms
        self._queue_s = queue_s
        self._channel = grpc.aio.insecure_channel(url)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._model = model
        self._id = f"bench-{uuid.uuid4().hex[:8]}"
        self._frames: Any = None
        self._open = 0
        self._asked: dict[str, Asked] = {}
        self._waiting: list[worker_pb2.BatchedTask] = []
        self._flushing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._left = asyncio.Event()
        self.tokens = 0

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
        for task in self._tasks:
            task.cancel()
        self._left.set()  # gRPC does not end the request of a stream that the worker broke
        self._frames.cancel()
        await self._channel.close()

    async def ask(self, asked: worker_pb2.BatchedTask) -> float:
        """Milliseconds to the first token of a row, when it has ended; many at a time, and no other method then."""
        if not self._tasks:
            self._spawn(self._read_all())
        ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._asked[asked.task.request_id] = Asked(time.perf_counter(), ended)
        self._waiting.append(asked)
        self._flush()
        return await asyncio.wait_for(ended, ANSWER_S)

    async def send(self, batch: list[worker_pb2.BatchedTask]) -> None:
        """Sends the batch, and returns when the worker has queued it."""
        self._open += len(batch)
        await self._send(batch)

    async def report(self) -> worker_pb2.StepReport:
        """The next report of the channel."""
        step = await self._next()
        self._open -= sum(frame.HasField("final") for frame in step.frames)
        return step

    async def first_token(self, batch: list[worker_pb2.BatchedTask]) -> None:
        """Sends the batch and returns at its first token; `finish` must be called before the next batch."""
        await self.send(batch)
        while not sum(len(frame.token_ids) for frame in (await self.report()).frames):
            pass

    async def finish(self) -> None:
        """Reads to the end of the rows that are under way."""
        while self._open:
            await self.report()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        """A part that fails fails all rows that are under way."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            for asked in self._asked.values():
                if not asked.ended.done():
                    asked.ended.set_exception(error)

    def _flush(self) -> None:
        if self._waiting and not self._flushing and self._open < ROWS_MAX:
            self._flushing = True
            self._spawn(self._send_waiting())

    async def _send_waiting(self) -> None:
        # Also without a delay: rows whose callers woke up with this one go with it.
        await asyncio.sleep(self._queue_s)
        self._flushing = False
        room = ROWS_MAX - self._open
        batch, self._waiting = self._waiting[:room], self._waiting[room:]
        await self.send(batch)

    async def _read_all(self) -> None:
        while True:
            step = await self.report()
            now = time.perf_counter()
            for frame in step.frames:
                asked = self._asked[frame.request_id]
                self.tokens += len(frame.token_ids)
                if frame.token_ids and not asked.first_ms:
                    asked.first_ms = 1e3 * (now - asked.begun)
                if frame.HasField("final"):
                    del self._asked[frame.request_id]
                    asked.ended.set_result(asked.first_ms)
            self._flush()

    async def _send(self, batch: list[worker_pb2.BatchedTask]) -> None:
        request = worker_pb2.WorkerRequest(
            batch=worker_pb2.Batch(batch_id=uuid.uuid4().hex, batcher=self._id, tasks=batch)
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
            await self._left.wait()
