"""Packs worker messages into Triton's inference protocol, and unpacks them."""

from typing import Final

from tritonclient.grpc import service_pb2

from sluice.internal.v1 import worker_pb2
from sluice.wire.codec import MalformedMessage, pack, unpack

REQUEST_BYTES_MAX: Final = 256 * 1024 * 1024
"""A batch of long prompts may be large; it never crosses NATS."""

GRPC_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # The loops here do the backing off; gRPC's own would grow to minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

STREAM_METADATA: Final = (("triton_grpc_error", "true"),)
"""Makes Triton end a stream with a real status code when a request on it fails."""


class WorkerRefused(Exception):
    """Triton answered a request with an error; the message is Triton's."""


def infer_request(model: str, request: worker_pb2.WorkerRequest) -> "service_pb2.ModelInferRequest":
    """``request`` for the Triton model ``model``."""
    payload = pack(request, REQUEST_BYTES_MAX)
    infer = service_pb2.ModelInferRequest(model_name=model)
    infer.inputs.add(name="request", datatype="UINT8", shape=[len(payload)])
    infer.raw_input_contents.append(payload)
    # So that the end of a request is seen even when its last response had gone before.
    infer.parameters["triton_enable_empty_final_response"].bool_param = True
    return infer


def worker_response(
    streamed: "service_pb2.ModelStreamInferResponse",
) -> worker_pb2.WorkerResponse | None:
    """What the worker said; None for Triton's own note that a request is complete.

    Raises:
        WorkerRefused: Triton reports an error.
        MalformedMessage: it is not a `WorkerResponse`.
    """
    if streamed.error_message:
        raise WorkerRefused(streamed.error_message)
    infer = streamed.infer_response
    if not infer.raw_output_contents:
        return None
    if len(infer.raw_output_contents) != 1:
        raise MalformedMessage("a worker's response has exactly one tensor")
    return unpack(worker_pb2.WorkerResponse, infer.raw_output_contents[0])
