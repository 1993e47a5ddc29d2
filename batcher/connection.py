"""The connection to NATS, which is made anew for ever once it stood."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import nats.errors
from nats.aio.client import Client

log = logging.getLogger(__name__)

RECONNECT_WAIT_S: Final = 0.25
PING_INTERVAL_S: Final = 10
"""A dead link is noticed after two unanswered pings."""
PENDING_BYTES_MAX: Final = 16 * 1024 * 1024
"""What may wait to be written while NATS is away; beyond it frames are dropped, and the gateways ask for them again."""


DRAIN_S: Final = 3.0


class NatsUnreachable(ConnectionError):
    """No NATS server answered at the start; the message says where and what to do."""


async def connect(
    url: str, connect_s: float, name: str, on_reconnect: Callable[[], Awaitable[None]]
) -> Client:
    """Connects to NATS, waiting at most ``connect_s`` seconds.

    Raises:
        NatsUnreachable: nothing answered in time.
    """

    client, last = Client(), ""

    async def on_error(error: Exception) -> None:
        nonlocal last
        # While the server is away, every try fails with the same words.
        if str(error) != last:
            last = str(error)
            log.warning("nats: %s", error)

    async def on_disconnect() -> None:
        if not (client.is_draining or client.is_closed):
            log.warning("nats: connection lost")

    async def reconnected() -> None:
        nonlocal last
        last = ""
        log.info("nats: connected again")
        await on_reconnect()

    try:
        async with asyncio.timeout(connect_s):
            await client.connect(
                url,
                name=name,
                error_cb=on_error,
                disconnected_cb=on_disconnect,
                reconnected_cb=reconnected,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # slept as it is
                ping_interval=PING_INTERVAL_S,
                pending_size=PENDING_BYTES_MAX,
            )
    except (TimeoutError, OSError, nats.errors.Error) as error:
        raise NatsUnreachable(
            f"no NATS server at {url} after {connect_s:g} s; start one or set nats.url"
        ) from error
    return client


async def disconnect(nats_client: Client) -> None:
    """Sends what waits to be sent if there is a server to take it, and closes the connection."""
    try:
        async with asyncio.timeout(DRAIN_S):
            await nats_client.drain()
    except (TimeoutError, nats.errors.Error):
        # Between two tries to reconnect nats-py writes what waits to a transport that is closed; uvloop minds.
        with contextlib.suppress(RuntimeError):
            await nats_client.close()
