"""HTTP/1.1 to one server over kept connections: what a worker needs of it, at a tenth of a client's CPU.

httptools parses, as in the gateway's HTTP server. docs/internals/decisions/0016-remote-workers.md says what this saves
and omits: redirects, cookies, compression, HTTP/2.
"""

import asyncio
import base64
import ssl
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, cast
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import httptools

from model_workers.remote.faults import ServerFault
from sluice.errors import EngineFailed, ModelUnavailable

HEAD_BYTES_MAX: Final = 64 * 1024
"""Maximum size of a response's head."""
UNREAD_BYTES_MAX: Final = 1024 * 1024
"""Unread body bytes above which reading from a connection pauses."""
IDLE_MAX: Final = 1024
"""Maximum number of idle connections kept for later requests."""
_PORTS: Final = {"http": 80, "https": 443}


class ServerConnection(asyncio.Protocol):
    """One connection, and the response that it receives.

    Args:
        loop: The event loop.
        stall_s: How long the server may be silent while it is waited for, in seconds.

    Attributes:
        status: Status of the response; 0 until its head has arrived.
        headers: Headers of the response, by lower-case name.
        is_whole: Whether the whole response has arrived.
        has_failed: Whether it ended before that.
        is_reused: Whether it served another request before.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, stall_s: float) -> None:
        self.transport: asyncio.Transport | None = None
        self._loop, self._stall_s = loop, stall_s
        self.is_reused = False
        self.reset()

    def reset(self) -> None:
        """Prepare for the next response."""
        self.status, self.headers = 0, dict[str, str]()
        self.is_whole = self.has_failed = self._keeps_alive = False
        self._parser: Any = httptools.HttpResponseParser(self)
        self._pieces: deque[bytes] = deque()
        self._unread = self._head = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def can_serve(self) -> bool:
        """Whether the connection may serve another request."""
        open_ = self.transport is not None and not self.transport.is_closing()
        return open_ and self.is_whole and self._keeps_alive

    def close(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()

    async def read(self) -> bytes:
        """Return the next bytes of the body; empty after its end.

        Raises:
            ConnectionError: The connection broke.
            ServerFault: The server was silent for too long.
        """
        while not self._pieces:
            if self.is_whole:
                return b""
            if self.has_failed:
                raise ConnectionResetError
            await self._change()
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._unread = 0
        if self.transport is not None and not self.transport.is_reading():
            self.transport.resume_reading()
        return data

    async def until_head(self) -> None:
        """Wait for the head of the response; raises as `read`."""
        while not self.status:
            if self.has_failed:
                raise ConnectionResetError
            await self._change()

    async def _change(self) -> None:
        self._waiter = self._loop.create_future()
        # A timer of its own: `asyncio.timeout` costs several times as much.
        timer = self._loop.call_later(self._stall_s, self._stall)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _stall(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            problem = f"the server said nothing for {self._stall_s:g} s"
            self._waiter.set_exception(ServerFault(problem, EngineFailed))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport; see `asyncio.Protocol`."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; see `asyncio.Protocol`."""
        if not self.status:
            self._head += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.has_failed = True
        if self.has_failed or self._head > HEAD_BYTES_MAX + len(data):
            self.has_failed = True
            self.close()
        elif self._unread > UNREAD_BYTES_MAX and self.transport is not None:
            self.transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """Record the end of the connection; see `asyncio.Protocol`."""
        ends_here = self.status and error is None and not self._is_delimited
        self.is_whole |= bool(ends_here)
        self.has_failed |= not self.is_whole
        self._wake()

    @property
    def _is_delimited(self) -> bool:
        return bool({"content-length", "transfer-encoding"} & self.headers.keys())

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; called by httptools."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Store the status; called by httptools."""
        status = self._parser.get_status_code()
        self.status = 0 if 100 <= status < 200 else status

    def on_body(self, body: bytes) -> None:
        """Store a part of the body; called by httptools."""
        self._pieces.append(body)
        self._unread += len(body)

    def on_message_complete(self) -> None:
        """Record the end of the response; called by httptools."""
        self.is_whole = bool(self.status)
        self._keeps_alive = bool(self._parser.should_keep_alive())


