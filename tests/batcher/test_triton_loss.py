"""Triton or its Python process dies under running requests: they go on with their tokens as prefix."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sluice.internal.v1.task_pb2 import Task
from tests.batcher.batchers import ECHO, running_batcher, settings_of
from tests.batcher.gateway_double import GatewayDouble, echo_of
from tests.support.triton import TritonServer

LONG = 1_500
pytestmark = pytest.mark.long


@pytest.fixture
async def server(
    nats_url: str, gateway: GatewayDouble, tmp_path: Path
) -> AsyncIterator[TritonServer]:
    """A Triton of this test with a batcher in front of it."""
    triton = TritonServer(tmp_path / "triton", (ECHO,))
    try:
        await triton.start()
        async with running_batcher(settings_of(nats_url, triton.address, ECHO)):
            await gateway.batcher_live()
            yield triton
    finally:
        triton.kill()


async def running(gateway: GatewayDouble, count: int) -> list[Task]:
    tasks = [await gateway.ask(prompt=range(n, 99), max_tokens=LONG) for n in range(1, count + 1)]
    for task in tasks:
        await gateway.has_tokens(task, 1)
    return tasks


async def until_attempt(gateway: GatewayDouble, tasks: list[Task], attempt: int) -> None:
    answers = [gateway.answers[task.request_id] for task in tasks]
    await gateway.until(lambda: all(one.frames[-1].attempt >= attempt for one in answers))


async def test_rows_survive_the_death_of_the_stub_and_of_the_server(
    gateway: GatewayDouble, server: TritonServer
) -> None:
    tasks = await running(gateway, 3)
    # Nothing tells the batcher of the stub's end until the server is killed, as the supervisor does it.
    server.signal_stub(signal.SIGKILL)
    server.kill()
    await server.start()
    await until_attempt(gateway, tasks, 1)
    server.kill()
    await gateway.until(lambda: not gateway.reports[-1].models[0].workers)
    await server.start()
    for task in tasks:
        assert (await gateway.finished(task)).token_ids == echo_of(task)
    # Sent to three workers, one after the other.
    await until_attempt(gateway, tasks, 2)


async def test_rows_survive_that_the_python_process_stands_still(
    gateway: GatewayDouble, server: TritonServer
) -> None:
    """Triton itself does not survive streams that are cancelled meanwhile."""
    tasks = await running(gateway, 8)
    for stops in (1, 2):
        server.signal_stub(signal.SIGSTOP)
        await gateway.until(lambda: not gateway.reports[-1].models[0].workers)
        # Triton takes a process that did not answer for a second for dead.
        heard = len(gateway.reports)
        await gateway.until(lambda heard=heard: len(gateway.reports) > heard + 8)  # type: ignore[misc]
        server.signal_stub(signal.SIGCONT)
        await until_attempt(gateway, tasks, stops)
    for task in tasks:
        assert (await gateway.finished(task)).token_ids == echo_of(task)
