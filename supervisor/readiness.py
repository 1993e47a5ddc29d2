"""Whether servers answer, asked with bounds."""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.errors import SetupError
from sluice.startup import LOOPBACK

SERVICE: Final = "sluice.v1.InferenceService"
"""SERVING when the gateway has NATS and a live worker for every model."""

_SERVING: Final = "SERVING"
_RETRY_S: Final = 0.1
_ONE_CALL_S: Final = 2.0
_OPTIONS: Final = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.use_local_subchannel_pool", 1),
)


def channel(address: str) -> grpc.aio.Channel:
    """A channel of its own that looks for a starting server often."""
    return grpc.aio.insecure_channel(reachable(address), options=_OPTIONS)


def reachable(address: str) -> str:
    """Where to call a server that listens on ``address``: "every address" is none to call."""
    host, _, port = address.rpartition(":")
    return f"{LOOPBACK}:{port}" if host in ("0.0.0.0", "[::]") else address


async def wait_until_serving(address: str, bound_s: float) -> None:
    """Returns when the gateway at ``address`` says SERVING.

    Raises:
        SetupError: not within ``bound_s`` seconds; the message says what it said last.
    """
    said = "no answer"
    try:
        async with asyncio.timeout(bound_s), channel(address) as open_channel:
            async for said in _health_changes(open_channel):
                if said == _SERVING:
                    return
    except TimeoutError:
        raise SetupError(
            f"the gateway at {address} was not ready after {bound_s:.0f} s (health: {said}); "
            "see the logs of batcher and triton, or raise triton.start_s"
        ) from None


async def _health_changes(open_channel: grpc.aio.Channel) -> AsyncIterator[str]:
    """What the gateway says of itself, at every change; it may go away and come back."""
    stub = health_pb2_grpc.HealthStub(open_channel)
    while True:
        call = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), wait_for_ready=True)
        try:
            async for response in call:
                yield _status_name(response)
        except grpc.aio.AioRpcError as error:
            yield str(error.code().name)
        finally:
            call.cancel()
        await asyncio.sleep(_RETRY_S)


async def health(open_channel: grpc.aio.Channel) -> str:
    """What the gateway says of itself: SERVING, NOT_SERVING, or the code of the failed call."""
    stub = health_pb2_grpc.HealthStub(open_channel)
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    try:
        response = await stub.Check(request, timeout=_ONE_CALL_S)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return _status_name(response)


def _status_name(response: health_pb2.HealthCheckResponse) -> str:
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
