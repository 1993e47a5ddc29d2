"""When bulk calls begin."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.admission.class_limiter import BulkPacer
from sluice.errors import Overloaded

BOUND_S = 60.0


@asynccontextmanager
async def arrivals(pacer: BulkPacer) -> AsyncIterator[None]:
    """Let calls arrive in every pass of the loop."""

    async def arrive() -> None:
        while True:
            pacer.arrived_at = time.monotonic()
            await asyncio.sleep(0)

    task = asyncio.create_task(arrive())
    try:
        yield
    finally:
        task.cancel()


async def test_bulk_calls_begin_in_order_on_a_calm_loop() -> None:
    pacer, begun = BulkPacer(), []

    async def call(number: int) -> None:
        await pacer.wait()
        begun.append(number)

    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*(call(number) for number in range(20)))
    assert begun == [*range(20)]


async def test_bulk_call_waits_while_calls_arrive() -> None:
    pacer = BulkPacer(busy_moments_max=1_000_000)
    waiting = asyncio.create_task(pacer.wait())
    async with arrivals(pacer):
        await asyncio.sleep(0.02)
        assert not waiting.done()
    async with asyncio.timeout(BOUND_S):
        await waiting


async def test_bulk_calls_begin_although_calls_always_arrive() -> None:
    pacer = BulkPacer()
    async with arrivals(pacer), asyncio.timeout(BOUND_S):
        for _ in range(3):
            await pacer.wait()


async def test_cancelled_call_is_skipped() -> None:
    pacer = BulkPacer()
    gone, stays = asyncio.create_task(pacer.wait()), asyncio.create_task(pacer.wait())
    await asyncio.sleep(0)
    gone.cancel()
    async with asyncio.timeout(BOUND_S):
        await stays
    assert gone.cancelled()


async def test_too_many_waiting_calls_are_refused() -> None:
    pacer = BulkPacer(waiting_max=1)
    waiting = asyncio.create_task(pacer.wait())
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as refused:
        await pacer.wait()
    assert refused.value.metadata["limit"] == "bulk_waiting"
    assert refused.value.retry_after_s
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(waiting, pacer.wait(is_bounded=False))
