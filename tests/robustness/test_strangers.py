"""What callers without credentials cost a gateway, and that they keep nobody out.

Bytes that one connection sends and times that it takes are tested in tests/gateway/http/test_connection.py and
tests/sluice/test_grpc_server.py; here a whole process is attacked, with its memory as the measure.
"""

import asyncio
import os
import resource
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from sluice.settings import TlsSettings
from sluice.startup import free_port
from supervisor.certificates import Authority
from tests.gateway.kit.tokenizer import write_model
from tests.gateway.kit.wire import settings_for

ROOT: Final = Path(__file__).parents[2]
BOUND_S: Final = 60.0
MIB: Final = 1024 * 1024
GROWTH_MAX: Final = 48 * MIB
"""Memory that an attack of one connection may take: buffers of a few reads, and what the allocator keeps."""
SENT_MAX: Final = 64 * MIB
"""An attack gives up then: it was not cut."""
FILES: Final = 1024
"""Files of a gateway: it serves 256 connections of gRPC, and of HTTP."""


@dataclass
class Target:
    """A gateway process, and a caller of it who behaves."""

    process: psutil.Process
    grpc: str
    http: str
    authority: Authority | None = None

    @property
    def memory(self) -> int:
        return int(self.process.memory_info().rss)

    @contextmanager
    def grows_little(self) -> Iterator[None]:
        before = self.memory
        yield
        assert self.memory - before < GROWTH_MAX

    @asynccontextmanager
    async def channel(self, **options: Any) -> AsyncIterator[grpc.aio.Channel]:
        """A connection of its own."""
        own = [("grpc.use_local_subchannel_pool", 1)]
        if self.authority is None:
            channel = grpc.aio.insecure_channel(self.grpc, own, **options)
        else:
            credentials = grpc.ssl_channel_credentials(self.authority.ca.read_bytes())
            channel = grpc.aio.secure_channel(self.grpc, credentials, own, **options)
        async with channel:
            yield channel

    async def check(self) -> None:
        """Raise AioRpcError if the gateway answers no new caller over gRPC."""
        async with self.channel() as channel:
            request = HealthCheckRequest(service="sluice.v1.InferenceService")
            await HealthStub(channel).Check(request, wait_for_ready=True, timeout=BOUND_S)

    async def ask(self) -> bytes:
        """Return the head of an answer over HTTP. A gateway without a batcher says 503 itself."""
        context = None
        if self.authority is not None:
            context = ssl.create_default_context(cafile=self.authority.ca)
        reader, writer = await asyncio.wait_for(connect(self.http, ssl=context), BOUND_S)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), BOUND_S)
        writer.transport.abort()
        return head


async def connect(
    address: str, **options: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port), **options)


@contextmanager
def gateway(folder: Path, url: str, authority: Authority | None = None) -> Iterator[Target]:
    grpc_address, http_address = (f"127.0.0.1:{free_port()}" for _ in range(2))
    model = write_model(folder / "model")
    settings = settings_for(model, url, address=grpc_address, http=http_address)
    if authority is not None:
        tls = TlsSettings(callers=authority.of("gateway"))
        settings = settings.model_copy(update={"tls": tls})
    path = folder / "sluice.yaml"
    path.write_text(settings.to_yaml(), encoding="utf-8")
    command = [sys.executable, "-m", "gateway", "--config", str(path)]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ, stderr=subprocess.DEVNULL) as process:
        try:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
            target = Target(psutil.Process(process.pid), grpc_address, http_address, authority)
            asyncio.run(target.check())
            yield target
        finally:
            process.kill()


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


@pytest.mark.long
@pytest.mark.parametrize("kind", ["target", "encrypted"])
async def test_silent_grpc_connections_end(kind: str, request: pytest.FixtureRequest) -> None:
    """As many as are served: a new caller waits for the end of their handshakes at most."""
    target: Target = request.getfixturevalue(kind)
    silent = await asyncio.to_thread(silent_connections, target.grpc, FILES // 4)
    try:
        await target.check()
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
