"""A point in time on a NATS connection: everything sent before it has reached the server."""

import asyncio

from nats.aio.client import Client


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
