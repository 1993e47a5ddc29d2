"""What arrives and what calls keep is bounded for each tenant, and one tenant's bound is no other's."""

import asyncio

import pytest

from gateway.admission.arrivals import RECEIVE_S, Arrivals
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
    with held.held("acme", 0) as keep:
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
