"""What a connection without credentials costs a gateway: its memory while it is open, and processor time.

    scripts/robustness connections [--json] [--count N]

`connection_KIND_memory` (KiB) and `connection_KIND_cpu` (us): of one of N connections (400) that are open at the same
time, in the gateway's process; kernel time is counted, kernel memory is not. A gateway with API keys and NATS, nothing
else. peer: the same connection at servers of uvloop and grpc.aio that do nothing, with the same certificate: the floor
of what a connection costs on this machine. KIND is `grpc`, `http` or `https`, and

`idle`      TLS is set up, HTTP/2 too, and nothing is asked
`refused`   a request without credentials is answered with 401 or UNAUTHENTICATED
`body`      such a request with a body of 200 KB, which is sent whole

Bounds: 64 KiB; 100 us without, 600 us with TLS.
"""

import argparse
import asyncio
import resource
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import grpc
import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.support.harness import Figure, emit, machine
from sluice.settings import IdentitySettings
from sluice.startup import free_port
from supervisor.certificates import Authority
from supervisor.nats import wait_for_nats
from tests.robustness.gateway_process import BOUND_S, Target, connect, gateway
from tests.support.nats import START_S, nats_process

BODY_BYTES: Final = 200_000
WARM: Final = 64
"""Connections before those that are measured: what the process keeps for all of them is there then."""
AT_ONCE: Final = 8
KEPT: Final = 4
"""Connections that a gateway has of its own, such as to NATS."""
BARE: Final = Path(__file__).parent / "bare_server.py"
HEAD: Final = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""Of HTTP/2, with empty settings."""

Open = Callable[[AsyncExitStack, Target], Awaitable[None]]
"""Opens a connection that stays open as long as the stack."""


@dataclass(frozen=True)
class Cost:
    """Of one connection: KiB, and microseconds of processor time."""

    memory: float
    cpu: float


async def _http(sent: bytes, stack: AsyncExitStack, target: Target) -> None:
    context = None
    if target.authority is not None:
        context = ssl.create_default_context(cafile=target.authority.ca)
    reader, writer = await connect(target.http, ssl=context)
    stack.callback(_abort, reader, writer)
    if not sent:
        return
    writer.write(sent)
    with suppress(ConnectionError):
        await writer.drain()
    await reader.readuntil(b"\r\n\r\n")


def _abort(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Cut a connection. asyncio does so itself when nothing refers to the reader any more."""
    writer.transport.abort()


async def _grpc_idle(stack: AsyncExitStack, target: Target) -> None:
    reader, writer = await connect(target.grpc)
    stack.callback(_abort, reader, writer)
    writer.write(PREFACE)
    await reader.readexactly(9)  # the head of the server's settings


async def _grpc_refused(stack: AsyncExitStack, target: Target) -> None:
    channel = await stack.enter_async_context(target.channel())
    call = channel.unary_unary("/sluice.v1.InferenceService/ListModels")(b"")
    with suppress(grpc.aio.AioRpcError):
        await call


_HTTP: Final[Mapping[str, Open]] = {
    "idle": partial(_http, b""),
    "refused": partial(_http, HEAD % 0),
    "body": partial(_http, HEAD % BODY_BYTES + bytes(BODY_BYTES)),
}
PLAIN: Final[Mapping[str, Open]] = {
    "grpc_idle": _grpc_idle,
    "grpc_refused": _grpc_refused,
    **{f"http_{name}": opened for name, opened in _HTTP.items()},
}
ENCRYPTED: Final[Mapping[str, Open]] = {f"https_{name}": opened for name, opened in _HTTP.items()}


async def cost(target: Target, opened: Open, count: int) -> Cost:
    """Open ``count`` connections, and return what one costs."""
    await _open(target, opened, WARM)
    return await _open(target, opened, count)


async def _open(target: Target, opened: Open, count: int) -> Cost:
    process, places = target.process, asyncio.Semaphore(AT_ONCE)
    memory, used_us = target.memory, _used_us(process)
    async with AsyncExitStack() as stack:

        async def one() -> None:
            async with places:
                await opened(stack, target)

        await asyncio.gather(*(one() for _ in range(count)))
        await _until(lambda: _open_connections(process) >= count)  # those that ask nothing
        result = Cost(
            (target.memory - memory) / count / 1024, (_used_us(process) - used_us) / count
        )
    await _until(lambda: _open_connections(process) <= KEPT)
    return result


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def _open_connections(process: psutil.Process) -> int:
    connections = process.net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED for one in connections)


def _used_us(process: psutil.Process) -> float:
    times = process.cpu_times()
    return 1e6 * (times.user + times.system)


@contextmanager
def bare(authority: Authority | None) -> Iterator[Target]:
    """Run the server that is compared with."""
    ports = free_port(), free_port()
    command = [sys.executable, str(BARE), *map(str, ports)]
    if authority is not None:
        command.append(str(authority.of("gateway")))
    with subprocess.Popen(command) as process:
        try:
            http, calls = (f"127.0.0.1:{port}" for port in ports)
            yield Target(psutil.Process(process.pid), calls, http, authority)
        finally:
            process.kill()


async def _measure(
    target: Target, floor: Target, kinds: Mapping[str, Open], count: int
) -> list[Figure]:
    figures = []
    for kind, opened in kinds.items():
        ours = await cost(target, opened, count)
        peer = await cost(floor, opened, count)
        for name, unit in (("memory", "KiB"), ("cpu", "us")):
            mine, floor_of = getattr(ours, name), getattr(peer, name)
            note = f"{count} connections at a time; peer: servers that do nothing"
            figures.append(
                Figure(f"connection_{kind}_{name}", mine, floor_of, None, unit, 1, machine(), note)
            )
    return figures


def main(count: int) -> list[Figure]:
    """Measure every kind of connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    figures, identity = [], IdentitySettings(api_keys=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        authority = Authority(root / "tls")
        authority.ensure(["gateway"])
        with nats_process(root, free_port()) as url:
            asyncio.run(wait_for_nats(url, START_S))
            for own, kinds in ((None, PLAIN), (authority, ENCRYPTED)):
                with bare(own) as floor, gateway(root, url, own, identity, 8 * count) as target:
                    figures += uvloop.run(_measure(target, floor, kinds, count))
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--count", type=int, default=400, help="connections at a time")
    options = parser.parse_args()
    emit(main(options.count), options.json)
