"""uvicorn on the gateway's event loop: a socket bound at start, limits of a connection, an end within bounds."""

import asyncio
import logging
import socket
import ssl
from contextlib import nullcontext
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http.answers import encode
from gateway.http.call import ABORT, CERTIFICATE_NAMES
from sluice.errors import Overloaded
from sluice.grpc_server import connections_max
from sluice.openai.errors import error_body
from sluice.settings import TlsSettings
from sluice.startup import listening_at
from sluice.tls import server_context

KEY: Final = "http.address"
IDLE_S: Final = 60
"""How long a connection may stay open between two requests, seconds."""
HEAD_S: Final = 20.0
"""How long the head of a request may take, seconds."""
HEAD_BYTES: Final = 64 * 1024
"""A head that has not ended by then is refused: anybody may send one on each connection."""
UNREAD_MS: Final = 60_000
"""A client that takes nothing for this long is disconnected by the kernel, milliseconds."""
_BACKLOG: Final = 2048
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-type: application/json\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n"
)
"""The head of the answer to a connection too many."""


class HttpServer:
    """Serves an application.

    Attributes:
        address: where, "host:port"; the port is known when it is bound.
    """

    def __init__(self, address: str, app: ASGIApp, context: ssl.SSLContext | None = None) -> None:
        """``context``: calls are encrypted with it; None: they are not."""
        self.address = address
        config = uvicorn.Config(
            app,
            ssl_context_factory=None if context is None else lambda *_: context,
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=1,
            backlog=_BACKLOG,
        )
        # What it logs as an error is a client that has gone; errors of calls are logged by `Endpoint`.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server = _Server(config)
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    def bind(self) -> None:
        """Opens the port.

        Raises:
            SetupError: it is taken, or the address is none of this machine.
        """
        host, port = listening_at(self.address, KEY, ", or null for no HTTP")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = opened = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
        self.address = f"{self.address.rpartition(':')[0]}:{opened.getsockname()[1]}"

    async def start(self) -> None:
        """Accepts calls, in the background."""
        assert self._socket is not None, "bound before"
        self._serving = asyncio.ensure_future(self._server.serve([self._socket]))

    async def close(self) -> None:
        """Closes the port; calls that still run get a second."""
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
        elif self._socket is not None:
            self._socket.close()


def context_of(tls: TlsSettings) -> ssl.SSLContext | None:
    """Calls are encrypted with it; None: they are not."""
    if tls.serving is None:
        return None
    client_cas = () if tls.client_ca is None else (tls.client_ca,)
    return server_context(tls.serving, client_cas, "http/1.1")


class _Server(uvicorn.Server):
    """Signals are the gateway's."""

    def capture_signals(self) -> Any:
        return nullcontext()


class Connection(HttpToolsProtocol):
    """A connection whose heads are bounded in size and time, and that a call can cut."""

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > connections_max():
            body = encode(error_body(503, Overloaded.reason, "too many connections are open"))
            transport.write(_FULL % len(body) + body)
            transport.close()
        shown = transport.get_extra_info("peercert") or {}
        self._names = [name for _, name in shown.get("subjectAltName", ())]
        self._head_timer: asyncio.TimerHandle | None = None
        self._begin_head()

    @override
    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > HEAD_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self.scope[CERTIFICATE_NAMES] = self._names  # type: ignore[typeddict-unknown-key]
        self._begin_head()

    def on_headers_complete(self) -> None:
        """Its head is complete."""
        self._end_head()
        super().on_headers_complete()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def _begin_head(self) -> None:
        self._head_bytes = 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
