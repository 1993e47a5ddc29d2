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
        self._handshakes: dict[asyncio.Task[None], None] = {}
        """Running handshakes, oldest first."""
        self._accepting: asyncio.Task[None] | None = None

    def start(self, listening: socket.socket) -> None:
        """Accept connections to `listening`."""
        listening.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(listening))

    def close(self) -> None:
        """Stop accepting, and end running handshakes. The socket stays open."""
        if self._accepting is not None:
            self._accepting.cancel()
        for task in self._handshakes:
            task.cancel()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _address = await loop.sock_accept(listening)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                logger.error(
                    "accept failed on the HTTP port: %s (next try in %g s)", error, _RETRY_S
                )
                await asyncio.sleep(_RETRY_S)
                continue
            if len(self._handshakes) >= self._handshakes_max:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()
            task = asyncio.create_task(self._set_up(accepted))
            self._handshakes[task] = None
            task.add_done_callback(partial(self._end, accepted))
            await asyncio.sleep(0)  # many connections at a time leave room for calls

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
