"""Tell a client that has closed its connection from one that has only ended its side of it.

Both send the same FIN: a client may call `shutdown(SHUT_WR)` after its request and still read the answer. What the
gateway sends next tells them apart, because the kernel of a client that has closed answers with a reset. So the client
is probed with something that has no meaning: an interim response before the head of its answer (RFC 9110, 15.2), or a
comment in a stream of events.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

PROBE: Final = "sluice.probe"
"""Key in the ASGI scope: what a stream may have between two of its events."""
_CHECK_S: Final = 0.05
"""How often the state of the connection is read, in seconds; a reset comes within a round trip."""
_CLOSED: Final = 7
"""TCP_CLOSE in Linux: the state after a reset."""


class HalfClosedWatch:
    """The watch over one connection whose client has ended its side, until its last answer is complete.

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
        self._timer = self._loop.call_later(_CHECK_S, self._check)

    def end(self) -> None:
        """Stop watching."""
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


def _state_of(connected: Any) -> int:
    """Return the state of a TCP connection, as Linux numbers them."""
    return int(connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0])
