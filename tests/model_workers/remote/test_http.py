"""Connections of a remote worker to servers and proxies that keep to little of HTTP."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from model_workers.remote.api import ServerApi
from model_workers.remote.client import ServerClient
from sluice.settings.remote import ServerSettings
from tests.support.settings import tuned

WHOLE = b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\nX-A: b\r\n\r\n{"data": []}'
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Server:
    """Answers the requests of each connection with the next of ``answers``; None closes it."""

    def __init__(self, *answers: Sequence[bytes] | None) -> None:
        self.connections = 0
        self.heads: list[bytes] = []
        self._answers = list(answers)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while True:
            self.heads.append(await reader.readuntil(b"\r\n\r\n"))
            answer = self._answers.pop(0)
            for piece in answer or ():
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if answer is None or answer[-1:] == [b""]:
                break


@asynccontextmanager
async def listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[int]:
    """A server; gives its port, and has ended all its connections when the block has."""
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.gather(*tasks, return_exceptions=True)


async def problems(url: str, count: int = 1, stall_s: float = 30.0) -> list[str]:
    """What a client notices when it asks for the list of models so often."""
    settings = tuned(ServerSettings, url=url, model="m", stall_s=stall_s)
    noticed = list[str]()
    async with ServerClient(ServerApi(settings, None, 1000), url) as client:
        for _ in range(count):
            await client.health.look()
            noticed.append(client.health.problem)
    return noticed


async def test_a_connection_serves_the_next_request() -> None:
    pieces = [WHOLE[:20], WHOLE[20:40], WHOLE[40:]]
    interim = [b"HTTP/1.1 100 Continue\r\n\r\n", CHUNKED, b"2\r\n[]\r\n", b"0\r\n\r\n"]
    server = Server([WHOLE], pieces, interim)
    async with listening(server.serve) as port:
        assert await problems(f"http://127.0.0.1:{port}/v1", 3) == [""] * 3
    assert server.connections == 1
    assert server.heads[0].startswith(b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:")


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [WHOLE[:-1], b""],
        [CHUNKED, b"3\r\nhel\r\n", b""],
        [b"not http\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\na: ", b"x" * 400_000],
    ],
    ids=["closed", "cut", "cut chunks", "no HTTP", "an endless head"],
)
async def test_incomplete_responses_are_faults(answer: Sequence[bytes] | None) -> None:
    # Reads without side effects are asked for twice.
    async with listening(Server(answer, answer).serve) as port:
        (problem,) = await problems(f"http://127.0.0.1:{port}/v1")
    assert "the connection to the server broke" in problem


async def test_silence_is_a_fault() -> None:
    async with listening(Server([WHOLE[:20]]).serve) as port:
        (problem,) = await problems(f"http://127.0.0.1:{port}/v1", stall_s=0.1)
    assert problem == "the server said nothing for 0.1 s"


async def test_a_proxy_gets_the_whole_address(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Server([WHOLE])
    async with listening(proxy.serve) as port:
        monkeypatch.setenv("http_proxy", f"http://me:secret@127.0.0.1:{port}")
        assert await problems("http://models.example:81/v1") == [""]
    assert proxy.heads[0].startswith(b"GET http://models.example:81/v1/models HTTP/1.1\r\n")
    assert b"\r\nProxy-Authorization: Basic bWU6c2VjcmV0\r\n" in proxy.heads[0]
