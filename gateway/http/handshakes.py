"""Accept encrypted connections, with limits on the number and the time of TLS handshakes.

An asyncio server reports a connection only after its handshake, so nobody would count connections that never begin TLS.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Final

logger = logging.getLogger(__name__)

_ACCEPTS: Final = 64
"""Most connections that are accepted in one turn of the event loop."""
_RETRY_S: Final = 0.1
"""Pause after a failed accept, in seconds: while no file descriptor is free, the next one fails too."""


class TlsListener:
    """A listening socket whose connections go to a protocol after their TLS handshake.

    When too many handshakes run, the next connection ends the oldest: clients that never begin TLS keep nobody out.
    """

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        handshake_s: float,
        handshakes_max: int,
    ) -> None:
        self._make = make
        self._context = context
        self._handshake_s = handshake_s
        self._handshakes_max = handshakes_max
        self._socket: socket.socket | None = None
        self._handshakes: dict[asyncio.Task[None], None] = {}
        """Running handshakes, oldest first."""
        self._retry: asyncio.TimerHandle | None = None

    def start(self, listening: socket.socket) -> None:
        """Accept connections to `listening`."""
        listening.setblocking(False)
        self._socket = listening
        asyncio.get_running_loop().add_reader(listening.fileno(), self._accept)

    def close(self) -> None:
        """Stop accepting, and end running handshakes. The socket stays open."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket = None
        if self._retry is not None:
            self._retry.cancel()
        for task in self._handshakes:
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
        logger.error("accept failed on the HTTP port: %s (next try in %g s)", error, _RETRY_S)
        listening, loop = self._socket, asyncio.get_running_loop()
        assert listening is not None, "an accept of it failed"
        loop.remove_reader(listening.fileno())
        self._retry = loop.call_later(_RETRY_S, self.start, listening)

    def _add(self, accepted: socket.socket) -> None:
        if len(self._handshakes) >= self._handshakes_max:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._set_up(accepted))
        self._handshakes[task] = None
        task.add_done_callback(partial(self._end, accepted))

    def _end(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        if task.cancelled():  # perhaps before it ran, so `_set_up` cannot close the socket
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
            logger.debug("TLS handshake failed on the HTTP port: %s", error)
            accepted.close()
