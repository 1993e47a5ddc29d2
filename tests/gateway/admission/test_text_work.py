"""Short texts are worked on in the event loop, long ones in threads; tenants take turns for both."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from gateway.admission.turns import CHAR_SHARE, LOOP_COST, TURN_COST, LoopTurns, TextThreads

BOUND_S = 30.0


@pytest.fixture
async def threads() -> AsyncIterator[TextThreads]:
    made = TextThreads("test", LoopTurns(LOOP_COST), 1, 1)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("texts", "in_loop"),
    [
        (["x" * CHAR_SHARE * (LOOP_COST - TURN_COST)], True),
        (["x" * CHAR_SHARE * LOOP_COST], False),
        (["x" * CHAR_SHARE * LOOP_COST + "x"], False),
        (["7" * (LOOP_COST - TURN_COST)], False),
        (["7" * (LOOP_COST // 2)], True),
        (["ab@example.com " * 100], False),
        (["ж" * (LOOP_COST - TURN_COST)], True),
        (["ж" * LOOP_COST], False),
        ([""] * (LOOP_COST // TURN_COST + 1), False),
    ],
)
async def test_long_texts_leave_the_event_loop(
    texts: list[str], in_loop: bool, threads: TextThreads
) -> None:
    async with asyncio.timeout(BOUND_S):
        worked_in = await threads.work_on(texts, "acme", threading.current_thread)
    assert (worked_in is threading.current_thread()) is in_loop


async def test_loop_turns_let_other_tenants_run_between() -> None:
    turns, order = LoopTurns(100), list[str]()

    async def work(tenant: str) -> None:
        await turns.take(tenant, 100)
        order.append(tenant)

    loud = [asyncio.ensure_future(work("loud")) for _ in range(50)]
    quiet = asyncio.ensure_future(work("quiet"))
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*loud, quiet)
    assert order.index("quiet") <= 1
    assert len(order) == 51


async def test_loop_turns_run_one_size_of_a_tenant_in_a_pass() -> None:
    turns, passes, done = LoopTurns(100), 0, list[int]()

    def count() -> None:
        nonlocal passes
        passes += 1
        loop.call_soon(count)

    loop = asyncio.get_running_loop()
    loop.call_soon(count)

    async def work() -> None:
        await turns.take("loud", 50)
        done.append(passes)

    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*(work() for _ in range(20)))
    assert max(done.count(at) for at in done) == 2


async def test_loop_turns_of_callers_that_left_are_skipped() -> None:
    turns = LoopTurns(1)
    await turns.take("a", 1)
    gone = [asyncio.ensure_future(turns.take("a", 1)) for _ in range(5)]
    stays = asyncio.ensure_future(turns.take("a", 1))
    await asyncio.sleep(0)
    for waiting in gone:
        waiting.cancel()
    async with asyncio.timeout(BOUND_S):
        await stays
    assert sum(waiting.cancelled() for waiting in gone) >= len(gone) - 1, "one had its turn"
