"""What arrives and what calls keep is bounded for each tenant, and one tenant's bound is no other's."""

import asyncio
from contextlib import ExitStack

import pytest

from gateway.admission.arrivals import RECEIVE_S, Arrivals
from gateway.admission.class_limiter import ClassLimiter
from gateway.admission.count_limit import CountLimit
from gateway.identity.authenticator import Authenticator
from sluice.errors import DeadlinePassed, Overloaded
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


async def test_messages_of_a_tenant_arrive_a_few_at_a_time_and_those_of_others_beside_them() -> (
    None
):
    found, begun, leave = arrivals(16 * MIB), list[str](), asyncio.Event()

    async def receive(tenant: str) -> None:
        async def read() -> None:
            begun.append(tenant)
            await leave.wait()

        await found.receive(tenant, read)

    calls = [asyncio.create_task(receive("loud")) for _ in range(6)]
    calls.append(asyncio.create_task(receive("quiet")))
    for _ in range(10):
        await asyncio.sleep(0)
    assert sorted(begun) == ["loud"] * 4 + ["quiet"]
    calls[0].cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert begun.count("loud") == 5
    leave.set()
    async with asyncio.timeout(BOUND_S):
        await asyncio.wait(calls)
    assert begun.count("loud") == 6
    assert not found._receiving, "nothing is kept of who is gone"


async def test_a_message_that_does_not_arrive_is_given_up() -> None:
    found = arrivals(receive_s=0.0)
    with pytest.raises(DeadlinePassed):
        await found.receive("acme", lambda: asyncio.sleep(BOUND_S))
    assert not found._receiving


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


def test_bytes_of_a_tenants_calls_are_bounded_together() -> None:
    held = arrivals().bytes
    with held.held("other", 0) as other:
        with held.held("acme", 0) as one:
            one(100 * MIB)
            with held.held("acme", 0) as two:
                two(28 * MIB)
                with pytest.raises(Overloaded) as refused:
                    two(1)
                assert refused.value.retry_after_s == 1.0
                other(128 * MIB)
            one(28 * MIB)
            with pytest.raises(Overloaded):
                one(1)
        assert held.counts.keys() == {"other"}
    assert not held.counts


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


@pytest.mark.parametrize(
    ("name", "most", "what"),
    [
        ("streams", 256, "calls about jobs of your tenant"),
        ("uploads", 4, "uploads of your tenant"),
        ("watching", 1024, "callers of your address are watching health"),
    ],
)
def test_calls_without_a_class_are_counted_by_tenant_or_address(
    name: str, most: int, what: str
) -> None:
    limit: CountLimit = getattr(arrivals(), name)
    with ExitStack() as stack:
        for _ in range(most):
            stack.enter_context(limit.held("acme"))
        with pytest.raises(Overloaded, match=f"{most} {what}") as refused, limit.held("acme"):
            pytest.fail("there was room")
        assert refused.value.retry_after_s == 1.0
        with limit.held("other"):
            pass
    assert not limit.counts
    with limit.held("acme"):
        pass


async def test_a_timeout_of_the_message_itself_is_not_ours() -> None:
    async def read() -> bytes:
        raise TimeoutError("of the connection")

    found = arrivals()
    with pytest.raises(TimeoutError, match="of the connection"):
        await found.receive("acme", read)
    assert not found._receiving
