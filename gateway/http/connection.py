"""Limit what a client may send on one HTTP connection, in bytes and in time.

uvicorn and httptools bound neither what a client sends before its request is known nor what it sends after an answer.
`LimitedConnection` does, by overriding the callbacks of uvicorn's protocol class. This is the only file that relies on
uvicorn's internals: a named exception to the rule that libraries are used by their public interface
(docs/internals/decisions/0014-limits-of-an-http-connection.md).
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http.answers import encode
from gateway.http.call import ABORT, AUTHENTICATED, CERTIFICATE_NAMES, PROBE
from gateway.telemetry.request_log import new_request_id
from sluice.errors import Overloaded
from sluice.grpc_server import HANDSHAKE_S, connections_max
from sluice.openai.errors import error_body

logger = logging.getLogger(__name__)

CALLER_BYTES: Final = 1024 * 1024
"""Receive buffer in bytes of an encrypted connection once a call on it is authenticated; the kernel limits it to
`net.core.rmem_max`."""
_HEADER_COST: Final = 256
"""Bytes that a header counts beyond its text: the memory of its objects."""
_REFUSAL: Final = (
    b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"x-request-id: %b\r\ncontent-length: %d\r\n%b\r\n%b"
)
_BAD_HEAD: Final = "the request is not valid HTTP/1.1, or its head is above 64 KiB (a header counts 256 bytes more)"
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATE_S: Final = 0.05
"""How often the state of a half-closed connection is read, in seconds; a reset comes within a round trip."""
_CLOSED: Final = 7
"""TCP_CLOSE in Linux: the state after a reset."""


@dataclass(frozen=True)
class Limits:
    """Limits of every connection. `idle_s` is a setting, the others are constants that tests change.

    Attributes:
        head_s: Longest time for the head of a request, in seconds.
        head_bytes: Most bytes of a head, of trailers, of what stands between chunks of a body, and of pipelined
            requests.
        idle_s: Longest time between two requests, in seconds.
        leftover_s: Longest time for the rest of a request that was answered before its end, in seconds.
        pipelined: Most requests that wait for the answer to the one before them.
        handshake_s: Longest TLS handshake, in seconds.
        probes_s: When a client that has ended its side is probed, in seconds after that; see `HalfClosedWatch`.
        connections: Most connections at a time.
    """

    head_s: float = 20.0
    head_bytes: int = 64 * 1024
    idle_s: float = 75.0
    leftover_s: float = 10.0
    pipelined: int = 16
    handshake_s: float = HANDSHAKE_S
    probes_s: Sequence[float] = (0.5, 2.0, 8.0, 32.0, 128.0)
    connections: int = field(default_factory=connections_max)


class _Dropped(list[tuple[bytes, bytes]]):
    """A list of headers that stays empty: uvicorn appends trailers to the headers of the request."""

    @override
    def append(self, header: tuple[bytes, bytes]) -> None:
        pass


_TRAILERS: Final = _Dropped()


class _AnyLength(int):
    """The length of a body that may end anywhere, in place of the number of bytes that uvicorn counts down."""

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


class LimitedConnection(HttpToolsProtocol):
    """A connection with limits, which a call can abort.

    1. One timer runs while a head is expected, or the rest of a request that was answered before its end. Reading a
       body has its own timeouts (`gateway.http.call`), and uvicorn ends idle connections.
    2. Bytes count from the last useful ones: the start of a request, or a piece of a body that is read. Pipelined
       requests are not useful until the answer before them is complete.
    3. Trailers are dropped. An exception in a callback ends the parser, and so the connection.
    4. A client of HTTP/1.0 does not know chunks: a body without a length ends with the connection.
    5. While the server drains, each connection ends with its answer.
    """

    def __init__(
        self, limits: Limits, is_draining: Callable[[], bool], **uvicorn_options: Any
    ) -> None:
        super().__init__(**uvicorn_options)
        self._limits = limits
        self._is_draining = is_draining
        self._timer: asyncio.TimerHandle | None = None
        self._reads_head = False
        self._unused_bytes = 0
        self._has_small_buffer = False
        self._half_closed: HalfClosedWatch | None = None

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Refuse in words instead of closing: the client learns that it may come back.
        if len(self.connections) > self._limits.connections:
            self._refuse(
                b"503 Service Unavailable",
                error_body(503, Overloaded.reason, "too many connections are open"),
                b"retry-after: 1\r\n",
            )
        certificate = transport.get_extra_info("peercert") or {}
        self._certificate_names = [name for _, name in certificate.get("subjectAltName", ())]
        self._has_small_buffer = self.scheme == "https"
        self._start_timer(self._limits.head_s)

    @override
    def data_received(self, data: bytes) -> None:
        # Rule 2: useful bytes are taken off again by the callbacks of the parser.
        self._unused_bytes += len(data)
        super().data_received(data)
        if self._unused_bytes > self._limits.head_bytes:
            self.transport.abort()
        elif self._timer is None and (self._reads_head or self._is_idle):
            # Idle: a line end before a request stops uvicorn's idle timer but does not begin a request.
            self._start_timer(self._limits.head_s)

    def on_message_begin(self) -> None:
        """Start a request."""
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self.scope[CERTIFICATE_NAMES] = self._certificate_names  # type: ignore[typeddict-unknown-key]
        # The buffer grows when the caller is known; until then a stranger costs little memory.
        if self._has_small_buffer:
            self.scope[AUTHENTICATED] = self._widen  # type: ignore[typeddict-unknown-key]
        self._reads_head = True
        if self._is_idle:
            self._unused_bytes = 0

    def on_headers_complete(self) -> None:
        """Check the head of a request, and call the application."""
        self._reads_head = False
        self._end_timer()
        # Counted here as well as in `data_received`: a head that arrives in one piece is complete by then.
        values = sum(map(len, chain.from_iterable(self.headers)))
        if len(self.url) + values + _HEADER_COST * len(self.headers) > self._limits.head_bytes:
            raise ValueError("the head is too large")
        self.headers = _TRAILERS  # rule 3; the scope keeps the list of the head
        super().on_headers_complete()
        if self.scope["http_version"] != "1.1":  # rule 4
            self.cycle.keep_alive = self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _AnyLength()
        if self._is_draining():  # rule 5
            self.cycle.keep_alive = False
        if len(self.pipeline) > self._limits.pipelined:
            raise ValueError("too many requests wait for an answer")

    @override
    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if not self.pipeline:  # rule 2
            self._unused_bytes = 0

    def drain(self) -> None:
        """Close the connection after the current answer."""
        if not self._is_idle:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """End a request."""
        self._end_timer()
        super().on_message_complete()

    @override
    def eof_received(self) -> bool:  # type: ignore[override]
        """End the client's side; return whether to keep the connection open for answers that are still to be sent."""
        # Nothing waits for an answer, or its request can no longer be completed.
        if self._is_idle or self.cycle.more_body or self.scheme == "https":
            return False  # TLS has no half-closed connections
        self.cycle.keep_alive = False
        self._half_closed = HalfClosedWatch(self.transport, self._probe, self._limits.probes_s)
        return True

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_idle:
            if self.cycle.body:  # uvicorn would keep it until the next request
                self.cycle.body = bytearray()
            # The rest of the body is read and dropped, for a bounded time.
            if self.cycle.more_body:
                self._start_timer(self._limits.leftover_s)

    @override
    def send_400_response(self, msg: str) -> None:
        if self._is_idle:
            self._refuse(b"400 Bad Request", error_body(400, "REQUEST_INVALID", _BAD_HEAD))
        else:  # a status would end up inside of the current answer
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
        """Enlarge the receive buffer."""
        self._has_small_buffer = False
        if self.transport.is_closing():
            return
        raw = self.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CALLER_BYTES)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, CALLER_BYTES)

    def _probe(self) -> bytes:
        """Return what may be sent now to probe the client; may be empty. Pipelined requests are answered anyway."""
        return b"" if self.pipeline else _probe_in(self.cycle)

    def _refuse(self, status: bytes, error: Any, headers: bytes = b"") -> None:
        request_id, body = new_request_id(), encode(error)
        logger.info("refused HTTP connection %s: %s (%s)", request_id, status.decode(), self.client)
        self.transport.write(_REFUSAL % (status, request_id.encode(), len(body), headers, body))
        self.transport.close()

    def _start_timer(self, seconds: float) -> None:
        self._end_timer()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _probe_in(cycle: Any) -> bytes:
    """Return what may be sent before or inside of the answer of uvicorn's `cycle`; may be empty."""
    if cycle.response_started:
        comment: bytes = cycle.scope.get(PROBE, b"")
        if comment and cycle.chunked_encoding:
            return b"%x\r\n%b\r\n" % (len(comment), comment)
        return comment
    # Clients of HTTP/1.0 do not know interim responses.
    return _CONTINUE if cycle.scope["http_version"] == "1.1" else b""


