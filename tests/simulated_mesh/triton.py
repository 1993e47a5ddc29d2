"""Triton servers in virtual time: model workers in processes of their own, and gRPC streams to them.

A worker is the shipped one, with its channels, its threads and the scheduler of the engine; the model echoes. Two kinds
of death: with the server, streams break at once; of the Python process alone, streams that are open stay silent until
the server ends too, and new requests fail after a second.
"""

import asyncio
from collections.abc import Callable
from contextvars import Context
from random import Random
from typing import Any, Final
from unittest.mock import patch

import grpc
import grpc.aio
from opentelemetry.trace import NoOpTracer
from tritonclient.grpc import service_pb2

from model_workers import sender, worker
from model_workers.engine.cacheless import EchoEngine
from model_workers.worker import InboxFull, Worker
from sluice.internal.v1 import worker_pb2
from sluice.wire.codec import MalformedMessage, unpack
from tests.simulated_mesh.loop import SimulatedProcess, VirtualLoop, here
from tests.simulated_mesh.threads import SimulatedCondition, SimulatedThread, this_thread

UNHEALTHY_S: Final = 1.0
"""So long Triton takes to notice that a Python process is gone, when a request comes."""
CONTEXT_TOKENS: Final = 4096
POISON: Final = 666_666
"""A token that ends the worker which computes a prompt that begins with it."""
APART_S: Final = 1e-9
"""Between two messages on a stream: the loop does not keep the order of what is due at the same moment."""


def broken(details: str) -> grpc.aio.AioRpcError:
    """What a broken connection raises."""
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details
    )


class Responses:
    """The responses of one request; see `model_workers.sender.ResponseSender`."""

    def __init__(self, call: "Call", *, ends: bool) -> None:
        self._call, self._ends = call, ends
        self._open = True

    def send(self, report: worker_pb2.StepReport) -> None:
        """Sends a report."""
        if self._call.gone:
            raise RuntimeError("the request is gone")
        response = service_pb2.ModelStreamInferResponse()
        response.infer_response.raw_output_contents.append(report.SerializeToString())
        self._call.answer(response)

    def close(self) -> None:
        """Ends the request."""
        assert self._open, "ended twice"
        self._open = False
        self._call.end_request(says=self._ends)

    def fail(self, error: grpc.aio.AioRpcError) -> None:
        """The request failed, and its stream with it."""
        self._call.answer(error)

    def is_cancelled(self) -> bool:
        """Whether the batcher has cancelled the request, or has died: its connection ends with it."""
        return self._call.gone


class Call:
    """One ModelStreamInfer, as the batcher sees it."""

    def __init__(self, server: "TritonServer", process: SimulatedProcess) -> None:
        self._server, self._process = server, process
        self._incarnation = server.incarnation
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._up_at = self._down_at = 0.0
        self._requests, self._half_closed = 0, False
        self.cancelled = False
        self._error: BaseException | None = None
        if server.worker is None:
            self._error = broken("nobody listens")
        else:
            server.calls.append(self)

    async def write(self, message: service_pb2.ModelInferRequest) -> None:
        """Sends a request."""
        if self._error is not None:
            raise self._error
        self._requests += 1
        payload = bytes(message.raw_input_contents[0])
        responses = Responses(self, ends="triton_enable_empty_final_response" in message.parameters)
        self._up(lambda: self._server.take(payload, responses))

    async def done_writing(self) -> None:
        """No request will follow."""
        self._up(self._half_close)

    async def read(self) -> Any:
        """The next response."""
        if self._error is not None and self._answers.empty():
            raise self._error
        got = await self._answers.get()
        if isinstance(got, BaseException):
            self._error = got
            raise got
        return got

    def cancel(self) -> bool:
        """Ends the stream, and who reads it."""
        self._answers.put_nowait(asyncio.CancelledError())
        self._up(self._set_cancelled)
        return True

    # The server's side.

    @property
    def gone(self) -> bool:
        """Whether nobody reads the stream any more."""
        return self.cancelled or not self._process.alive

    def answer(self, response: Any) -> None:
        """Sends a response, an error, or the end."""
        loop = self._server.loop
        self._down_at = max(self._down_at + APART_S, loop.time() + self._server.delay_s())
        self._process.soon(self._answers.put_nowait, response, delay_s=self._down_at - loop.time())

    def end_request(self, *, says: bool) -> None:
        """A request is complete; ``says``: the client wants to know."""
        if says:
            self.answer(service_pb2.ModelStreamInferResponse())
        self._requests -= 1
        self._end_if_done()

    def _half_close(self) -> None:
        self._half_closed = True
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._half_closed and not self._requests:
            self.answer(grpc.aio.EOF)

    def _set_cancelled(self) -> None:
        self.cancelled = True

    def _up(self, act: Callable[[], object]) -> None:
        loop = self._server.loop
        self._up_at = max(self._up_at + APART_S, loop.time() + self._server.delay_s())

        def arrive() -> None:
            if self._incarnation == self._server.incarnation:
                act()

        loop.call_at(self._up_at, arrive, context=Context())


