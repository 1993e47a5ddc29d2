"""The gateway's connection to NATS: reconnects for ever, and says when something may have been lost."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError, SlowConsumerError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import ServiceUnavailableError

from sluice.processes.errors import SetupError
from sluice.settings import NatsSettings
from sluice.wire.jetstream import ensure_streams
from sluice.wire.limits import TasksLimits

_log = logging.getLogger(__name__)

_RECONNECT_WAIT_S: Final = 0.25
_RETRY_S: Final = 0.05
# A dead link is noticed after two missed pings.
_PING_INTERVAL_S: Final = 2


async def connect(settings: NatsSettings, name: str, on_loss: Callable[[], None]) -> Client:
    """A connection to ``settings.url`` whose streams exist.

    ``on_loss`` is called when messages to this process may have been dropped.

    Raises:
        SetupError: nobody answered within ``settings.connect_s`` seconds.
    """
    url, connect_s = settings.url, settings.connect_s
    assert url is not None, "main checks it"
    client = Client()

    async def on_error(error: Exception) -> None:
        # Denied publishes, slow consumers and broken links arrive here, and only here.
        # Without a link every failed try to reconnect does so too: those are not worth a line.
        level = logging.WARNING if client.is_connected else logging.DEBUG
        _log.log(level, "NATS: %s: %s", type(error).__name__, error)
        if isinstance(error, SlowConsumerError):
            on_loss()

    async def on_reconnected() -> None:
        _log.info("NATS: connected again")
        on_loss()

    async def on_disconnected() -> None:
        if not client.is_closed:
            _log.warning("NATS: connection lost")

    try:
        async with asyncio.timeout(connect_s):
            await client.connect(
                url,
                name=name,
                max_reconnect_attempts=-1,
                reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]  # fractions work
                ping_interval=_PING_INTERVAL_S,
                max_outstanding_pings=2,
                error_cb=on_error,
                reconnected_cb=on_reconnected,
                disconnected_cb=on_disconnected,
            )
            await _ensure_streams(client, settings.tasks_limits)
    except (TimeoutError, OSError, NatsError) as error:
        await client.close()
        raise SetupError(
            f"NATS with JetStream at {url} does not answer within {connect_s:g} s; start it or set nats.url"
        ) from error
    return client


async def _ensure_streams(client: Client, limits: TasksLimits) -> None:
    """A server takes connections a moment before its JetStream answers."""
    while True:
        try:
            return await ensure_streams(client.jetstream(), limits)
        except (NoRespondersError, ServiceUnavailableError, NatsTimeoutError):
            await asyncio.sleep(_RETRY_S)
