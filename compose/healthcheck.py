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

from sluice.internal.v1.control_pb2 import BatcherReport
from sluice.tls import ClientContext, channel_credentials, open_channel
from sluice.wire import subjects
from sluice.wire.codec import MalformedMessage, unpack

TIMEOUT_S: Final = 3.5
"""A batcher reports every second, so three of its reports may be lost."""


async def check_grpc(address: str, tls: Path | None) -> None:
    """Raise an error unless the server at `address` says SERVING."""
    async with open_channel(address, channel_credentials(tls), ()) as channel:
        request = health_pb2.HealthCheckRequest()
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise ConnectionError(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def check_batcher(nats_url: str, batcher: str, tls: Path | None) -> None:
    """Raise an error unless a report of `batcher` comes that does not say that it is leaving."""
    options = {} if tls is None else {"tls": ClientContext(tls).context}
    servers = nats_url.split(",")
    client = await nats.connect(servers, allow_reconnect=False, connect_timeout=1, **options)
    try:
        subscription = await client.subscribe(subjects.report(batcher))
        report = unpack(BatcherReport, (await subscription.next_msg(TIMEOUT_S)).data)
    finally:
        await client.close()
    if report.leaving:
        raise ConnectionError(f"batcher {batcher} is leaving")


def main(arguments: Sequence[str], timeout_s: float = TIMEOUT_S) -> int:
    """Run one check."""
    folder = os.environ.get("SLUICE_TLS__MESH")
    tls = Path(folder) if folder else None
    match arguments:
        case ["grpc", address]:
            check = check_grpc(address, tls)
        case ["batcher", nats_url, batcher]:
            check = check_batcher(nats_url, batcher, tls)
        case _:
            print(__doc__)
            return 2
    try:
        asyncio.run(asyncio.wait_for(check, timeout_s))
    except (OSError, TimeoutError, nats.errors.Error, MalformedMessage, grpc.RpcError) as problem:
        print(f"{' '.join(arguments)}: {problem!r}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
