"""Servers and processes that the tests of this folder share."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.batcher.batchers import ECHO
from tests.batcher.gateway_double import GatewayDouble
from tests.support.triton import RunningTriton, running_triton


@pytest.fixture(scope="session")
def echo_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """A Triton that serves `ECHO`; tests leave it as they found it."""
    with running_triton(tmp_path_factory.mktemp("batcher_triton"), (ECHO,)) as server:
        yield server


@pytest.fixture
async def gateway(nats_url: str) -> AsyncIterator[GatewayDouble]:
    """A gateway on this test's own nats-server."""
    async with GatewayDouble.connected(nats_url) as double:
        yield double
