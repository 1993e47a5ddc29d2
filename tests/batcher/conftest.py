"""Servers and processes that the tests of this folder share."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.batcher.batchers import ECHO
from tests.batcher.gateway_double import GatewayDouble
from tests.support.triton import TritonServer, running_triton


@pytest.fixture(scope="session")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A Triton that serves `ECHO`; tests leave it as they found it."""
    with running_triton(tmp_path_factory.mktemp("batcher_triton"), (ECHO,)) as server:
        yield server


@pytest.fixture
async def echo_triton(echo_server: TritonServer) -> TritonServer:
    """The shared Triton; tests cut its streams, so like a supervisor this starts a crashed one again."""
    await echo_server.start()
    return echo_server


@pytest.fixture
async def gateway(nats_url: str) -> AsyncIterator[GatewayDouble]:
    """A gateway on this test's own nats-server."""
    async with GatewayDouble.connected(nats_url) as double:
        yield double
