"""Whether a process of the mesh is well; exit code 0 when it is, else one line that says why not.

healthcheck.py grpc HOST:PORT          grpc.health.v1 says SERVING: gateway, Triton
healthcheck.py batcher NATS_URL ID     the batcher's report arrives over NATS

With SLUICE_TLS__MESH both show the certificate of that folder.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import grpc
import nats
import nats.errors
from grpc_health.v1 import health_pb2, health_pb2_grpc
from nats.aio.subscription import Subscription

from sluice.internal.v1.control_pb2 import BatcherReport
from sluice.tls import ClientContext, channel_credentials, open_channel
from sluice.wire import subjects
from sluice.wire.codec import MalformedMessage, unpack

TIMEOUT_S: Final = 3.5
"""A batcher reports every second, so three of its reports may be lost."""


class NotWellError(Exception):
    """The process is not well; the message says why."""


def certificate() -> Path | None:
    """Folder of the certificate of this process."""
    folder = os.environ.get("SLUICE_TLS__MESH")
    return Path(folder) if folder else None


async def check_grpc(address: str) -> None:
    """Wait until the server at `address` says SERVING.

    Raises:
        NotWellError: it says something else, or nothing.
    """
    async with open_channel(address, channel_credentials(certificate()), ()) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise NotWellError(f"{address}: {error.code().name}: {error.details()}") from error
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise NotWellError(f"{address}: {name}")


async def check_batcher(nats_url: str, batcher: str, timeout_s: float = TIMEOUT_S) -> None:
    """Wait for a report of `batcher`.

    Raises:
        NotWellError: none came in time, or it says that the batcher is leaving.
    """
    try:
        async with asyncio.timeout(timeout_s):
            servers = nats_url.split(",")
            folder = certificate()
            tls = {} if folder is None else {"tls": ClientContext(folder).context}
            client = await nats.connect(servers, allow_reconnect=False, connect_timeout=1, **tls)
            try:
                await _await_report(await client.subscribe(subjects.report(batcher)), batcher)
            finally:
                await client.close()
    except (OSError, TimeoutError, nats.errors.Error, MalformedMessage) as error:
        raise NotWellError(f"no report of batcher {batcher} over {nats_url}: {error!r}") from error


async def _await_report(subscription: Subscription, batcher: str) -> None:
    async for message in subscription.messages:
        report = unpack(BatcherReport, message.data)
        if report.batcher == batcher and report.leaving:
            raise NotWellError(f"batcher {batcher} is leaving")
        if report.batcher == batcher:
            return


def main(arguments: Sequence[str]) -> int:
    """Run one check."""
    match arguments:
        case ["grpc", address]:
            check = check_grpc(address)
        case ["batcher", nats_url, batcher]:
            check = check_batcher(nats_url, batcher)
        case _:
            print(__doc__)
            return 2
    try:
        asyncio.run(check)
    except NotWellError as problem:
        print(problem)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
