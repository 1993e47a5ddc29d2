"""Servers and processes that the tests of this folder share."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.batcher.batchers import ECHO
from tests.batcher.gateway_double import GatewayDouble
from tests.batcher.tritons import MortalTriton


@pytest.fixture(scope="session")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalTriton]:
    """A Triton that serves `ECHO`; tests leave it as they found it."""
    server = MortalTriton(tmp_path_factory.mktemp("batcher_triton"), ECHO)
    try:
        asyncio.run(server.start())
        yield server
    finally:
        # Not asked to end: rows of killed batchers may make that take long.
        server.kill()


@pytest.fixture
async def echo_triton(echo_server: MortalTriton) -> MortalTriton:
    """The shared Triton; tests cut its streams, so like a supervisor this starts a crashed one again."""
    if not echo_server.alive:
        await echo_server.restart()
    return echo_server


@pytest.fixture
async def gateway(nats_url: str) -> AsyncIterator[GatewayDouble]:
    """A gateway on this test's own nats-server."""
    async with GatewayDouble.connected(nats_url) as double:
        yield double
