"""A gateway process that is attacked, without the rest of its mesh."""

import asyncio
import os
import resource
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
from grpc import aio
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from sluice.settings import IdentitySettings, TlsSettings
from sluice.startup import free_port
from supervisor.certificates import Authority
from tests.gateway.kit.tokenizer import write_model
from tests.gateway.kit.wire import settings_for

ROOT: Final = Path(__file__).parents[2]
BOUND_S: Final = 60.0
FILES: Final = 1024
"""Files of a gateway: it serves 256 connections of gRPC, and of HTTP."""
MIB: Final = 1024 * 1024
GROWTH_MAX: Final = 48 * MIB
"""Memory that an attack of one connection may take: buffers of a few reads, and what the allocator keeps."""


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
    async def channel(self, **options: Any) -> AsyncIterator[aio.Channel]:
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
def gateway(
    folder: Path,
    url: str,
    authority: Authority | None = None,
    identity: IdentitySettings | None = None,
    files: int = FILES,
) -> Iterator[Target]:
    """Run a gateway with NATS at ``url``, which may open ``files`` files."""
    grpc_address, http_address = (f"127.0.0.1:{free_port()}" for _ in range(2))
    model = write_model(folder / "model")
    settings = settings_for(model, url, address=grpc_address, http=http_address, identity=identity)
    if authority is not None:
        tls = TlsSettings(callers=authority.of("gateway"))
        settings = settings.model_copy(update={"tls": tls})
    path = folder / "sluice.yaml"
    path.write_text(settings.to_yaml(), encoding="utf-8")
    command = [sys.executable, "-m", "gateway", "--config", str(path)]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ, stderr=subprocess.DEVNULL) as process:
        try:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (files, files))
            target = Target(psutil.Process(process.pid), grpc_address, http_address, authority)
            asyncio.run(target.check())
            yield target
        finally:
            process.kill()
