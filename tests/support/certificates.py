"""Certificates and a NATS with a user a process, for tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from nats.aio.client import Client

from sluice.settings import NatsSettings
from sluice.startup import free_port
from sluice.wire.connection import connect, disconnect
from sluice.wire.permissions import OPERATOR, Users
from supervisor.certificates import Authority
from supervisor.nats import NatsConfig, nats_command, wait_for_nats
from tests.support.nats import START_S, nats_process_of


@asynccontextmanager
async def secured_nats(
    folder: Path, users: Users, input_streams: tuple[str, ...] = ()
) -> AsyncIterator[tuple[str, Authority]]:
    """A server that knows ``users`` and the operator, with the authority that has given them certificates."""
    authority = Authority(folder / "tls")
    users = {**users, OPERATOR: (OPERATOR, OPERATOR)}
    authority.ensure(("nats", *users))
    config = NatsConfig(
        free_port(),
        folder / "store",
        tls=authority.of("nats"),
        users=users,
        input_streams=input_streams,
    )
    command = nats_command(config, folder / "nats.conf")
    with nats_process_of(command, folder):
        await wait_for_nats(config.url, START_S, authority.of(OPERATOR))
        yield config.url, authority


@asynccontextmanager
async def connected(
    url: str, authority: Authority, kind: str, process: str
) -> AsyncIterator[Client]:
    """A connection of ``process``, by its certificate."""
    settings = NatsSettings(url=url)
    client = await connect(settings, kind, process, lambda: None, authority.of(process))
    try:
        yield client
    finally:
        await disconnect(client)
