"""A real Triton with rendered models for a test, and a client that speaks the worker's wire over raw stubs."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from model_workers.deploy import REQUEST, RESPONSE, render_repository
from sluice.internal.v1 import worker_pb2
from sluice.settings import ModelSettings, Settings
from sluice.settings.routing import RoutingSettings
from sluice.startup import free_port
from supervisor import model_processes, triton

START_S = 60.0


class TritonServer:
    """A server with rendered models, which a test may kill and start again on the same port.

    Attributes:
        address: where it listens, now and after a restart.
        log: what it has written.
    """

    def __init__(
        self,
        folder: Path,
        models: tuple[ModelSettings, ...],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Render the models; files go to ``folder``."""
        settings = Settings(models=models, routing=RoutingSettings(default=models[0].name))
        render_repository(settings, folder / "repository")
        triton.prepare_runtime(folder / "runtime")
        self._config = triton.TritonConfig(
            name="triton",
            repository=folder / "repository",
            models=tuple(model.name for model in models),
            runtime=folder / "runtime",
            port=free_port(),
            secret="test",
            shm_prefix=f"sluice_test_{os.getpid()}_{folder.name[-20:]}_",
        )
        self._environment = environment or {}
        self.address = f"{self._config.host}:{self._config.port}"
        self.log = folder / "triton.log"
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start the server if it does not run, and wait until it is ready.

        On a busy machine Triton 2.51 sometimes ends at start (``boost::interprocess::lock_exception`` between server
        and stub): as from the supervisor, it gets a second try.
        """
        if self._process is not None and self._process.poll() is None:
            return
        process = self._process = self._spawn()
        try:
            await ready(process, self.address, self.log)
        except AssertionError:
            if (process.poll() or 0) >= 0:
                raise
            self.kill()
            self._process = self._spawn()
            await ready(self._process, self.address, self.log)

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as output:
            return subprocess.Popen(
                triton.triton_command(self._config),
                env={**triton.triton_environment(self._config.runtime), **self._environment},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL for the server and its stubs."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        triton.remove_shared_memory(self._config.shm_prefix)

    def signal_stub(self, number: signal.Signals) -> None:
        """Send a signal to the Python process of the model; the server does not notice."""
        assert self._process is not None
        (stub,) = model_processes.stub_pids(self._process.pid).values()
        os.kill(stub, number)


@contextmanager
def running_triton(
    folder: Path, models: tuple[ModelSettings, ...], environment: Mapping[str, str] | None = None
) -> Iterator[TritonServer]:
    """Serve ``models``; the server is killed at the end, because running requests would delay an orderly one."""
    server = TritonServer(folder, models, environment)
    try:
        asyncio.run(server.start())
        yield server
    finally:
        server.kill()


class WorkerClient:
    """One gRPC channel to Triton, speaking WorkerRequest and StepReport."""

    def __init__(self, address: str, model: str) -> None:
        self._channel = grpc.aio.insecure_channel(
            address, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._model = model

    async def __aenter__(self) -> "WorkerClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    def stream(self, traceparent: str = "") -> "WorkerStream":
        """A stream of its own; leave it with ``async with``."""
        metadata = [("triton_grpc_error", "true")]
        if traceparent:
            metadata.append(("traceparent", traceparent))
        return WorkerStream(self._stub.ModelStreamInfer(metadata=metadata), self._model)

    async def ask(self, request: worker_pb2.WorkerRequest, traceparent: str = "") -> None:
        """Sends one request on a stream of its own, and returns when the worker has queued it."""
        async with self.stream(traceparent) as stream:
            await stream.send(request)
            await stream.half_close()
            # To the end: streams that end by themselves leave nothing behind in the server.
            assert not [report async for report in stream.reports()]


class WorkerStream:
    """One ModelStreamInfer."""

    def __init__(self, call: Any, model: str) -> None:
        self._call = call
        self._model = model

    async def __aenter__(self) -> "WorkerStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()

    async def send(self, request: worker_pb2.WorkerRequest) -> None:
        """Sends a request."""
        await self.send_bytes(request.SerializeToString())

    async def send_bytes(self, payload: bytes) -> None:
        """Sends what may be no request at all."""
        message = service_pb2.ModelInferRequest(model_name=self._model)
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        message.inputs.add(name=REQUEST, datatype="UINT8", shape=[len(payload)])
        message.raw_input_contents.append(payload)
        await self._call.write(message)

    async def half_close(self) -> None:
        """Says that no request will follow; the stream ends with its last response."""
        await self._call.done_writing()

    async def code(self) -> grpc.StatusCode:
        """With which status the stream has ended."""
        code: grpc.StatusCode = await self._call.code()
        return code

    async def reports(self) -> AsyncIterator[worker_pb2.StepReport]:
        """What the worker answers."""
        async for reply in self._call:
            assert not reply.error_message, reply.error_message
            contents = reply.infer_response.raw_output_contents
            if contents:
                assert reply.infer_response.outputs[0].name == RESPONSE
                yield worker_pb2.StepReport.FromString(contents[0])


async def ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Returns when the server answers; fails as soon as it has ended instead, with the end of its log."""
    waiting = asyncio.ensure_future(triton.wait_for_triton(address, START_S))
    exiting = asyncio.ensure_future(asyncio.to_thread(_poll_exit, process, waiting))
    await asyncio.wait({waiting, exiting}, return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done() or waiting.exception() is not None:
        waiting.cancel()
        text = await asyncio.to_thread(log.read_text)
        raise AssertionError(f"Triton did not start:\n{text[-4000:]}")


def _poll_exit(process: subprocess.Popen[bytes], waiting: "asyncio.Future[None]") -> None:
    while not waiting.done():
        try:
            process.wait(timeout=0.1)
            return
        except subprocess.TimeoutExpired:
            continue
