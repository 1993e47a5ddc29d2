"""Tell a client that has closed its connection from one that has only ended its side of it.

Both send the same FIN: ``shutdown(SHUT_WR)`` behind a request says that no other will follow, and its answer is read.
What the gateway sends next tells them apart, as the kernel of a client that has closed answers with a reset. So the
client gets something that means nothing to it: an interim response before the head of its answer (RFC 9110, 15.2), or a
comment in a stream of events.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

PROBE: Final = "sluice.probe"
"""In the scope: what a stream may have between two of its events."""
_CHECK_S: Final = 0.05
"""How often the state of the connection is looked at, seconds; a reset comes within a round trip."""
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSED: Final = 7
"""TCP_CLOSE of Linux: the state after a reset."""


class HalfClosedWatch:
    """Watches one connection whose client has ended its side, until its last answer is complete.

    Args:
        transport: Of the connection; it is aborted when the client has gone.
        probe: Returns what may be sent now; empty: nothing.
        probes_s: When something is sent, seconds from now.
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
        self._timer = self._loop.call_later(_CHECK_S, self._check)

    def end(self) -> None:
        """Watch no more."""
        self._timer.cancel()

    def _check(self) -> None:
        if self._transport.is_closing():
            return
        if _state_of(self._socket) == _CLOSED:
            self._transport.abort()
            return
        if self._due and self._loop.time() - self._began_at >= self._due[0]:
            del self._due[0]
            if probe := self._probe():
                self._transport.write(probe)
        self._timer = self._loop.call_later(_CHECK_S, self._check)


def probe_for(cycle: Any) -> bytes:
    """Return what a client may get before or inside of the answer of uvicorn's ``cycle``; empty: nothing."""
    if cycle.response_started:
        comment: bytes = cycle.scope.get(PROBE, b"")
        if comment and cycle.chunked_encoding:
            return b"%x\r\n%b\r\n" % (len(comment), comment)
        return comment
    # A client of HTTP/1.0 knows no interim responses.
    return _CONTINUE if cycle.scope["http_version"] == "1.1" else b""


def _state_of(connected: Any) -> int:
    """Return the state of a TCP connection, as Linux numbers them."""
    return int(connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0])
