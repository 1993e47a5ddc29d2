"""Triton's inference protocol, as far as batchers use it, in front of a `Worker`.

A request on a stream stays open until the worker ends it, and its responses are sent in order. As from Triton, a
request may ask for an empty response when it has ended.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from model_workers.deploy import RESPONSE
from model_workers.worker import InboxFull, Worker
from sluice.internal.v1 import worker_pb2
from sluice.telemetry.tracing import TRACEPARENT
from sluice.tls import AUTHORITIES, server_credentials
from sluice.wire.codec import MalformedMessage, unpack

logger = logging.getLogger(__name__)

SEND_S: Final = 10.0
"""How long a batcher may accept no response before its channel is lost, in seconds."""
WAITING_MAX: Final = 4096
"""Unsent responses of a stream above which its channel is lost."""
EMPTY_FINAL: Final = "triton_enable_empty_final_response"
FINAL: Final = "triton_final_response"
OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)

Context = grpc.aio.ServicerContext[
    service_pb2.ModelInferRequest, service_pb2.ModelStreamInferResponse
]


class StreamLost(Exception):
    """The batcher accepts no more responses of a stream."""


class StreamWriter:
    """Writes the responses of one stream in order, in a task of its own, so that senders do not wait."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._waiting: deque[service_pb2.ModelStreamInferResponse] = deque()
        self._task: asyncio.Task[None] | None = None
        self._failed = False

    def write(self, response: service_pb2.ModelStreamInferResponse) -> None:
        """Write `response` after the unsent ones.

        Raises:
            StreamLost: The batcher accepts no more responses.
        """
        if self._failed or len(self._waiting) >= WAITING_MAX:
            raise StreamLost
        if self._context.done():
            return
        self._waiting.append(response)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write_all())

    def is_done(self) -> bool:
        """Return whether the stream has ended."""
        return bool(self._context.done())

    async def finish(self) -> None:
        """Wait until all is written."""
        if self._task is not None:
            await self._task

    async def _write_all(self) -> None:
        try:
            async with asyncio.timeout(SEND_S) as limit:
                while self._waiting:
                    limit.reschedule(asyncio.get_running_loop().time() + SEND_S)
                    await self._context.write(self._waiting.popleft())
        except Exception as error:
            # gRPC raises many kinds when a stream has gone, some of them private.
            logger.debug("writing to a batcher failed: %s", type(error).__name__)
            self._failed = True
            self._waiting.clear()
        finally:
            self._task = None


class StreamSender:
    """The responses to one request on a stream; see `model_workers.channels.ResponseSender`.

    Attributes:
        ended: Done when the request has ended.
    """

    def __init__(self, writer: StreamWriter, request: service_pb2.ModelInferRequest) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writer = writer
        self._name, self._id = request.model_name, request.id
        self._says_end = request.parameters[EMPTY_FINAL].bool_param

    def send(self, report: worker_pb2.StepReport) -> None:
        """Send a report; raise `StreamLost` if the stream has ended."""
        self._writer.write(self._response(report.SerializeToString()))

    def close(self) -> None:
        """End the request."""
        if self._says_end:
            final = self._response()
            final.infer_response.parameters[FINAL].bool_param = True
            with suppress(StreamLost):
                self._writer.write(final)
        if not self.ended.done():
            self.ended.set_result(None)

    def is_cancelled(self) -> bool:
        """Return whether the stream has ended before the request."""
        return self._writer.is_done()

    def _response(self, payload: bytes | None = None) -> service_pb2.ModelStreamInferResponse:
        response = service_pb2.ModelStreamInferResponse()
        infer = response.infer_response
        infer.model_name, infer.id = self._name, self._id
        if payload is not None:
            infer.outputs.add(name=RESPONSE, datatype="UINT8", shape=[len(payload)])
            infer.raw_output_contents.append(payload)
        return response


class WorkerService(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Serves one model."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def ModelStreamInfer(
        self, requests: AsyncIterator[service_pb2.ModelInferRequest], context: Context
    ) -> None:
        """Serve a batcher's stream: its channel, or one batch."""
        traceparent = dict(context.invocation_metadata() or ()).get(TRACEPARENT, "")
        open_requests: set[asyncio.Future[None]] = set()
        writer = StreamWriter(context)
        async for request in requests:
            sender = StreamSender(writer, request)
            open_requests.add(sender.ended)
            sender.ended.add_done_callback(open_requests.discard)
            try:
                self._worker.handle(_message(request), sender, str(traceparent))
            except MalformedMessage as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except InboxFull as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        if open_requests:
            await asyncio.wait(open_requests)
        await writer.finish()


async def start_server(worker: Worker, address: str, tls: Path | None = None) -> grpc.aio.Server:
    """Start to serve `worker` on `address`.

    Args:
        worker: A worker whose `LoopRunner` runs in this event loop; other threads send no responses.
        address: Host and port.
        tls: Folder with the certificate; None: no encryption.

    Raises:
        RuntimeError: The address is not available.
    """
    server = grpc.aio.server(options=OPTIONS)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(WorkerService(worker), server)
    if tls is None:
        server.add_insecure_port(address)
    else:
        server.add_secure_port(address, server_credentials(tls, [tls / AUTHORITIES]))
    await server.start()
    return server


def _message(request: service_pb2.ModelInferRequest) -> worker_pb2.WorkerRequest:
    if len(request.raw_input_contents) != 1:
        raise MalformedMessage("a worker's request has exactly one tensor")
    return unpack(worker_pb2.WorkerRequest, request.raw_input_contents[0])
