"""How many connections may be open, over gRPC and over HTTP: anybody may open one."""

import asyncio
import resource
import socket
from contextlib import ExitStack

import grpc
import pytest

from sluice.grpc_server import CONNECTIONS_MAX, connections_max
from sluice.v1.inference_pb2 import ListModelsRequest
from tests.gateway.kit.batcher import BOUND_S
from tests.gateway.kit.http import Connection
from tests.gateway.kit.wire import Wire

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
MOST = 5


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4 * MOST, 4 * MOST))


def test_most_files_of_a_process_are_left_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, most in ((1024, 256), (1 << 20, CONNECTIONS_MAX), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert connections_max() == most


async def greeted(address: str) -> tuple[asyncio.StreamWriter, bool]:
    """A connection of HTTP/2, and whether the server answers."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(PREFACE)
    try:
        async with asyncio.timeout(BOUND_S):
            return writer, bool(await reader.read(1))
    except ConnectionError:
        return writer, False


@pytest.mark.usefixtures("few")
@pytest.mark.wire(http="127.0.0.1:0")
async def test_a_connection_too_many_is_closed(wire: Wire) -> None:
    found = [await greeted(wire.gateway.address) for _ in range(MOST + 3)]
    assert sum(answered for _, answered in found) == MOST
    for writer, _ in found:
        writer.close()

    with ExitStack() as opened:
        for _ in range(MOST):
            host, _, port = wire.http.rpartition(":")
            opened.enter_context(socket.create_connection((host, int(port))))
        last = await Connection.to(wire.http)
        reply = await last.reply()
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert reply.error["code"] == "rate_limit_exceeded"
        assert await last.reader.read() == b""

    last.writer.close()
    async with asyncio.timeout(BOUND_S):
        while await served(wire) != 200:
            pass  # it hears that the others are closed


async def test_metadata_that_are_too_long_end_their_call_alone(wire: Wire) -> None:
    long = (("x", "y" * 20_000),)
    with pytest.raises(grpc.RpcError) as refused:
        await wire.stub.ListModels(ListModelsRequest(), metadata=long)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    assert (await wire.stub.ListModels(ListModelsRequest())).models


async def served(wire: Wire) -> int:
    """The status of a question about models on a connection of its own."""
    connection = await Connection.to(wire.http)
    try:
        await connection.send("/v1/models", method="GET")
        return (await connection.reply()).status
    finally:
        connection.writer.close()
