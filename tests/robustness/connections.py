"""What a connection without credentials costs a gateway: its memory while it is open, and processor time.

    scripts/robustness connections [--json] [--count N]

`connection_KIND_memory` (KiB) and `connection_KIND_cpu` (us): of one of N connections (400) that are open at the same
time, in the gateway's process; kernel time is counted, kernel memory is not. A gateway with API keys and NATS, nothing
else. KIND is `grpc`, `http` or `https`, and

`idle`      TLS is set up, HTTP/2 too, and nothing is asked
`refused`   a request without credentials is answered with 401 or UNAUTHENTICATED
`body`      such a request with a body of 200 KB, which is sent whole

Bounds: 64 KiB; 100 us without, 600 us with TLS.
"""

import argparse
import asyncio
import resource
import ssl
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import grpc
import psutil
import uvloop

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


async def _measure(target: Target, kinds: Mapping[str, Open], count: int) -> list[Figure]:
    figures = []
    for kind, opened in kinds.items():
        ours = await cost(target, opened, count)
        note = f"{count} connections at a time"
        for name, value, unit in (("memory", ours.memory, "KiB"), ("cpu", ours.cpu, "us")):
            figure = f"connection_{kind}_{name}"
            figures.append(Figure(figure, value, None, None, unit, 1, machine(), note))
    return figures


def measure(count: int) -> list[Figure]:
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
                with gateway(root, url, own, identity, 8 * count) as target:
                    figures += uvloop.run(_measure(target, kinds, count))
    return figures


async def main(options: argparse.Namespace) -> None:
    """Print what a connection of each kind costs."""
    emit(await asyncio.to_thread(measure, options.count), options.json)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--count", type=int, default=400, help="connections at a time")
