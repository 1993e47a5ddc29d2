"""A process's connection to NATS: it reconnects forever, and reports when messages may have been lost."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError, SlowConsumerError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import APIError, ServiceUnavailableError

from sluice.settings import NatsSettings
from sluice.wire.jetstream import ensure_streams

_log = logging.getLogger(__name__)

PENDING_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes that may wait to be written while NATS is away; the rest is dropped, and receivers ask for it again."""
CLOSE_S: Final = 2.0
JETSTREAM_S: Final = 3.0
"""How long a process that starts waits for JetStream, seconds."""
_RECONNECT_WAIT_S: Final = 0.25
_RETRY_S: Final = 0.05


class NatsUnreachable(ConnectionError):
    """No NATS server with JetStream answered at the start; the message says where and what to do."""


class CancellableClient(Client):
    """A client whose requests and flushes never hide a cancel.

    In Python 3.11 ``asyncio.wait_for`` returns its result when result and cancel come in one turn of the loop, and the
    task would run on as if nobody had cancelled it (https://github.com/python/cpython/issues/86296; 3.12 does not).
    """

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """As nats-py's."""
        with _cancels_seen():
            return await super().request(subject, payload, timeout, old_style, headers)

    async def flush(self, timeout: int = 10) -> None:
        """As nats-py's."""
        with _cancels_seen():
            await super().flush(timeout)


@contextlib.contextmanager
def _cancels_seen() -> Iterator[None]:
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    yield
    if task.cancelling() > before:
        raise asyncio.CancelledError


async def connect(
    settings: NatsSettings, name: str, on_loss: Callable[[], None], ping_interval_s: int
) -> Client:
    """A connection to ``settings.url`` whose streams exist.

    Args:
        name: what the server's monitoring calls the connection.
        on_loss: called when messages to this process may have been dropped.
        ping_interval_s: a dead link is noticed after two pings without an answer.

    Raises:
        NatsUnreachable: no answer within ``settings.connect_s`` seconds.
    """
    url, connect_s = settings.url, settings.connect_s
    assert url is not None, "checked before"
    client = CancellableClient()

    async def on_error(error: Exception) -> None:
        # Denied publishes, slow consumers and broken links arrive here, and only here.
        # Without a link every failed try to reconnect does so too: those are not worth a line.
        level = logging.WARNING if client.is_connected else logging.DEBUG
        _log.log(level, "NATS: %s: %s", type(error).__name__, error)
        if isinstance(error, SlowConsumerError):
            on_loss()
        # In Python 3.11 a connection that is refused at the very moment of the cancel hides it.
        if bound.expired():
            raise TimeoutError

    async def on_reconnected() -> None:
        _log.info("NATS: connected again")
        on_loss()

    async def on_disconnected() -> None:
        if not (client.is_draining or client.is_closed):
            _log.warning("NATS: connection lost")

    try:
        async with asyncio.timeout(connect_s) as bound:
            await client.connect(
                url.split(","),
                name=name,
                max_reconnect_attempts=-1,
                reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]  # fractions work
                ping_interval=ping_interval_s,
                max_outstanding_pings=2,
                pending_size=PENDING_BYTES_MAX,
                error_cb=on_error,
                reconnected_cb=on_reconnected,
                disconnected_cb=on_disconnected,
            )
            await _ensure_streams(client, settings)
    except APIError as error:
        await client.close()
        raise NatsUnreachable(f"JetStream of NATS at {url} refuses its streams: {error}") from error
    except (TimeoutError, OSError, NatsError) as error:
        await client.close()
        raise NatsUnreachable(
            f"NATS at {url} does not answer within {connect_s:g} s; start one or set nats.url"
        ) from error
    return client


async def disconnect(client: Client) -> None:
    """Sends what waits to be sent if there is a server to take it, and closes the connection."""
    if client.is_connected:
        try:
            await settle(client, CLOSE_S)
        except (TimeoutError, NatsError, OSError, RuntimeError):  # of a socket that has just closed
            _log.warning("NATS: the last messages may not have been sent")
    # Between two tries to reconnect nats-py writes what waits to a transport that is closed; uvloop raises.
    with contextlib.suppress(RuntimeError):
        await client.close()


async def settle(client: Client, timeout_s: float) -> None:
    """Returns when the server has worked through everything sent so far.

    nats-py 2.16 writes the PING of ``flush`` straight to the socket, ahead of commands that wait for its flusher. So
    the first flush proves nothing about them. While it waits the flusher runs; the second PING is behind them.

    Raises:
        TimeoutError, NatsError: the server did not answer.
    """
    async with asyncio.timeout(timeout_s):
        await client.flush()
        await client.flush()


async def _ensure_streams(client: Client, settings: NatsSettings) -> None:
    """A server takes connections a moment before its JetStream answers.

    A cluster may have no leader for longer; only bulk tasks need the streams, and batchers create them later.
    """
    try:
        async with asyncio.timeout(JETSTREAM_S):
            while True:
                try:
                    return await ensure_streams(client.jetstream(), settings)
                except (NoRespondersError, ServiceUnavailableError, NatsTimeoutError):
                    await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        _log.warning("JetStream of NATS does not answer: bulk tasks have to wait")
