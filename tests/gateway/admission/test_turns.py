"""When bulk calls begin."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.admission import calls as module
from gateway.admission.calls import Turns
from sluice.errors import Overloaded

BOUND_S = 60.0


@asynccontextmanager
async def arriving(turns: Turns) -> AsyncIterator[None]:
    """Calls come in every turn of the loop."""

    async def arrive() -> None:
        while True:
            turns.arrived_at = time.monotonic()
            await asyncio.sleep(0)

    task = asyncio.create_task(arrive())
    try:
        yield
    finally:
        task.cancel()


async def test_bulk_calls_begin_in_order_when_nothing_comes() -> None:
    turns, begun = Turns(), []

    async def call(number: int) -> None:
        await turns.turn()
        begun.append(number)

    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*(call(number) for number in range(20)))
    assert begun == [*range(20)]


async def test_a_bulk_call_waits_while_calls_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", BOUND_S)
    turns = Turns()
    waiting = asyncio.create_task(turns.turn())
    async with arriving(turns):
        await asyncio.sleep(20 * module.MOMENT_S)
        assert not waiting.done()
    async with asyncio.timeout(BOUND_S):
        await waiting


async def test_a_few_begin_although_calls_come_all_the_time() -> None:
    turns = Turns()
    async with arriving(turns), asyncio.timeout(BOUND_S):
        for _ in range(3):
            await turns.turn()


async def test_a_call_that_has_gone_takes_no_turn() -> None:
    turns = Turns()
    gone, stays = asyncio.create_task(turns.turn()), asyncio.create_task(turns.turn())
    await asyncio.sleep(0)
    gone.cancel()
    async with asyncio.timeout(BOUND_S):
        await stays
    assert gone.cancelled()


async def test_too_many_are_refused() -> None:
    turns = Turns()
    waiting = asyncio.create_task(turns.turn())
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as refused:
        await turns.turn(1)
    assert refused.value.retry_after_s
    async with asyncio.timeout(BOUND_S):
        await waiting
