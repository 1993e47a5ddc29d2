"""What a connection may send, and for how long, whoever opened it; a trivial application answers."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.http.call import ABORT, AUTHENTICATED
from gateway.http.connection import Limits
from gateway.http.server import STRANGER_BYTES, HttpServer
from sluice.tls import server_context
from supervisor.certificates import Authority
from tests.gateway.kit.http import Connection, Reply, ask

BOUND_S: Final = 60.0
NOW, READ, WAIT, STREAM, KNOWN = "/now", "/read", "/wait", "/stream", "/known"
CHUNKED: Final = {"content_length": "", "transfer_encoding": "chunked"}
LONG: Final = Limits(head_s=3600, leftover_s=3600, handshake_s=3600)
"""No time passes in a test that is about bytes."""


class App:
    """Answers at once, when it has read the body, or when `may_end` is set; with the headers and the bytes it got.

    It knows callers of `KNOWN`.
    """

    server: HttpServer

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.begun = asyncio.Event()
        self.calls = 0
        self.receive_bytes: list[int] = []
        """Of the kernel's buffer, at each call."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        opened = scope[ABORT].__self__.get_extra_info("socket")
        self.receive_bytes.append(opened.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF))
        if scope["path"] == KNOWN and AUTHENTICATED in scope:
            scope[AUTHENTICATED]()
        self.begun.set()
        read, more = 0, scope["path"] == READ
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            read, more = read + len(message["body"]), message["more_body"]
        if scope["path"] == WAIT:
            await self.may_end.wait()
        if scope["path"] == STREAM:
            await self._stream(send)
            return
        body = f"{len(scope['headers'])} {read}".encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        await self.may_end.wait()
        await send({"type": "http.response.body", "body": b"two", "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def served(
    limits: Limits = LONG, context: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[App, str]]:
    app = App()
    app.server = server = HttpServer("127.0.0.1:0", app, context, limits)
    server.bind()
    await server.start()
    try:
        yield app, server.address
    finally:
        app.may_end.set()
        await server.close()


@asynccontextmanager
async def talking(
    limits: Limits = LONG,
) -> AsyncIterator[tuple[App, Connection]]:
    """A server, and a connection to it."""
    async with served(limits) as (app, address):
        connection = await Connection.to(address)
        try:
            yield app, connection
        finally:
            connection.close()


async def get(connection: Connection, path: str = NOW) -> Reply:
    await connection.send(path, b"", method="GET", content_length="", content_type="")
    return await connection.reply()


async def cut(connection: Connection) -> bytes:
    """What comes before the server closes the connection."""
    got = b""
    async with asyncio.timeout(BOUND_S):
        with suppress(ConnectionError):
            while piece := await connection.reader.read(1 << 16):
                got += piece
    connection.close()
    return got


async def write_on(connection: Connection, piece: bytes) -> bytes:
    """Send ``piece`` again and again until the connection is cut; return what the server sent."""

    async def write() -> None:
        with suppress(ConnectionError):
            while True:
                connection.writer.write(piece)
                await connection.writer.drain()

    writing = asyncio.create_task(write())
    try:
        return await cut(connection)
    finally:
        writing.cancel()


@pytest.mark.parametrize(
    "piece", [b"x: y\r\n" * 4096, b"x" * 65_536], ids=["without end", "one that does not end"]
)
@pytest.mark.parametrize("path", [NOW, READ])
async def test_endless_trailers_are_cut(piece: bytes, path: str) -> None:
    async with talking() as (_, connection):
        await connection.send(path, b"1\r\na\r\n0\r\nx: ", **CHUNKED)
        await write_on(connection, piece)


async def test_trailers_are_dropped() -> None:
    async with talking() as (_, connection):
        for _ in range(2):
            await connection.send(READ, b"1\r\na\r\n0\r\nx: 1\r\ny: 2\r\n\r\n", **CHUNKED)
            assert (await connection.reply()).body == b"3 1"  # of the head alone


async def test_chunk_extensions_without_end_are_cut() -> None:
    async with talking() as (_, connection):
        await connection.send(READ, b"1;x=", **CHUNKED)
        await write_on(connection, b"x" * 65_536)


@pytest.mark.parametrize(
    ("size", "head_s"), [(1 << 20, 3600.0), (1, 0.05)], ids=["too long", "too slow"]
)
async def test_head_without_end_is_cut(size: int, head_s: float) -> None:
    async with talking(Limits(head_s=head_s)) as (_, connection):
        connection.writer.write(b"GET / HTTP/1.1\r\nx: " + b"a" * size)
        assert await cut(connection) == b""  # no answer


@pytest.mark.parametrize(
    "head", [b"x: y\r\n" * 1000, b"x: " + b"y" * 70_000 + b"\r\n"], ids=["many", "long"]
)
async def test_large_head_is_refused(head: bytes) -> None:
    """In one piece, so that it is complete when the server looks."""
    async with served() as (app, address):
        connection = await Connection.to(address)
        connection.writer.write(b"GET /now HTTP/1.1\r\nhost: a\r\n" + head + b"\r\n")
        assert (await connection.reply()).error["code"] == "request_invalid"
        assert await cut(connection) == b""
        connection = await Connection.to(address)
        connection.writer.write(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await connection.reply()).status == 400
        assert await cut(connection) == b""
        assert app.calls == 0


async def test_large_bodies_pass_in_any_form() -> None:
    async with talking() as (_, connection):
        large = b"10000\r\n" + bytes(65_536) + b"\r\n"
        bodies: list[tuple[int, bytes, dict[str, str]]] = [
            (3 << 20, bytes(3 << 20), {}),
            (1 << 20, large * 16 + b"0\r\n\r\n", CHUNKED),
            (100_000, b"1\r\na\r\n" * 100_000 + b"0\r\n\r\n", CHUNKED),
        ]
        for length, body, more in bodies:
            await connection.send(READ, body, **more)
            assert (await connection.reply()).body.split()[1] == str(length).encode()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with talking() as (app, connection):
        for path in (WAIT, *[NOW] * LONG.pipelined):
            await connection.send(path, b"", method="GET", content_length="")
        await asyncio.wait_for(app.begun.wait(), BOUND_S)
        app.may_end.set()
        for _ in range(1 + LONG.pipelined):
            assert (await connection.reply()).status == 200


async def test_too_many_pipelined_requests_are_cut() -> None:
    async with served() as (app, address):
        connection = await Connection.to(address)
        request = b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n"
        connection.writer.write(request * (2 + LONG.pipelined))
        assert await cut(connection) == b""
        assert app.calls == 1
        assert (await ask(address, NOW, b"")).status == 200


@pytest.mark.parametrize(
    "more", [{"content_length": "1000000"}, CHUNKED], ids=["length", "chunked"]
)
async def test_body_behind_its_answer_has_a_time(more: dict[str, str]) -> None:
    async with talking(Limits(head_s=3600, leftover_s=0.2)) as (_, connection):
        await connection.send(NOW, b"1\r\na\r\n", **more)
        assert (await connection.reply()).status == 200
        assert await cut(connection) == b""


async def test_body_behind_its_answer_may_end() -> None:
    """The connection goes on: a client that is refused sends its body first and reads then."""
    async with talking() as (_, connection):
        body = bytes(5 << 20)
        await connection.send(NOW, b"", content_length=str(len(body)))
        assert (await connection.reply()).status == 200
        connection.writer.write(body)
        await connection.writer.drain()
        assert (await get(connection)).status == 200


async def test_line_ends_keep_no_connection_open() -> None:
    async with talking(Limits(head_s=0.2)) as (_, connection):
        assert (await get(connection)).status == 200
        connection.writer.write(b"\r\n")
        assert await cut(connection) == b""


async def test_http_1_0_gets_streams_without_chunks() -> None:
    """Piece by piece; the end of the connection ends the body."""
    async with talking() as (app, connection):
        connection.writer.write(b"GET /stream HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        status, headers = await connection.head()
        assert (status, "transfer-encoding" in headers) == (200, False)
        assert headers["connection"] == "close"
        async with asyncio.timeout(BOUND_S):
            assert await connection.reader.readexactly(4) == b"one "
        app.may_end.set()
        assert await cut(connection) == b"two"


async def test_idle_connection_is_closed_after_its_time() -> None:
    async with talking(Limits(idle_s=0.2)) as (_, connection):
        assert (await get(connection)).status == 200
        assert await cut(connection) == b""


async def test_drain_ends_connections_with_their_answer() -> None:
    async with served() as (app, address):
        idle, busy, streamed = [await Connection.to(address) for _ in range(3)]
        assert "connection" not in (await get(idle)).headers
        await streamed.send(STREAM, b"", method="GET", content_length="")
        await streamed.head()
        app.begun.clear()
        await busy.send(WAIT, b"", method="GET", content_length="")
        await asyncio.wait_for(app.begun.wait(), BOUND_S)
        app.server.drain()
        for connection in (idle, await Connection.to(address)):
            assert (await get(connection)).headers["connection"] == "close"
            assert await cut(connection) == b""
        app.may_end.set()
        assert (await busy.reply()).headers["connection"] == "close"
        assert await cut(busy) == b""
        assert (await cut(streamed)).endswith(b"0\r\n\r\n")


NO_REQUESTS: Final = (
    b"GET / HTTP/9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n\r\n",
)


async def test_other_protocols_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with served() as (app, address):
        for sent in NO_REQUESTS:
            connection = await Connection.to(address)
            connection.writer.write(sent)
            reply = await connection.reply()
            assert (reply.status, reply.error["code"]) == (400, "request_invalid")
            assert "not valid HTTP/1.1" in reply.error["message"]
            assert f"refused HTTP connection {reply.headers['x-request-id']}: 400" in caplog.text
            assert await cut(connection) == b""
        # Not into an answer that is under way.
        connection = await Connection.to(address)
        await connection.send(WAIT, b"", method="GET", content_length="")
        connection.writer.write(b"nonsense\r\n\r\n")
        assert await cut(connection) == b""
        assert (await ask(address, NOW, b"")).status == 200
        app.may_end.set()


class Encrypted:
    """A server's and a client's context."""

    def __init__(self, folder: Path) -> None:
        authority = Authority(folder)
        authority.ensure(["gateway"])
        self.server = server_context(authority.of("gateway"), [], "http/1.1")
        self.client = ssl.create_default_context(cafile=authority.ca)

    async def connection(self, address: str) -> Connection:
        host, _, port = address.rpartition(":")
        return Connection(*await asyncio.open_connection(host, int(port), ssl=self.client))


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Encrypted:
    return Encrypted(tmp_path_factory.mktemp("tls"))


async def test_connection_that_never_begins_tls_is_closed(encrypted: Encrypted) -> None:
    async with served(Limits(handshake_s=0.2), encrypted.server) as (_, address):
        assert await cut(await Connection.to(address)) == b""
        caller = await encrypted.connection(address)
        assert (await get(caller)).status == 200
        caller.close()


async def test_silent_handshakes_keep_no_caller_out(encrypted: Encrypted) -> None:
    async with served(replace(LONG, connections=16), encrypted.server) as (_, address):
        silent = [await Connection.to(address) for _ in range(12)]
        caller = await encrypted.connection(address)
        assert (await get(caller)).status == 200
        silent.append(caller)
        for connection in silent[:8]:  # the oldest
            assert await cut(connection) == b""
        for connection in silent:
            connection.close()


async def test_encrypted_connections_are_counted(encrypted: Encrypted) -> None:
    async with served(replace(LONG, connections=2), encrypted.server) as (_, address):
        first = [await encrypted.connection(address) for _ in range(2)]
        for connection in list(first):
            assert (await get(connection)).status == 200
        first.append(await encrypted.connection(address))
        refused = await first[-1].reply()
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        for connection in first:
            connection.close()


async def test_known_callers_have_a_larger_buffer(encrypted: Encrypted) -> None:
    async with served(LONG, encrypted.server) as (app, address):
        connection = await encrypted.connection(address)
        for path in (NOW, KNOWN, KNOWN):
            await get(connection, path)
        connection.close()
    stranger, first, known = app.receive_bytes
    assert stranger == first == 2 * STRANGER_BYTES  # the kernel counts its own part too
    assert known > 8 * STRANGER_BYTES


async def test_close_ends_handshakes(encrypted: Encrypted) -> None:
    async with served(LONG, encrypted.server) as (_, address):
        silent = await Connection.to(address)
        caller = await encrypted.connection(address)
        assert (await get(caller)).status == 200
    assert await cut(silent) == b""
    assert await cut(caller) == b""


async def test_half_closed_client_gets_its_answer() -> None:
    """It gets an interim response while it waits, and the connection is closed behind the answer."""
    async with talking(replace(LONG, probes_s=(0.0,))) as (app, connection):
        await connection.send(WAIT, b"", method="GET", content_length="", content_type="")
        connection.writer.write_eof()
        assert (await connection.head())[0] == 100
        app.may_end.set()
        reply = await connection.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert await cut(connection) == b""


async def test_half_closed_client_gets_all_answers_of_a_pipeline() -> None:
    async with talking() as (app, connection):
        for path in (WAIT, NOW):
            await connection.send(path, b"", method="GET", content_length="", content_type="")
        connection.writer.write_eof()
        await app.begun.wait()
        app.may_end.set()
        assert (await cut(connection)).count(b"HTTP/1.1 200 ") == 2


async def test_client_that_ends_inside_of_its_body_is_gone() -> None:
    async with talking() as (_, connection):
        await connection.send(READ, b"a", content_length="2")
        connection.writer.write_eof()
        assert await cut(connection) == b""


async def test_idle_client_that_ends_its_side_is_closed() -> None:
    async with talking() as (_, connection):
        await get(connection)
        connection.writer.write_eof()
        assert await cut(connection) == b""
