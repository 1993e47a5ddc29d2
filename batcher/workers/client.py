"""Triton client of one worker: streams that carry worker messages in Triton's inference protocol."""

import asyncio
from typing import Final

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from batcher.core.workers import ChannelBroken
from sluice.internal.v1 import worker_pb2
from sluice.telemetry.tracing import TRACEPARENT
from sluice.tls import open_channel
from sluice.wire.codec import MalformedMessage, pack, unpack

RENEWAL_BYTES: Final = 1024 * 1024
"""Bytes of responses that a request may accumulate in Triton before it is replaced."""
RESPONSE_BYTES: Final = 1100
"""Bytes that Triton keeps per response, beside its report."""
STREAM_END_S: Final = 1.0
"""How long the stream of a queued batch may take to end by itself, in seconds, so that Triton's
spans are complete."""
REQUEST_BYTES_MAX: Final = 256 * 1024 * 1024
"""Largest message to a worker, in bytes; a batch of long prompts never crosses NATS and may be
large."""
NOT_LISTENING: Final = "Connection refused"
"""Part of gRPC's message about an address where nothing listens."""

GRPC_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # The loops here back off; gRPC's own pauses would grow to minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
)
"""Channel options; callers back off themselves, while gRPC's own pauses would grow to minutes."""

STREAM_METADATA: Final = (("triton_grpc_error", "true"),)
"""Makes Triton end a stream with a real status code when a request on it fails."""

Call = grpc.aio.StreamStreamCall[
    service_pb2.ModelInferRequest, service_pb2.ModelStreamInferResponse
]


class WorkerRefused(Exception):
    """Raised if Triton or the worker did not accept a request; the message is theirs."""


FAULTS: Final = (
    grpc.aio.AioRpcError,
    grpc.aio.UsageError,
    asyncio.InvalidStateError,
    ChannelBroken,
    WorkerRefused,
    MalformedMessage,
)
"""Errors of a broken connection, or of a worker that violates the protocol."""


class WorkerClient:
    """Client of one Triton model at one address."""

    def __init__(
        self, url: str, triton_model: str, credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        self._model = triton_model
        self._grpc = open_channel(url, credentials, GRPC_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._grpc)

    def stream(self, traceparent: str = "") -> Call:
        """Open a stream; the caller cancels it after use."""
        metadata = (
            (*STREAM_METADATA, (TRACEPARENT, traceparent)) if traceparent else STREAM_METADATA
        )
        call: Call = self._stub.ModelStreamInfer(metadata=metadata)
        return call

    async def write(
        self, call: Call, request: worker_pb2.WorkerRequest, *, ends: bool = False
    ) -> None:
        """Send a message; with `ends` Triton reports when the request is complete.

        Raises one of `FAULTS`, or OversizedMessage above `REQUEST_BYTES_MAX`.
        """
        await call.write(infer_request(self._model, request, ends=ends))

    async def close(self) -> None:
        """End all streams."""
        await self._grpc.close()


class Reports:
    """Reports of a channel in order, while its request is replaced now and then.

    Triton 2.51 keeps each response of a request until the request is complete
    (docs/internals/notes-triton.md). The first responses of the new request may overtake the last
    ones of the old.

    Attributes:
        is_renewing: whether the old request is not complete yet.
    """

    def __init__(self, call: Call, renewal_bytes: int = RENEWAL_BYTES) -> None:
        self._renewal_bytes = renewal_bytes
        self.is_renewing = False
        self._call = call
        self._next = self._held_bytes = 0
        self._early: dict[int, worker_pb2.StepReport] = {}

    @property
    def wants_renewal(self) -> bool:
        """Whether Triton keeps so many response bytes of the request that it should be replaced."""
        return self._held_bytes > self._renewal_bytes and not self.is_renewing

    async def next(self) -> worker_pb2.StepReport:
        """Return the next report; raises one of `FAULTS`."""
        while self._next not in self._early:
            report = await next_report(self._call)
            if report is not None and self.is_renewing:
                self._early[report.sequence] = report
            elif report is not None:
                self._next = report.sequence + 1
                self._held_bytes += RESPONSE_BYTES + report.ByteSize()
                return report
            elif self.is_renewing and not self._early:
                self.is_renewing, self._held_bytes = False, 0
            else:
                raise ChannelBroken("the worker closed the channel")
        self._next += 1
        return self._early.pop(self._next - 1)


async def read_to_end(call: Call) -> None:
    """Let the stream of a queued batch end by itself."""
    try:
        async with asyncio.timeout(STREAM_END_S):
            while await call.read() is not grpc.aio.EOF:
                pass
    except (TimeoutError, grpc.aio.AioRpcError):
        pass  # The batch was queued; how its stream ends does not matter.


def reason_of(error: BaseException) -> str:
    """Return why a stream ended, for the log.

    A server that does not listen yet is expected at start: gRPC's long text would look like a fault.
    """
    if isinstance(error, TimeoutError):
        return "no response in time"
    if isinstance(error, grpc.aio.AioRpcError):
        details = error.details() or ""
        if NOT_LISTENING in details:
            return NOT_LISTENING.lower()
        return f"{error.code().name}: {details}"
    return str(error) or type(error).__name__


def infer_request(
    model: str, request: worker_pb2.WorkerRequest, *, ends: bool
) -> service_pb2.ModelInferRequest:
    """Return the Triton request that carries a message to a model; raises OversizedMessage."""
    payload = pack(request, REQUEST_BYTES_MAX)
    infer = service_pb2.ModelInferRequest(model_name=model)
    infer.inputs.add(name="request", datatype="UINT8", shape=[len(payload)])
    infer.raw_input_contents.append(payload)
    if ends:
        infer.parameters["triton_enable_empty_final_response"].bool_param = True
    return infer


async def next_report(call: Call) -> worker_pb2.StepReport | None:
    """Return the worker's next report, or None if a request on the stream is complete. Raises one of `FAULTS`."""
    streamed = await call.read()
    if streamed is grpc.aio.EOF:
        raise ChannelBroken("the worker closed the stream")
    return step_report(streamed)


def step_report(streamed: service_pb2.ModelStreamInferResponse) -> worker_pb2.StepReport | None:
    """Return the worker's report, or None for Triton's own response that a request is complete.

    Raises:
        WorkerRefused: Triton reports an error, or the worker did not accept the request.
        MalformedMessage: it is not a `StepReport`.
    """
    if streamed.error_message:
        raise WorkerRefused(streamed.error_message)
    infer = streamed.infer_response
    if not infer.raw_output_contents:
        return None
    if len(infer.raw_output_contents) != 1:
        raise MalformedMessage("a worker's response has exactly one tensor")
    report = unpack(worker_pb2.StepReport, infer.raw_output_contents[0])
    if report.refused:
        raise WorkerRefused(report.refused)
    return report
