"""The proxy of a link: what is sent arrives, later when it was cut or slowed down, never when it was reset."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sluice.startup import LOOPBACK, free_port
from tests.robustness.faults.proxy import Proxy

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


@asynccontextmanager
async def proxied_echo() -> AsyncIterator[Proxy]:
    target = free_port()
    server = await asyncio.start_server(echo, LOOPBACK, target)
    async with Proxy(target, free_port(taken={target})) as proxy, asyncio.timeout(BOUND_S):
        yield proxy
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


async def test_bytes_go_through_in_both_directions() -> None:
    async with proxied_echo() as proxy, connected(proxy) as streams:
        payload = bytes(range(256)) * 1000
        assert await answer(streams, payload) == payload


async def test_the_end_of_a_connection_goes_through() -> None:
    async with proxied_echo() as proxy, connected(proxy) as (reader, writer):
        writer.write(b"last")
        writer.write_eof()
        assert await reader.read() == b"last"


async def test_what_is_sent_through_a_cut_link_arrives_when_it_heals() -> None:
    async with proxied_echo() as proxy, connected(proxy) as streams:
        assert await answer(streams, b"before") == b"before"
        proxy.cut()
        waiting = asyncio.ensure_future(answer(streams, b"after"))
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        proxy.heal()
        assert await waiting == b"after"


async def test_connection_through_a_cut_link_is_silent() -> None:
    async with proxied_echo() as proxy:
        proxy.cut()
        async with connected(proxy) as streams:
            waiting = asyncio.ensure_future(answer(streams, b"hello"))
            done, _ = await asyncio.wait([waiting], timeout=0.2)
            assert not done
            proxy.heal()
            assert await waiting == b"hello"


async def test_a_slow_link_delays_each_way() -> None:
    loop = asyncio.get_running_loop()
    async with proxied_echo() as proxy, connected(proxy) as streams:
        proxy.slow(0.1)
        begun = loop.time()
        assert await answer(streams, b"hello") == b"hello"
        assert loop.time() - begun >= 0.2


async def test_a_reset_ends_connections_and_lets_new_ones_through() -> None:
    async with proxied_echo() as proxy:
        async with connected(proxy) as streams:
            assert await answer(streams, b"before") == b"before"
            proxy.reset()
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await answer(streams, b"after")
        async with connected(proxy) as streams:
            assert await answer(streams, b"again") == b"again"


async def test_a_target_that_is_away_ends_the_connection() -> None:
    async with Proxy(free_port(), free_port()) as proxy, asyncio.timeout(BOUND_S):
        async with connected(proxy) as (reader, _):
            assert await reader.read() == b""
        assert proxy.connections == 0
