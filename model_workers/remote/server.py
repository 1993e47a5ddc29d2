"""The part of Triton's inference protocol that batchers speak, before a `Worker`: so it is a worker like any other.

A request on a stream stays open until the worker ends it, and its responses go out in order. A request that asks for it
gets an empty response when it has ended, as from Triton.
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

log = logging.getLogger(__name__)

SEND_S: Final = 10.0
"""A batcher that takes no response for this long has lost its channel, seconds."""
EMPTY_FINAL: Final = "triton_enable_empty_final_response"
FINAL: Final = "triton_final_response"
OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)

Context = grpc.aio.ServicerContext[
    service_pb2.ModelInferRequest, service_pb2.ModelStreamInferResponse
]


class StreamSender:
    """The responses to one request on a stream; see `model_workers.sender.ResponseSender`.

    Attributes:
        ended: done when the request has ended.
    """

    def __init__(self, context: Context, request: service_pb2.ModelInferRequest) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._context = context
        self._request = request

    def send(self, report: worker_pb2.StepReport) -> None:
        """Blocks until gRPC has taken it; from another thread than the loop's."""
        self._write(_response(self._request, report.SerializeToString()))

    def close(self) -> None:
        """Ends the request."""
        if self._request.parameters[EMPTY_FINAL].bool_param:
            final = _response(self._request)
            final.infer_response.parameters[FINAL].bool_param = True
            with suppress(
                Exception
            ):  # grpc raises many kinds when the stream has gone, which changes nothing here
                self._write(final)
        self._loop.call_soon_threadsafe(self._end)

    def is_cancelled(self) -> bool:
        """Whether the stream has ended before the request."""
        return bool(self._context.done())

    def _write(self, response: service_pb2.ModelStreamInferResponse) -> None:
        if not self._context.done():
            written = asyncio.run_coroutine_threadsafe(self._context.write(response), self._loop)
            written.result(SEND_S)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class InferenceService(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Serves one model."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def ModelStreamInfer(
        self, requests: AsyncIterator[service_pb2.ModelInferRequest], context: Context
    ) -> None:
        """A batcher's stream: its channel, or one batch."""
        traceparent = dict(context.invocation_metadata() or ()).get(TRACEPARENT, "")
        open_requests: set[asyncio.Future[None]] = set()
        async for request in requests:
            sender = StreamSender(context, request)
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


async def start_server(worker: Worker, address: str, tls: Path | None = None) -> grpc.aio.Server:
    """A server on ``address``, encrypted with the certificate in ``tls``; RuntimeError when it cannot listen there."""
    server = grpc.aio.server(options=OPTIONS)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(InferenceService(worker), server)
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


def _response(
    request: service_pb2.ModelInferRequest, payload: bytes | None = None
) -> service_pb2.ModelStreamInferResponse:
    response = service_pb2.ModelStreamInferResponse()
    infer = response.infer_response
    infer.model_name, infer.id = request.model_name, request.id
    if payload is not None:
        infer.outputs.add(name=RESPONSE, datatype="UINT8", shape=[len(payload)])
        infer.raw_output_contents.append(payload)
    return response
