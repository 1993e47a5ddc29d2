"""Accept connections that are encrypted: handshakes are counted from the accept, and have a short time.

A server of the event loop tells its application of a connection when the handshake is over, so connections that never
begin TLS would be counted by nobody.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Final

from sluice.grpc_server import connections_max

_log = logging.getLogger(__name__)

_ACCEPTS: Final = 64
"""Connections that are accepted in one turn of the loop."""
_RETRY_S: Final = 0.1
"""Pause after a failed accept, seconds: without a free file the next one fails too."""


class TlsListener:
    """Accept connections, and hand them to a protocol when TLS is set up.

    A quarter of `connections_max` may be setting it up at a time. One more ends the oldest, so those that never begin
    keep nobody out.
    """

    def __init__(
        self, make: Callable[[], asyncio.Protocol], context: ssl.SSLContext, handshake_s: float
    ) -> None:
        self._make = make
        self._context = context
        self._handshake_s = handshake_s
        self._socket: socket.socket | None = None
        self._setting_up: dict[asyncio.Task[None], None] = {}
        """The oldest first."""
        self._retry: asyncio.TimerHandle | None = None

    def start(self, listening: socket.socket) -> None:
        """Accept what comes to ``listening``."""
        listening.setblocking(False)
        self._socket = listening
        asyncio.get_running_loop().add_reader(listening.fileno(), self._accept)

    def close(self) -> None:
        """Accept nothing more, and end handshakes. The socket stays open."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket = None
        if self._retry is not None:
            self._retry.cancel()
        for task in self._setting_up:
            task.cancel()

    def _accept(self) -> None:
        assert self._socket is not None, "a reader of it called"
        for _ in range(_ACCEPTS):
            try:
                accepted, _address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            self._add(accepted)

    def _pause(self, error: OSError) -> None:
        _log.error("accept failed on the HTTP port: %s (next try in %g s)", error, _RETRY_S)
        listening, loop = self._socket, asyncio.get_running_loop()
        assert listening is not None, "an accept of it failed"
        loop.remove_reader(listening.fileno())
        self._retry = loop.call_later(_RETRY_S, self.start, listening)

    def _add(self, accepted: socket.socket) -> None:
        if len(self._setting_up) >= max(connections_max() // 4, 1):
            oldest = next(iter(self._setting_up))
            del self._setting_up[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._set_up(accepted))
        self._setting_up[task] = None
        task.add_done_callback(partial(self._end, accepted))

    def _end(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._setting_up.pop(task, None)
        if task.cancelled():  # perhaps before it began
            accepted.close()

    async def _set_up(self, accepted: socket.socket) -> None:
        try:
            accepted.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self._handshake_s,
                ssl_shutdown_timeout=self._handshake_s,
            )
        except OSError as error:  # TLS errors and timeouts are among them
            _log.debug("TLS handshake failed on the HTTP port: %s", error)
            accepted.close()