class TritonServer:
    """One server with one model at one address.

    Attributes:
        worker: the Python process of the model; None while the server is down.
        incarnation: counts the starts.
        kills: how often a poisoned row ended it.
    """

    def __init__(
        self, loop: VirtualLoop, chance: Random, delay_s: Callable[[], float], step_s: float
    ) -> None:
        """``step_s``: what a step of the engine takes."""
        self.loop, self.chance, self.delay_s, self.step_s = loop, chance, delay_s, step_s
        self.calls: list[Call] = []
        self.incarnation = 1
        self.kills = 0
        self.worker: WorkerProcess | None = None
        self.start()

    def start(self) -> None:
        """Starts the server and its model."""
        self.worker = WorkerProcess(
            self.loop, f"worker{self.incarnation}", self.chance, self.step_s, self.poisoned
        )

    def poisoned(self) -> None:
        """A row has ended its worker: the supervisor starts the server again."""
        self.kills += 1
        self.crash()
        self.loop.call_later(self.chance.uniform(0.2, 2.0), self.start, context=Context())

    def crash(self) -> None:
        """The server and its model die: every stream breaks."""
        self._end_worker()
        for call in self.calls:
            call.answer(broken("Socket closed"))
        self.calls.clear()
        self.incarnation += 1

    def crash_worker(self) -> None:
        """The Python process dies: streams in flight stay silent."""
        if self.worker is not None:
            self.worker.process.crash()

    def restart(self) -> None:
        """As the supervisor does when a model's process has ended: the server ends with it, and both start again."""
        self.crash()
        self.start()

    def take(self, payload: bytes, responses: Responses) -> None:
        """A request has arrived."""
        assert self.worker is not None
        if self.worker.process.alive:
            self.worker.process.soon(self.worker.take, payload, responses)
        else:
            error = broken("Stub process is not healthy")
            self.loop.call_later(UNHEALTHY_S, responses.fail, error, context=Context())

    def _end_worker(self) -> None:
        if self.worker is not None:
            self.worker.process.crash()
        self.worker = None


class WorkerProcess:
    """The Python process of a model.

    Attributes:
        fails_until: until then every step of the engine raises.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        name: str,
        chance: Random,
        step_s: float,
        poisoned: Callable[[], None],
    ) -> None:
        """``poisoned``: called in the step of a row whose prompt begins with `POISON`."""
        self.process = SimulatedProcess(loop, name)
        self._poisoned = poisoned
        self.fails_until = 0.0
        self._step_s = step_s
        self.engine = EchoEngine(
            chance.randrange(2, 7), chance.randrange(5), CONTEXT_TOKENS, self._step
        )
        self._worker: Worker | None = None
        self.process.soon(self._start)

    def _start(self) -> None:
        loop, crash = self.process.loop, self.process.crash
        with (
            patch.multiple(worker, Thread=SimulatedThread, Condition=SimulatedCondition),
            patch.object(sender, "Condition", SimulatedCondition),
        ):
            self._worker = Worker(
                "echo",
                self.engine,
                NoOpTracer(),
                on_fault=lambda: loop.call_soon(crash, context=Context()),
            )
            self._worker.start()

    def _step(self) -> None:
        """A step of the engine."""
        thread = this_thread()
        assert thread is not None
        thread.sleep(self._step_s)
        if self.process.loop.time() < self.fails_until:
            raise RuntimeError("the device failed")
        if any(
            sequence.spec.prompt[0] == POISON for sequence in self.engine._scheduler.sequences()
        ):
            self.process.loop.call_soon(self._poisoned, context=Context())
            thread.pause()

    def take(self, payload: bytes, responses: Responses) -> None:
        """As `model_workers.backend` does."""
        assert self._worker is not None, "started before anything arrives"
        try:
            request = unpack(worker_pb2.WorkerRequest, payload)
            self._worker.handle(request, responses)
        except (MalformedMessage, InboxFull) as error:
            responses.fail(broken(str(error)))


class TritonChannel:
    """What `grpc.aio.Channel` is to `batcher.workers.client`."""

    def __init__(self, server: TritonServer) -> None:
        process = here()
        assert process is not None
        self._server, self._process = server, process

    def unary_unary(self, *_: Any, **__: Any) -> None:
        """Not used."""

    def stream_stream(self, *_: Any, **__: Any) -> Callable[..., Call]:
        """ModelStreamInfer."""
        return lambda **_: Call(self._server, self._process)

    async def close(self) -> None:
        """Nothing is open but calls, which their owners cancel."""
