"""The proxy of a link: what is sent arrives, later when it was cut or slowed down, never when it was reset."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sluice.startup import LOOPBACK, free_port
from tests.support.proxy import Proxy

BOUND_S = 60.0
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(4096):
            writer.write(piece)
            await writer.drain()
    except ConnectionResetError:
        pass
    finally:
        writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    """A proxy in front of a server that echoes."""
    target = free_port()
    server = await asyncio.start_server(echo, LOOPBACK, target)
    async with Proxy(target, free_port(used_ports={target})) as one, asyncio.timeout(BOUND_S):
        yield one
    server.close()


@asynccontextmanager
async def connected(proxy: Proxy) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection(LOOPBACK, proxy.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(streams: Streams, text: bytes) -> bytes:
    reader, writer = streams
    writer.write(text)
    return await reader.readexactly(len(text))


async def test_bytes_and_the_end_of_a_connection_go_through(proxy: Proxy) -> None:
    async with connected(proxy) as streams:
        payload = bytes(range(256)) * 1000
        assert await answer(streams, payload) == payload
        streams[1].write(b"last")
        streams[1].write_eof()
        assert await streams[0].read() == b"last"


@pytest.mark.parametrize("is_open", [True, False])
async def test_what_is_sent_through_a_cut_link_arrives_when_it_heals(
    proxy: Proxy, is_open: bool
) -> None:
    if not is_open:
        proxy.cut()
    async with connected(proxy) as streams:
        if is_open:
            assert await answer(streams, b"before") == b"before"
            proxy.cut()
        waiting = asyncio.ensure_future(answer(streams, b"after"))
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        proxy.heal()
        assert await waiting == b"after"


async def test_a_slow_link_delays_each_way(proxy: Proxy) -> None:
    loop = asyncio.get_running_loop()
    async with connected(proxy) as streams:
        proxy.slow(0.1)
        begun = loop.time()
        assert await answer(streams, b"hello") == b"hello"
        assert loop.time() - begun >= 0.2


async def test_a_reset_ends_connections_and_lets_new_ones_through(proxy: Proxy) -> None:
    async with connected(proxy) as streams:
        assert await answer(streams, b"before") == b"before"
        proxy.reset()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await answer(streams, b"after")
    async with connected(proxy) as streams:
        assert await answer(streams, b"again") == b"again"
