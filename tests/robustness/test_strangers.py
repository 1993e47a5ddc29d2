"""What callers without credentials cost a gateway, and that they keep nobody out.

Bytes that one connection sends and times that it takes are tested in tests/gateway/http/test_connection.py and
tests/sluice/test_grpc_server.py; here a whole process is attacked, with its memory as the measure.
"""

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any, Final

import grpc
import pytest

from supervisor.certificates import Authority
from tests.robustness.gateway_process import BOUND_S, FILES, MIB, Target, connect, gateway

SENT_MAX: Final = 64 * MIB
"""An attack gives up then: it was not cut."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, nats_server: str) -> Iterator[Target]:
    with gateway(tmp_path_factory.mktemp("open"), nats_server) as opened:
        yield opened


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory, nats_server: str) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("encrypted")
    authority = Authority(folder / "tls")
    authority.ensure(["gateway"])
    with gateway(folder, nats_server, authority) as opened:
        yield opened


async def test_gzip_bomb_is_not_expanded(target: Target) -> None:
    with target.grows_little():
        async with target.channel(compression=grpc.Compression.Gzip) as channel:
            call = channel.unary_unary("/grpc.health.v1.Health/Check")(bytes(4 * SENT_MAX))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await target.check()


PIECES: Final = {
    "trailers": b"x: y\r\n" * 10_000,
    "one trailer": b"x" * 65_536,
    "pipelined": b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000,
    "chunk extension": b"x" * 65_536,
    "pipelined with bodies": b"POST /health HTTP/1.1\r\ncontent-length: 1\r\n\r\nx" * 1000,
}
CHUNKED: Final = b"POST /health HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
BEFORE: Final = {
    "trailers": CHUNKED + b"0\r\n",
    "one trailer": CHUNKED + b"0\r\nx: ",
    "chunk extension": CHUNKED + b"1;x=",
}


@pytest.mark.parametrize("attack", list(PIECES))
async def test_http_without_end_is_cut(target: Target, attack: str) -> None:
    piece, sent = PIECES[attack], 0
    with target.grows_little():
        reader, writer = await connect(target.http)
        reading = asyncio.create_task(drain(reader))
        writer.write(BEFORE.get(attack, b""))
        with suppress(ConnectionError):
            while sent < SENT_MAX:
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
        writer.transport.abort()
        await reading
        assert sent < SENT_MAX
        assert b"retry-after" not in await target.ask()


async def drain(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        while await reader.read(65_536):
            pass


async def test_silent_health_checks_keep_no_address_out(target: Target) -> None:
    async with AsyncExitStack() as opened:
        channel = await opened.enter_async_context(target.channel())
        silent: Any = channel.stream_stream("/grpc.health.v1.Health/Check")
        calls = [silent(timeout=BOUND_S) for _ in range(900)]
        for _ in range(8):
            await target.check()
        for call in calls:
            call.cancel()


def silent_connections(address: str, count: int) -> list[socket.socket]:
    """Connections that never say a word; fewer if the kernel refuses more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(count + 1024, hard)), hard))
    host, _, port = address.rpartition(":")
    opened = []
    for _ in range(count):
        one = socket.socket()
        one.setblocking(False)
        with suppress(BlockingIOError):
            one.connect((host, int(port)))
        opened.append(one)
    return opened


@pytest.mark.long
async def test_connections_that_never_begin_tls_keep_nobody_out(encrypted: Target) -> None:
    """Eight times as many as the gateway has files; the kernel's queue holds no more at a time."""
    silent = await asyncio.to_thread(silent_connections, encrypted.http, 8 * FILES)
    try:
        for _ in range(3):
            assert b"retry-after" not in await encrypted.ask()
            await encrypted.check()
        assert encrypted.process.num_fds() < FILES
    finally:
        for one in silent:
            one.close()


@pytest.fixture(params=["target", "encrypted"])
def each(request: pytest.FixtureRequest) -> Target:
    """Return one target after the other; they start outside of the event loop of a test."""
    one: Target = request.getfixturevalue(request.param)
    return one


@pytest.mark.long
async def test_silent_grpc_connections_end(each: Target) -> None:
    """As many as are served: a new caller waits for the end of their handshakes at most."""
    silent = await asyncio.to_thread(silent_connections, each.grpc, FILES // 4)
    try:
        await each.check()
    finally:
        for one in silent:
            one.close()


@pytest.mark.long
async def test_bodies_behind_their_answer_end(target: Target) -> None:
    """As many as are served, a byte each second."""

    async def drip() -> None:
        reader, writer = await connect(target.http)
        writer.write(b"POST /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n")
        with suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"x")
                await writer.drain()
                with suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        while await reader.read(65_536):
                            pass
        writer.transport.abort()

    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*(drip() for _ in range(FILES // 4)))
    assert b"retry-after" not in await target.ask()
