"""What arrives and what calls keep is bounded for each tenant, and one tenant's bound is no other's."""

import asyncio
from collections import Counter

import pytest

from gateway.admission.arrivals import ALONE_BURST, ARRIVALS, BURST, RECEIVE_S, Arrivals, CallTurns
from gateway.admission.class_limiter import ClassLimiter
from gateway.identity.authenticator import Authenticator
from sluice.errors import Overloaded
from sluice.settings import CallShares, IdentitySettings

MIB = 1024 * 1024
BOUND_S = 60.0


def arrivals(max_message_bytes: int = MIB, receive_s: float = RECEIVE_S) -> Arrivals:
    authenticator, limiter = Authenticator(IdentitySettings()), ClassLimiter(8, CallShares())
    return Arrivals(authenticator, limiter, max_message_bytes, receive_s=receive_s)


@pytest.mark.parametrize(
    ("max_message_bytes", "receiving", "held"),
    [
        (MIB // 4, 64, 128 * MIB),
        (MIB, 64, 128 * MIB),
        (2 * MIB, 32, 128 * MIB),
        (64 * MIB // 10 + 1, 9, 128 * MIB),
        (16 * MIB, 4, 128 * MIB),
        (32 * MIB, 4, 128 * MIB),
        (48 * MIB, 4, 192 * MIB),
    ],
)
def test_bounds_by_the_largest_message(max_message_bytes: int, receiving: int, held: int) -> None:
    found = arrivals(max_message_bytes)
    assert (found.receiving_max, found.bytes.maximum) == (receiving, held)


async def test_the_wait_for_others_is_not_the_messages_own() -> None:
    found = arrivals(16 * MIB)
    begun, leave = asyncio.Semaphore(0), asyncio.Event()

    async def read() -> None:
        begun.release()
        await leave.wait()

    calls = [asyncio.create_task(found.receive("acme", read)) for _ in range(4)]
    async with asyncio.timeout(BOUND_S):
        for _ in calls:
            await begun.acquire()
    found.receive_s = 0.0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await found.receive("acme", read)
    leave.set()
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*calls)
    assert begun.locked(), "there was no place"


def test_what_is_too_large_alone_leaves_nothing_behind() -> None:
    held = arrivals().bytes
    with held.hold("acme", 0) as keep:
        with pytest.raises(Overloaded):
            keep(128 * MIB + 1)
        keep(5)
        keep(7)
        assert held.counts["acme"] == 12
        with pytest.raises(Overloaded):
            keep(128 * MIB)
        assert held.counts["acme"] == 12
    assert not held.counts


async def test_a_timeout_of_the_message_itself_is_not_ours() -> None:
    async def read() -> bytes:
        raise TimeoutError("of the connection")

    found = arrivals()
    with pytest.raises(TimeoutError, match="of the connection"):
        await found.receive("acme", read)
    assert not found.arriving


NEVER_S = 3600.0


class Calls:
    """Calls that take turns; `begun` counts them by tenant."""

    def __init__(self, turns: CallTurns) -> None:
        self._turns = turns
        self.begun = Counter[str]()
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self, tenant: str, count: int) -> None:
        """Send calls; return when each has begun or waits."""
        self.tasks += [asyncio.create_task(self._call(tenant)) for _ in range(count)]
        await asyncio.sleep(0)

    async def of_others(self) -> None:
        """Send calls of two tenants, so that nobody has been alone."""
        await self.come("first", 1)
        await self.come("second", 1)

    async def end(self) -> None:
        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(*self.tasks)

    async def _call(self, tenant: str) -> None:
        await self._turns.take(tenant)
        self.begun[tenant] += 1


async def test_few_calls_of_each_tenant_begin_at_once() -> None:
    calls = Calls(CallTurns(moment_s=NEVER_S))
    await calls.of_others()
    await calls.come("a", 100)
    await calls.come("b", 1)
    assert (calls.begun["a"], calls.begun["b"]) == (BURST, 1)
    alone = Calls(CallTurns(moment_s=NEVER_S))
    await alone.come("a", 100)
    assert alone.begun["a"] == ALONE_BURST
    await alone.come("b", 100)
    assert alone.begun["b"] == BURST
    for task in (*calls.tasks, *alone.tasks):
        task.cancel()


async def test_a_lone_crowd_begins_few_calls_while_more_come() -> None:
    calls = Calls(CallTurns(moment_s=0))
    for _ in range(4 * ARRIVALS):
        await calls.come("a", 1)
    assert ALONE_BURST < calls.begun["a"] <= ALONE_BURST + 4 * BURST
    await calls.end()


async def test_a_round_begins_a_few_calls_of_each() -> None:
    turns = CallTurns(moment_s=0)
    await Calls(turns).of_others()
    order, calls = list[str](), []

    async def call(tenant: str) -> None:
        await turns.take(tenant)
        order.append(tenant)

    for tenant in ("a", "b"):
        calls += [asyncio.create_task(call(tenant)) for _ in range(3 * BURST)]
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*calls)
    assert order == 3 * (["a"] * BURST + ["b"] * BURST)


async def test_calls_without_an_end_hold_up_no_round() -> None:
    calls = Calls(CallTurns(moment_s=0))
    await calls.of_others()
    await calls.come("a", BURST + 1)
    for _ in range(4 * ARRIVALS):
        await calls.come("b", 1)
    assert calls.begun["a"] == BURST + 1
    await calls.end()


async def test_calls_that_have_gone_take_no_turn() -> None:
    calls = Calls(CallTurns(moment_s=0))
    await calls.of_others()
    await calls.come("a", 3 * BURST)
    for task in calls.tasks[2 + BURST : 2 + 2 * BURST]:
        task.cancel()
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*calls.tasks, return_exceptions=True)
    assert calls.begun["a"] == 2 * BURST


async def test_waiting_calls_of_a_tenant_are_bounded() -> None:
    turns = CallTurns(waiting_max=2, moment_s=NEVER_S)
    calls = Calls(turns)
    await calls.come("a", ALONE_BURST + 2)
    with pytest.raises(Overloaded, match="2 calls of your tenant wait to begin"):
        await turns.take("a")
    await calls.come("b", 1)
    assert calls.begun["b"] == 1
    turns.close()
    results = await asyncio.gather(*calls.tasks, return_exceptions=True)
    assert sum(isinstance(one, asyncio.CancelledError) for one in results) == 2
