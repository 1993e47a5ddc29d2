"""Triton or its Python process dies under running rows: they go on with their tokens as prefix."""

import signal
from pathlib import Path

import pytest

from tests.batcher.batchers import ECHO, running_batcher, settings_of
from tests.batcher.gateway_double import GatewayDouble, echo_of
from tests.batcher.tritons import MortalTriton

LONG = 1_500


@pytest.mark.long
async def test_rows_survive_the_death_of_the_stub_and_of_the_server(
    nats_url: str, gateway: GatewayDouble, tmp_path: Path
) -> None:
    async with (
        MortalTriton.running(tmp_path / "triton", ECHO) as server,
        running_batcher(settings_of(nats_url, server.address, ECHO)),
    ):
        await gateway.batcher_live()
        tasks = [await gateway.ask(prompt=range(n, 99), max_tokens=LONG) for n in range(1, 4)]
        for task in tasks:
            await gateway.has_tokens(task, 1)
        # Nothing tells the batcher of the stub's end until the server is killed, as the supervisor does it.
        server.signal_stub(signal.SIGKILL)
        await server.restart()
        await gateway.until(
            lambda: all(gateway.answers[t.request_id].frames[-1].attempt for t in tasks)
        )
        server.kill()
        await gateway.until(lambda: not gateway.reports[-1].models[0].workers)
        await server.start()
        for task in tasks:
            answer = await gateway.finished(task, 30.0)
            assert answer.token_ids == echo_of(task)
        # Sent to three workers, one after the other.
        assert all(gateway.answers[t.request_id].attempt >= 2 for t in tasks)


@pytest.mark.long
async def test_rows_survive_that_the_python_process_stands_still(
    nats_url: str, gateway: GatewayDouble, tmp_path: Path
) -> None:
    """Triton itself does not survive streams that are cancelled meanwhile."""
    async with (
        MortalTriton.running(tmp_path / "triton", ECHO) as server,
        running_batcher(settings_of(nats_url, server.address, ECHO)),
    ):
        await gateway.batcher_live()
        tasks = [await gateway.ask(prompt=range(n, 99), max_tokens=LONG) for n in range(1, 9)]
        for task in tasks:
            await gateway.has_tokens(task, 1)
        for stops in (1, 2):
            server.signal_stub(signal.SIGSTOP)
            await gateway.until(lambda: not gateway.reports[-1].models[0].workers)
            # Triton takes a process that did not answer for a second for dead.
            heard = len(gateway.reports)
            await gateway.until(lambda heard=heard: len(gateway.reports) > heard + 8)  # type: ignore[misc]
            server.signal_stub(signal.SIGCONT)
            await gateway.until(
                lambda stops=stops: all(  # type: ignore[misc]
                    gateway.answers[task.request_id].frames[-1].attempt == stops for task in tasks
                )
            )
        for task in tasks:
            assert (await gateway.finished(task, 30.0)).token_ids == echo_of(task)
