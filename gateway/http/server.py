"""Serve HTTP with uvicorn on the gateway's event loop.

`HttpServer` binds the socket at start, and drains and closes it at the end. `gateway.http.connection` limits what a
client may send on one connection; `gateway.http.handshakes` accepts encrypted connections.
"""

import asyncio
import logging
import socket
import ssl
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

from gateway.http.connection import LimitedConnection, Limits
from gateway.http.handshakes import TlsListener
from sluice.settings import TlsSettings
from sluice.startup import listening_at
from sluice.tls import server_context

SETTING: Final = "http.address"
UNREAD_MS: Final = 60_000
"""TCP user timeout in milliseconds: the kernel disconnects a client that acknowledges nothing for this long."""
STRANGER_BYTES: Final = 4 * 1024
"""Receive buffer in bytes of an encrypted connection before its first authenticated call. Small, because uvloop reads
all that the buffer holds at once and keeps it three times: encrypted, decrypted and as a body."""
_BACKLOG: Final = 2048
"""Connections that the kernel queues until they are accepted."""


class HttpServer:
    """An ASGI application behind one port.

    Attributes:
        address: "host:port"; with port 0 the real port is known after `bind`.
    """

    def __init__(
        self,
        address: str,
        app: ASGIApp,
        context: ssl.SSLContext | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Create the server; connections are encrypted if there is a TLS `context`."""
        limits = limits or Limits()
        self.address = address
        self._is_draining = False
        make = partial(LimitedConnection, limits, lambda: self._is_draining)
        config = uvicorn.Config(
            app,
            http=make,  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=limits.idle_s,  # type: ignore[arg-type]  # it is passed to call_later
            timeout_graceful_shutdown=1,
            backlog=_BACKLOG,
        )
        # uvicorn logs clients that have gone as errors; errors of calls are logged by `Endpoint`.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server = _Server(config)
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._listener: TlsListener | None = None
        if context is not None:
            state = self._server.server_state
            accept = partial(make, config=config, server_state=state, app_state={})
            # A quarter of the connections may be in their handshake, so that they never take all places.
            handshakes = max(limits.connections // 4, 1)
            self._listener = TlsListener(accept, context, limits.handshake_s, handshakes)

    def bind(self) -> None:
        """Open the port.

        Raises:
            SetupError: The address is malformed, in use, not of this machine, or needs more rights.
        """
        host, port = listening_at(self.address, SETTING, ", or null for no HTTP")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = opened = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
        if self._listener is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, STRANGER_BYTES)
        self.address = f"{self.address.rpartition(':')[0]}:{opened.getsockname()[1]}"

    async def start(self) -> None:
        """Start to accept connections in the background."""
        assert self._socket is not None, "bound before"
        served = [self._socket] if self._listener is None else []
        self._serving = asyncio.ensure_future(self._server.serve(served))
        if self._listener is not None:
            self._listener.start(self._socket)

    def drain(self) -> None:
        """Close each connection after its current or next answer, so that clients go to another gateway."""
        self._is_draining = True
        for connection in self._server.server_state.connections:
            assert isinstance(connection, LimitedConnection), "it accepts no others"
            connection.drain()

    async def close(self) -> None:
        """Close the port; calls that still run get one second."""
        if self._listener is not None:
            self._listener.close()
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
        if self._socket is not None:
            self._socket.close()


def context_of(tls: TlsSettings) -> ssl.SSLContext | None:
    """Return the TLS context for the port, None without encryption; raise SettingsError for a bad certificate."""
    if tls.serving is None:
        return None
    client_cas = () if tls.client_ca is None else (tls.client_ca,)
    return server_context(tls.serving, client_cas, "http/1.1")


class _Server(uvicorn.Server):
    """A server that leaves signals to the gateway."""

    @override
    def capture_signals(self) -> Any:
        return nullcontext()
