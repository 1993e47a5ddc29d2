"""What gateways and other servers of the mesh say of themselves, by gRPC health and by answering at all."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.errors import SetupError
from sluice.tls import channel_credentials, open_channel
from supervisor.triton import CHANNEL_OPTIONS, wait_for_triton

_SERVING: Final = "SERVING"
_RETRY_S: Final = 0.1
_ANSWER_S: Final = 2.0
REMOTE_S: Final = 10.0
"""How long a start waits for a model of another server, which may be down, in seconds."""


async def wait_until_serving(
    address: str, models: Sequence[str], bound_s: float, tls: Path | None = None
) -> None:
    """Return when the gateway at `address` says SERVING for each of `models`.

    Raises:
        SetupError: not within `bound_s` seconds; the message has the last status.
    """
    model, status = "", "no answer"
    try:
        async with (
            asyncio.timeout(bound_s),
            open_channel(address, channel_credentials(tls), CHANNEL_OPTIONS) as channel,
        ):
            for model in models:
                while (status := await _health_of(channel, f"model.{model}")) != _SERVING:  # noqa: ASYNC110
                    await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        raise SetupError(
            f"the gateway at {address} was not ready after {bound_s:.0f} s (health of model {model}: {status}); "
            "see the logs of batcher and triton, or raise triton.start_s"
        ) from None


async def wait_until_reachable(
    name: str, address: str, bound_s: float, tls: Path | None = None
) -> None:
    """Wait until a gRPC server answers at `address`.

    Raises:
        SetupError: not within `bound_s` seconds.
    """
    try:
        await wait_for_triton(address, bound_s, tls)
    except TimeoutError:
        raise SetupError(
            f"{name} did not answer at {address} after {bound_s:.0f} s; see its log, or raise triton.start_s"
        ) from None


async def _health_of(channel: grpc.aio.Channel, service: str) -> str:
    """Return the health of `service`, or the code of a call that failed."""
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=_ANSWER_S)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def denies(address: str, service: str, tls: Path | None = None) -> bool:
    """Return whether the gateway at `address` answers, and says that it does not serve or know `service`."""
    async with open_channel(address, channel_credentials(tls), CHANNEL_OPTIONS) as channel:
        return await _health_of(channel, service) in ("NOT_SERVING", "SERVICE_UNKNOWN", "NOT_FOUND")
