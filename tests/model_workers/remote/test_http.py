"""HTTP as a worker speaks it, against servers that keep to little of it."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from model_workers.remote.faults import ServerFault
from model_workers.remote.http import HEAD_BYTES_MAX, HttpClient
from sluice.startup import free_port
from sluice.tls import CERTIFICATE, KEY
from supervisor.certificates import Authority

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Server:
    """Answers the requests of each connection with the next of ``answers``; None closes it."""

    def __init__(self, answers: Sequence[Sequence[bytes] | None]) -> None:
        self.connections = 0
        self.heads: list[bytes] = []
        self._answers = list(answers)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while True:
            self.heads.append(head := await reader.readuntil(b"\r\n\r\n"))
            if b"content-length: 4" in head:
                assert await reader.readexactly(4) == b"body"
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


@asynccontextmanager
async def serving(
    *answers: Sequence[bytes] | None, stall_s: float = 30.0
) -> AsyncIterator[tuple[Server, HttpClient]]:
    one = Server(answers)
    async with listening(one.serve) as port:
        client = HttpClient(f"http://127.0.0.1:{port}/v1", 5.0, stall_s)
        try:
            yield one, client
        finally:
            client.close()


async def ask(client: HttpClient, method: str = "POST") -> bytes:
    connection = await client.send(method, "/x", {"a": "b"}, b"body" if method == "POST" else b"")
    try:
        assert connection.status == 200
        body = b""
        while received := await connection.read():
            body += received
        return body
    finally:
        client.release(connection)


async def test_a_connection_serves_the_next_request() -> None:
    pieces = [WHOLE[:20], WHOLE[20:40], WHOLE[40:]]
    async with serving([WHOLE], pieces, [CHUNKED, b"3\r\nhel\r\n2\r\n", b"lo\r\n0\r\n\r\n"]) as (
        server,
        client,
    ):
        assert [await ask(client), await ask(client, "GET"), await ask(client)] == [b"hello"] * 3
        assert server.connections == 1
        assert server.heads[0].startswith(b"POST /v1/x HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"\r\na: b\r\n" in server.heads[1]


async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    until_closed = [b"HTTP/1.0 200 OK\r\n\r\nhel", b"lo", b""]
    async with serving(until_closed, [WHOLE]) as (server, client):
        assert await ask(client) == b"hello"
        assert await ask(client) == b"hello"
        assert server.connections == 2


async def test_a_connection_that_was_closed_meanwhile_is_replaced() -> None:
    closing = [WHOLE]
    async with serving(closing, None, [WHOLE]) as (server, client):
        assert await ask(client) == b"hello"
        assert await ask(client) == b"hello"
        assert server.connections == 2
        assert len(server.heads) == 3


async def test_interim_responses_are_passed_over() -> None:
    async with serving([b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE]) as (_, client):
        assert await ask(client) == b"hello"


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [b""],
        [WHOLE[:-1], b""],
        [CHUNKED, b"3\r\nhel\r\n", b""],
        [b"not http\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\na: ", b"x" * (HEAD_BYTES_MAX + 65536 * 5)],
    ],
    ids=["closed", "closed at once", "cut", "cut chunks", "no HTTP", "an endless head"],
)
async def test_what_is_no_whole_response_is_an_error(answer: Sequence[bytes] | None) -> None:
    async with serving(answer) as (_, client):
        with pytest.raises(ConnectionError):
            await ask(client)


async def test_silence_is_a_fault() -> None:
    async with serving([WHOLE[:20]], stall_s=0.05) as (_, client):
        with pytest.raises(ServerFault, match="said nothing"):
            await ask(client)


async def test_nobody_listening_is_a_fault() -> None:
    client = HttpClient(f"http://127.0.0.1:{free_port()}/v1", 5.0, 5.0)
    with pytest.raises(ServerFault, match="cannot be reached"):
        await ask(client)


async def test_a_reader_that_is_slow_holds_the_server() -> None:
    big = b"HTTP/1.1 200 OK\r\ncontent-length: 8000000\r\n\r\n"
    async with serving([big, b"x" * 8_000_000]) as (_, client):
        connection = await client.send("GET", "/x", {})
        transport = connection.transport
        assert transport is not None
        while transport.is_reading():
            assert not connection.is_whole
            await asyncio.sleep(0)
        size = 0
        while received := await connection.read():
            size += len(received)
        client.release(connection)
        assert size == 8_000_000


async def test_a_proxy_gets_the_whole_address(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Server([[WHOLE]])
    async with listening(one.serve) as port:
        monkeypatch.setenv("http_proxy", f"http://me:secret@127.0.0.1:{port}")
        client = HttpClient("http://models.example:81/v1", 5.0, 5.0)
        assert await ask(client) == b"hello"
        client.close()
    assert one.heads[0].startswith(b"POST http://models.example:81/v1/x HTTP/1.1\r\nhost: models.")
    assert b"proxy-authorization: Basic bWU6c2VjcmV0\r\n" in one.heads[0]


@asynccontextmanager
async def tunnels(status: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A proxy that connects to where it is told."""
    heads: list[bytes] = []

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(head := await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 " + status + b"\r\n\r\n")
        if status == b"200 OK":
            host, _, port = head.split()[1].decode().rpartition(":")
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            await asyncio.gather(pipe(reader, far_writer), pipe(far_reader, writer))

    async with listening(serve) as port:
        yield port, heads


def tls_of(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """What a server on localhost needs, and who vouches for it."""
    authority = Authority(folder)
    authority.ensure(("server",))
    own, context = authority.of("server"), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own / CERTIFICATE, own / KEY)
    return context, authority.ca


async def test_tls_is_direct_or_through_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, authorities = tls_of(tmp_path)
    one = Server([[WHOLE]] * 4)
    async with listening(one.serve, context) as port, tunnels(b"200 OK") as (proxy, heads):
        url = f"https://localhost:{port}/v1"
        with pytest.raises(ServerFault, match="cannot be reached"):
            await ask(HttpClient(url, 5.0, 5.0))  # a stranger's certificate
        monkeypatch.setenv("SSL_CERT_FILE", str(authorities))
        for number, address in enumerate(("", f"http://127.0.0.1:{proxy}")):
            monkeypatch.setenv("https_proxy", address)
            client = HttpClient(url, 5.0, 5.0)
            assert [await ask(client), await ask(client)] == [b"hello"] * 2
            client.close()
            assert len(heads) == number
    assert heads[0].startswith(f"CONNECT localhost:{port} HTTP/1.1\r\n".encode())


async def test_a_proxy_that_refuses_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tunnels(b"403 Forbidden") as (proxy, _):
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy}")
        client = HttpClient("https://models.example/v1", 5.0, 5.0)
        with pytest.raises(ServerFault, match="cannot be reached"):
            await ask(client)