class HttpClient:
    """Sends requests to one server.

    Args:
        url: Base URL of the API.
        connect_s: Timeout of a connection, in seconds.
        stall_s: How long the server may be silent, in seconds.
    """

    def __init__(self, url: str, connect_s: float, stall_s: float) -> None:
        self._parts = urlsplit(url)
        self._connect_s, self._stall_s = connect_s, stall_s
        self._idle: list[ServerConnection] = []
        self._proxy = proxy_of(url)
        self._tls = ssl.create_default_context() if self._parts.scheme == "https" else None
        host = self._parts.hostname or ""
        self._address = host, self._parts.port or _PORTS[self._parts.scheme]
        self._host = self._parts.netloc.rpartition("@")[2]
        tunnelled = self._proxy is None or self._tls is not None
        self._before_path = (
            self._parts.path if tunnelled else f"http://{self._host}{self._parts.path}"
        )
        credentials = self._credentials() if self._tls is None else []
        self._first_headers = "\r\n".join([f"host: {self._host}", *credentials])

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> ServerConnection:
        """Send a request; return the connection when the head of the response has arrived.

        The caller returns it with `release`, however reading it ends.

        Raises:
            ServerFault: The server is unreachable, or silent for too long.
            ConnectionError: The connection broke.
        """
        lines = [f"{method} {self._before_path}{path} HTTP/1.1", self._first_headers]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if method == "POST":
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        request = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
        while True:
            connection = await self._connection()
            try:
                assert connection.transport is not None
                connection.transport.write(request)
                await connection.until_head()
            except ConnectionError:
                connection.close()
                if connection.is_reused and not connection.headers:
                    continue  # the server had closed it before the request came
                raise
            except BaseException:
                connection.close()
                raise
            return connection

    def release(self, connection: ServerConnection) -> None:
        """Keep the connection if its response is whole, else close it."""
        if connection.can_serve and len(self._idle) < IDLE_MAX:
            connection.is_reused = True
            self._idle.append(connection)
        else:
            connection.close()

    async def _connection(self) -> ServerConnection:
        """Return an idle connection; the one used last is the least likely to be closed soon."""
        while self._idle:
            connection = self._idle.pop()
            if connection.can_serve:
                connection.reset()
                return connection
            connection.close()
        try:
            async with asyncio.timeout(self._connect_s):
                return await self._connect()
        except (OSError, TimeoutError) as error:
            raise ServerFault("the server cannot be reached", ModelUnavailable) from error

    async def _connect(self) -> ServerConnection:
        loop, (host, port) = asyncio.get_running_loop(), self._address
        new = partial(ServerConnection, loop, self._stall_s)
        if self._proxy is None:
            _, connection = await loop.create_connection(
                new, host, port, ssl=self._tls, server_hostname=host if self._tls else None
            )
            return connection
        proxy_host, proxy_port = self._proxy.hostname or "", self._proxy.port or 80
        _, connection = await loop.create_connection(new, proxy_host, proxy_port)
        if self._tls is not None:
            await self._open_tunnel(connection, host, port)
        return connection

    async def _open_tunnel(self, connection: ServerConnection, host: str, port: int) -> None:
        """Connect to the server through the proxy, and set up TLS with it."""
        transport, tls = connection.transport, self._tls
        assert transport is not None
        assert tls is not None
        lines = [f"CONNECT {host}:{port} HTTP/1.1", f"host: {host}:{port}", *self._credentials()]
        transport.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        await connection.until_head()
        if connection.status != 200:
            connection.close()
            raise ConnectionRefusedError(f"the proxy answered {connection.status}")
        connection.reset()
        loop = asyncio.get_running_loop()
        connection.transport = cast(
            asyncio.Transport,
            await loop.start_tls(transport, connection, tls, server_hostname=host),
        )

    def _credentials(self) -> list[str]:
        """Return the header with the credentials in the proxy's URL, if it has any."""
        proxy = self._proxy
        if proxy is None or proxy.username is None:
            return []
        credentials = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
        return [f"proxy-authorization: Basic {base64.b64encode(credentials.encode()).decode()}"]


def proxy_of(url: str) -> SplitResult | None:
    """Return the proxy by HTTPS_PROXY, HTTP_PROXY and NO_PROXY."""
    parts = urlsplit(url)
    if proxy_bypass(parts.hostname or ""):
        return None
    proxy = getproxies().get(parts.scheme)
    if not proxy:
        return None
    return urlsplit(proxy if "://" in proxy else f"http://{proxy}")
