"""What the gRPC servers of gateway and jobs share: no decompression, short handshakes, health."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice import grpc_server
from sluice.grpc_server import NOT_SERVING, SERVING, HealthService, server_options

BOUND_S = 60.0


@asynccontextmanager
async def served(health: HealthService) -> AsyncIterator[str]:
    server = grpc.aio.server(options=server_options())
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_call_is_unimplemented(algorithm: grpc.Compression) -> None:
    async with (
        served(HealthService()) as address,
        grpc.aio.insecure_channel(address, compression=algorithm) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="x" * 4096)
        with pytest.raises(grpc.aio.AioRpcError, match="is disabled") as refused:
            await stub.Check(request, timeout=BOUND_S)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_compressed_message_is_not_expanded() -> None:
    """Should a compressed call get past the first option, its message stays as small as it came."""
    lengths: list[int] = []

    async def behave(_: Any, context: Any) -> None:
        lengths.append(len(await context.read()))

    class Handlers(grpc.GenericRpcHandler):
        def service(self, _: grpc.HandlerCallDetails) -> Any:
            return grpc.stream_stream_rpc_method_handler(behave)

    allowed = [option for option in server_options() if "algorithms_bitset" not in option[0]]
    server = grpc.aio.server(options=allowed)
    server.add_generic_rpc_handlers((Handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", compression=grpc.Compression.Gzip
    ) as channel:
        call: Any = channel.stream_stream("/any/call")(timeout=BOUND_S)
        await call.write(bytes(1 << 20))
        assert await call.read() is grpc.aio.EOF
    await server.stop(None)
    assert lengths[0] < 4096


async def test_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (grpc_server.HANDSHAKE_S, grpc_server.HEALTH_S) == (5.0, 2.0)
    monkeypatch.setattr(grpc_server, "HANDSHAKE_S", 0.1)
    async with served(HealthService()) as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(BOUND_S):
            while await reader.read(1024):
                pass
        writer.close()


async def test_watcher_that_leaves_takes_no_other_along() -> None:
    health = HealthService()
    async with served(health) as address, grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        stays, leaves = stub.Watch(request), stub.Watch(request)
        for watcher in (stays, leaves):
            assert (await asyncio.wait_for(watcher.read(), BOUND_S)).status == SERVING
        leaves.cancel()
        await stub.Check(request)  # the server has handled what came before
        for status in (NOT_SERVING, SERVING):
            health.set("", status)
            assert (await asyncio.wait_for(stays.read(), BOUND_S)).status == status
        health.leave()
        health.set("", SERVING)
        assert (await asyncio.wait_for(stays.read(), BOUND_S)).status == NOT_SERVING
        stays.cancel()


class StalledContext:
    """A call whose client does not read."""

    async def write(self, _: object) -> None:
        await asyncio.Event().wait()


async def test_watcher_that_does_not_read_delays_no_other() -> None:
    health, written = HealthService(), asyncio.Queue[Any]()

    class Context:
        write: Callable[[Any], Awaitable[None]] = written.put

    watching = [
        asyncio.create_task(health.Watch(health_pb2.HealthCheckRequest(), context))
        for context in (StalledContext(), Context())
    ]
    for status in (SERVING, NOT_SERVING):
        health.set("", status)
        assert (await asyncio.wait_for(written.get(), BOUND_S)).status == status
    for task in watching:
        task.cancel()
    await asyncio.wait(watching)


async def test_unknown_service_is_not_found_and_watched() -> None:
    health = HealthService()
    request = health_pb2.HealthCheckRequest(service="model.x")
    async with served(health) as address, grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="is not served") as refused:
            await stub.Check(request, timeout=BOUND_S)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        watcher = stub.Watch(request)
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        assert (await asyncio.wait_for(watcher.read(), BOUND_S)).status == unknown
        health.set("model.x", SERVING)
        assert (await asyncio.wait_for(watcher.read(), BOUND_S)).status == SERVING
        watcher.cancel()
