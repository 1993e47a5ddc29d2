"""Serve HTTP with uvicorn on the gateway's event loop: a socket bound at start, limits of a connection, an end in time.

uvicorn and httptools limit neither what a client sends before its request is known nor what it sends behind an answer.
`Connection` does, by overriding the callbacks of uvicorn's protocol: a named exception to the rule that libraries are
used by their public interface (docs/internals/decisions/0014-limits-of-an-http-connection.md).
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http.answers import encode
from gateway.http.call import ABORT, AUTHENTICATED, CERTIFICATE_NAMES
from gateway.http.half_closed import HalfClosedWatch, probe_for
from gateway.http.handshakes import TlsListener
from gateway.telemetry.request_log import new_request_id
from sluice.errors import Overloaded
from sluice.grpc_server import HANDSHAKE_S, connections_max
from sluice.openai.errors import error_body
from sluice.settings import TlsSettings
from sluice.startup import listening_at
from sluice.tls import server_context

_log = logging.getLogger(__name__)

KEY: Final = "http.address"
UNREAD_MS: Final = 60_000
"""A client that takes nothing for this long is disconnected by the kernel, milliseconds."""
STRANGER_BYTES: Final = 4 * 1024
"""Receive buffer of an encrypted connection, in bytes, until a call on it is authenticated: uvloop reads what is there
in one piece, and keeps it encrypted, decrypted and as a body."""
CALLER_BYTES: Final = 1024 * 1024
"""The same once a call is authenticated, in bytes; the kernel cuts it to `net.core.rmem_max`."""
_BACKLOG: Final = 2048
_HEADER_COST: Final = 256
"""What a header counts in addition to its bytes: the memory of its objects."""
_CLOSING: Final = (
    b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"x-request-id: %b\r\ncontent-length: %d\r\n%b\r\n%b"
)
_NO_REQUEST: Final = "the request is not valid HTTP/1.1, or its head is above 64 KiB (a header counts 256 bytes more)"


@dataclass(frozen=True)
class Limits:
    """What a connection may take, whoever opened it. `idle_s` is a setting; tests change the others.

    Attributes:
        head_s: until the head of a request is complete, seconds.
        head_bytes: of a head, of what stands between pieces of a body, of trailers, and of requests behind one whose
            answer is not complete.
        idle_s: between two requests, seconds.
        leftover_s: for the rest of a request that was answered before its end, seconds.
        pipelined: requests that wait for the answer to the one before them.
        handshake_s: until TLS is set up, seconds.
        probes_s: when a client that has ended its side is asked whether it reads, seconds after that.
    """

    head_s: float = 20.0
    head_bytes: int = 64 * 1024
    idle_s: float = 75.0
    leftover_s: float = 10.0
    pipelined: int = 16
    handshake_s: float = HANDSHAKE_S
    probes_s: Sequence[float] = (0.5, 2.0, 8.0, 32.0, 128.0)


class HttpServer:
    """Serve an application.

    Attributes:
        address: where, "host:port"; the port is known when it is bound.
    """

    def __init__(
        self,
        address: str,
        app: ASGIApp,
        context: ssl.SSLContext | None = None,
        limits: Limits = Limits(),
    ) -> None:
        """Make the server; with ``context`` calls are encrypted."""
        self.address = address
        self._is_draining = False
        make = partial(Connection, limits, lambda: self._is_draining)
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
        # What it logs as an error is a client that has gone; errors of calls are logged by `Endpoint`.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server = _Server(config)
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._listener: TlsListener | None = None
        if context is not None:
            state = self._server.server_state
            accept = partial(make, config=config, server_state=state, app_state={})
            self._listener = TlsListener(accept, context, limits.handshake_s)

    def bind(self) -> None:
        """Open the port.

        Raises:
            SetupError: it is taken, or the address is none of this machine.
        """
        host, port = listening_at(self.address, KEY, ", or null for no HTTP")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = opened = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
        if self._listener is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, STRANGER_BYTES)
        self.address = f"{self.address.rpartition(':')[0]}:{opened.getsockname()[1]}"

    async def start(self) -> None:
        """Accept calls, in the background."""
        assert self._socket is not None, "bound before"
        served = [self._socket] if self._listener is None else []
        self._serving = asyncio.ensure_future(self._server.serve(served))
        if self._listener is not None:
            self._listener.start(self._socket)

    def drain(self) -> None:
        """Close connections behind the answer that is under way, or the next one, so that clients go elsewhere."""
        self._is_draining = True
        for connection in self._server.server_state.connections:
            assert isinstance(connection, Connection), "it accepts no others"
            connection.drain()

    async def close(self) -> None:
        """Close the port; calls that still run get a second."""
        if self._listener is not None:
            self._listener.close()
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
        if self._socket is not None:
            self._socket.close()


def context_of(tls: TlsSettings) -> ssl.SSLContext | None:
    """Return what encrypts calls; None: they are not encrypted."""
    if tls.serving is None:
        return None
    client_cas = () if tls.client_ca is None else (tls.client_ca,)
    return server_context(tls.serving, client_cas, "http/1.1")


class _Server(uvicorn.Server):
    """Leave signals to the gateway."""

    def capture_signals(self) -> Any:
        return nullcontext()


class _Dropped(list[tuple[bytes, bytes]]):
    """Drop the headers that uvicorn appends behind a head."""

    @override
    def append(self, header: tuple[bytes, bytes]) -> None:
        pass


_TRAILERS: Final = _Dropped()


class _AnyLength(int):
    """How much of a body without a stated length is still to come: it may end anywhere."""

    @override
    def __lt__(self, other: int) -> bool:
        return False

    @override
    def __sub__(self, other: int) -> "_AnyLength":
        return self

    @override
    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class Connection(HttpToolsProtocol):
    """Limit what a connection sends, in bytes and time, and let a call cut it.

    1. One timer runs while a head is expected, or the rest of a request that was answered before its end. What a call
       reads has times of its own (`gateway.http.call`), and uvicorn ends idle connections.
    2. Bytes are counted from the last thing that was of use: the beginning of a request, or a piece of a body that is
       read. Requests behind one that is not answered yet count on.
    3. Trailers are dropped. An exception in a callback ends the parser, and with it the connection.
    4. To a client of HTTP/1.0, which knows no chunks, a body without a length ends with the connection. While the
       server drains, each connection ends with its answer.
    """

    def __init__(self, limits: Limits, is_draining: Callable[[], bool], **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._limits = limits
        self._is_draining = is_draining
        self._timer: asyncio.TimerHandle | None = None
        self._reads_head = False
        self._useless_bytes = 0
        self._is_narrow = False
        self._half_closed: HalfClosedWatch | None = None

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > connections_max():
            self._refuse(
                b"503 Service Unavailable",
                error_body(503, Overloaded.reason, "too many connections are open"),
                b"retry-after: 1\r\n",
            )
        shown = transport.get_extra_info("peercert") or {}
        self._names = [name for _, name in shown.get("subjectAltName", ())]
        self._is_narrow = self.scheme == "https"
        self._start_timer(self._limits.head_s)

    @override
    def data_received(self, data: bytes) -> None:
        self._useless_bytes += len(data)
        super().data_received(data)
        if self._useless_bytes > self._limits.head_bytes:
            self.transport.abort()
        elif self._timer is None and (self._reads_head or self._is_idle):
            # Idle: a line end in front of a request ends uvicorn's idle time, and begins no request.
            self._start_timer(self._limits.head_s)

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self.scope[CERTIFICATE_NAMES] = self._names  # type: ignore[typeddict-unknown-key]
        if self._is_narrow:
            self.scope[AUTHENTICATED] = self._widen  # type: ignore[typeddict-unknown-key]
        self._reads_head = True
        if self._is_idle:
            self._useless_bytes = 0

    def on_headers_complete(self) -> None:
        """End the head of a request, and call the application."""
        self._reads_head = False
        self._end_timer()
        values = sum(map(len, chain.from_iterable(self.headers)))
        if len(self.url) + values + _HEADER_COST * len(self.headers) > self._limits.head_bytes:
            raise ValueError("the head is too large")
        self.headers = _TRAILERS
        super().on_headers_complete()
        if self.scope["http_version"] != "1.1":
            self.cycle.keep_alive = self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _AnyLength()
        if self._is_draining():
            self.cycle.keep_alive = False
        if len(self.pipeline) > self._limits.pipelined:
            raise ValueError("too many requests wait for an answer")

    @override
    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if not self.pipeline:
            self._useless_bytes = 0

    def drain(self) -> None:
        """Close the connection behind the answer that is under way."""
        if not self._is_idle:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """End a request."""
        self._end_timer()
        super().on_message_complete()

    @override
    def eof_received(self) -> bool:  # type: ignore[override]
        """End the client's side; return whether its answers are still to be sent."""
        if self._is_idle or self.cycle.more_body or self.scheme == "https":
            return False  # TLS has no half of a connection
        self.cycle.keep_alive = False
        self._half_closed = HalfClosedWatch(self.transport, self._probe, self._limits.probes_s)
        return True

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_idle:
            if self.cycle.body:  # kept until the next request otherwise
                self.cycle.body = bytearray()
            if self.cycle.more_body:
                self._start_timer(self._limits.leftover_s)

    @override
    def send_400_response(self, msg: str) -> None:
        if self._is_idle:
            self._refuse(b"400 Bad Request", error_body(400, "REQUEST_INVALID", _NO_REQUEST))
        else:  # an answer is under way
            self.transport.abort()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        if self._half_closed is not None:
            self._half_closed.end()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        """Whether no request waits for its answer."""
        return self.cycle is None or self.cycle.response_complete

    def _widen(self) -> None:
        """Let the kernel receive more at a time."""
        self._is_narrow = False
        if self.transport.is_closing():
            return
        opened = self.transport.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CALLER_BYTES)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, CALLER_BYTES)

    def _probe(self) -> bytes:
        """Return what the client may get now; while requests wait behind another one, answers come."""
        return b"" if self.pipeline else probe_for(self.cycle)

    def _refuse(self, status: bytes, error: Any, headers: bytes = b"") -> None:
        request_id, body = new_request_id(), encode(error)
        _log.info("refused HTTP connection %s: %s (%s)", request_id, status.decode(), self.client)
        self.transport.write(_CLOSING % (status, request_id.encode(), len(body), headers, body))
        self.transport.close()

    def _start_timer(self, seconds: float) -> None:
        self._end_timer()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
