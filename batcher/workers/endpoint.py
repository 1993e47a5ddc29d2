"""The Triton client of one worker: opens streams, and passes messages over them."""

import asyncio
from typing import Final

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from batcher.core.channel import ChannelBroken
from batcher.workers.triton import (
    GRPC_OPTIONS,
    STREAM_METADATA,
    WorkerRefused,
    infer_request,
    worker_response,
)
from sluice.internal.v1 import worker_pb2
from sluice.telemetry.tracing import TRACEPARENT
from sluice.wire.codec import MalformedMessage

STREAM_END_S: Final = 1.0
"""How long an answered batch's stream may take to end by itself, so that Triton's spans are complete."""

Call = grpc.aio.StreamStreamCall[
    service_pb2.ModelInferRequest, service_pb2.ModelStreamInferResponse
]

FAULTS: Final = (
    grpc.aio.AioRpcError,
    grpc.aio.UsageError,
    asyncio.InvalidStateError,
    ChannelBroken,
    WorkerRefused,
    MalformedMessage,
)
"""What a broken connection, or a worker that does not keep to the protocol, raises."""


class Endpoint:
    """One Triton model at one address."""

    def __init__(self, url: str, triton_model: str) -> None:
        self._model = triton_model
        self._grpc = grpc.aio.insecure_channel(url, options=GRPC_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._grpc)

    def stream(self, traceparent: str = "") -> Call:
        """Opens a stream; the caller cancels it when it is done with it."""
        metadata = (
            (*STREAM_METADATA, (TRACEPARENT, traceparent)) if traceparent else STREAM_METADATA
        )
        call: Call = self._stub.ModelStreamInfer(metadata=metadata)
        return call

    async def write(self, call: Call, request: worker_pb2.WorkerRequest) -> None:
        """Sends a message; raises one of `FAULTS`."""
        await call.write(infer_request(self._model, request))

    async def close(self) -> None:
        """Ends all streams."""
        await self._grpc.close()


async def next_response(call: Call) -> worker_pb2.WorkerResponse:
    """The worker's next message on a stream; raises one of `FAULTS`."""
    while True:
        streamed = await call.read()
        if streamed is grpc.aio.EOF:
            raise ChannelBroken("the worker closed the channel")
        response = worker_response(streamed)
        if response is not None:
            return response


async def read_to_end(call: Call) -> None:
    """Lets an answered batch's stream end by itself."""
    try:
        async with asyncio.timeout(STREAM_END_S):
            while await call.read() is not grpc.aio.EOF:
                pass
    except (TimeoutError, grpc.aio.AioRpcError):
        pass  # The batch was answered; how its stream ends changes nothing.


def reason_of(error: BaseException) -> str:
    """Why a stream is over, for the log."""
    if isinstance(error, TimeoutError):
        return "not answered in time"
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
