"""A gRPC server in place of Triton for remote workers: the protocol that batchers use, in front of a `Worker`.

A request on a stream stays open until the worker ends it, and its responses are sent in order. As from Triton, a
request may ask for an empty response when it has ended.
"""

import asyncio
import logging
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
OPTIONS: Final = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))

Context = grpc.aio.ServicerContext[
    service_pb2.ModelInferRequest, service_pb2.ModelStreamInferResponse
]


class StreamLost(Exception):
    """The batcher accepts no more responses of a stream."""


class ResponseStream:
    """The responses to all requests of one stream. `serve` writes them in order; any thread adds them.

    Attributes:
        has_ended: Whether the stream has ended.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Queue[service_pb2.ModelStreamInferResponse | None] = asyncio.Queue()
        """Responses; None: a request has ended."""
        self._is_lost = self.has_ended = False
        self.requests = 1
        """Requests that have not ended, and one for the batcher's side of the stream."""

    def write(self, response: service_pb2.ModelStreamInferResponse) -> None:
        """Write `response` after the unsent ones; drop it when the stream has ended.

        Raises:
            StreamLost: The batcher accepts no more responses.
        """
        if self._is_lost or self._waiting.qsize() >= WAITING_MAX:
            raise StreamLost
        if not self.has_ended:
            self._loop.call_soon_threadsafe(self._waiting.put_nowait, response)

    def end_request(self) -> None:
        """Count a request less, after what was written for it."""
        self._loop.call_soon_threadsafe(self._waiting.put_nowait, None)

    async def serve(self) -> None:
        """Write until all requests have ended, or until a write fails: then the stream is lost."""
        try:
            while self.requests:
                response = await self._waiting.get()
                if response is None:
                    self.requests -= 1
                    continue
                async with asyncio.timeout(SEND_S):
                    await self._context.write(response)
        except Exception as error:
            # gRPC raises many kinds when a stream has gone, some of them private.
            logger.debug("writing to a batcher failed: %s", type(error).__name__)
            self._is_lost = True


class StreamSender:
    """Sends the responses to one request on a stream; a `model_workers.channels.ResponseSender`."""

    def __init__(self, stream: ResponseStream, request: service_pb2.ModelInferRequest) -> None:
        self._stream = stream
        self._name, self._id = request.model_name, request.id
        self._sends_final = request.parameters[EMPTY_FINAL].bool_param
        stream.requests += 1

    def send(self, report: worker_pb2.StepReport) -> None:
        """Queue a report, as `ResponseStream.write` does."""
        payload = report.SerializeToString()
        response = self._response()
        infer = response.infer_response
        infer.outputs.add(name=RESPONSE, datatype="UINT8", shape=[len(payload)])
        infer.raw_output_contents.append(payload)
        self._stream.write(response)

    def close(self) -> None:
        """End the request."""
        if self._sends_final:
            final = self._response()
            final.infer_response.parameters[FINAL].bool_param = True
            with suppress(StreamLost):
                self._stream.write(final)
        self._stream.end_request()

    def is_cancelled(self) -> bool:
        """Return whether the stream has ended before the request."""
        return self._stream.has_ended

    def _response(self) -> service_pb2.ModelStreamInferResponse:
        infer = service_pb2.ModelInferResponse(model_name=self._name, id=self._id)
        return service_pb2.ModelStreamInferResponse(infer_response=infer)


class WorkerService(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Serves one model."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def ModelStreamInfer(
        self, requests: AsyncIterator[service_pb2.ModelInferRequest], context: Context
    ) -> None:
        """Serve a batcher's stream: its channel, with batches, cancels and demand, or one traced batch."""
        traceparent = dict(context.invocation_metadata() or ()).get(TRACEPARENT, "")
        stream = ResponseStream(context)
        writing = asyncio.create_task(stream.serve())
        try:
            async for request in requests:
                sender = StreamSender(stream, request)
                try:
                    self._worker.handle(_message(request), sender, str(traceparent))
                except MalformedMessage as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                except InboxFull as error:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            stream.end_request()
            await writing
        finally:
            stream.has_ended = True
            writing.cancel()


async def start_server(worker: Worker, address: str, tls: Path | None = None) -> grpc.aio.Server:
    """Start to serve `worker` on `address`.

    Args:
        worker: A worker that is started and stopped by the caller.
        address: Host and port.
        tls: Folder with the certificate; None: no encryption.

    Raises:
        RuntimeError: The address is not available.
        SettingsError: The certificate cannot be used.
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