class HalfClosedWatch:
    """The watch over one connection whose client has ended its side, until its last answer is complete.

    A client that has closed its connection and one that called `shutdown(SHUT_WR)` and still reads the answer send the
    same FIN. What the gateway sends next tells them apart: the kernel of a client that has closed answers with a reset.
    So the client is probed with something that has no meaning: an interim response before the head of its answer
    (RFC 9110, 15.2), or a comment in a stream of events.

    Args:
        transport: Transport of the connection; it is aborted when the client has gone.
        probe: Returns what may be sent now; may be empty.
        probes_s: When to send a probe, in seconds from now.
    """

    def __init__(
        self, transport: Any, probe: Callable[[], bytes], probes_s: Sequence[float]
    ) -> None:
        self._transport = transport
        self._socket = transport.get_extra_info("socket")
        self._probe = probe
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()
        self._due = list(probes_s)
        self._timer = self._loop.call_later(_STATE_S, self._check)

    def end(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def _check(self) -> None:
        if self._transport.is_closing():
            return
        if self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED:
            self._transport.abort()
            return
        if self._due and self._loop.time() - self._began_at >= self._due[0]:
            del self._due[0]
            if probe := self._probe():
                self._transport.write(probe)
        self._timer = self._loop.call_later(_STATE_S, self._check)
