"""What arrives and what calls keep is bounded for each tenant, and one tenant's bound is no other's."""

import asyncio
from contextlib import ExitStack

import pytest

from gateway.admission import calls as arriving
from gateway.admission.calls import Arriving, CountLimit, TimeLimit
from sluice.errors import DeadlinePassed, Overloaded

MIB = 1024 * 1024
BOUND_S = 60.0


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
    found = Arriving(max_message_bytes)
    assert (found.receiving_max, found.bytes.most) == (receiving, held)


async def test_messages_of_a_tenant_arrive_a_few_at_a_time_and_those_of_others_beside_them() -> (
    None
):
    found, begun, leave = Arriving(16 * MIB), list[str](), asyncio.Event()

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


async def test_a_message_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arriving.RECEIVE_S == 30.0
    monkeypatch.setattr(arriving, "RECEIVE_S", 0.0)
    found = Arriving(MIB)
    with pytest.raises(DeadlinePassed):
        await found.receive("acme", lambda: asyncio.sleep(BOUND_S))
    assert not found._receiving


async def test_the_wait_for_others_is_not_the_messages_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Arriving(16 * MIB)
    begun, leave = asyncio.Semaphore(0), asyncio.Event()

    async def read() -> None:
        begun.release()
        await leave.wait()

    calls = [asyncio.create_task(found.receive("acme", read)) for _ in range(4)]
    async with asyncio.timeout(BOUND_S):
        for _ in calls:
            await begun.acquire()
    monkeypatch.setattr(arriving, "RECEIVE_S", 0.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await found.receive("acme", read)
    leave.set()
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*calls)
    assert begun.locked(), "there was no place"


async def test_a_time_limit_ends_its_block_and_nothing_else() -> None:
    with pytest.raises(TimeoutError), TimeLimit(0) as limit:
        await asyncio.sleep(BOUND_S)
    assert limit.expired
    with TimeLimit(BOUND_S) as unused:
        pass
    assert not unused.expired


async def test_a_caller_that_goes_is_no_time_limit_that_expired() -> None:
    async def work() -> None:
        with TimeLimit(BOUND_S) as limit:
            started.set_result(limit)
            await asyncio.sleep(BOUND_S)

    started: asyncio.Future[TimeLimit] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(work())
    limit = await started
    task.cancel()
    limit.expire()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_paused_time_limit_expires_when_it_goes_on() -> None:
    async def work() -> None:
        with TimeLimit(BOUND_S) as limit:
            limit.paused = True
            limit.expire()
            await asyncio.sleep(0)
            assert not limit.expired
            limit.resume()
            await asyncio.sleep(BOUND_S)

    with pytest.raises(TimeoutError):
        await work()


def test_bytes_of_a_tenants_calls_are_bounded_together() -> None:
    held = Arriving(MIB).bytes
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
        assert held.taken.keys() == {"other"}
    assert not held.taken


def test_what_is_too_large_alone_leaves_nothing_behind() -> None:
    held = Arriving(MIB).bytes
    with held.held("acme", 0) as keep:
        with pytest.raises(Overloaded):
            keep(128 * MIB + 1)
        keep(5)
        keep(7)
        assert held.taken["acme"] == 12
        with pytest.raises(Overloaded):
            keep(128 * MIB)
        assert held.taken["acme"] == 12
    assert not held.taken


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
    limit: CountLimit = getattr(Arriving(MIB), name)
    with ExitStack() as stack:
        for _ in range(most):
            stack.enter_context(limit.held("acme"))
        with pytest.raises(Overloaded, match=f"{most} {what}") as refused, limit.held("acme"):
            pytest.fail("there was room")
        assert refused.value.retry_after_s == 1.0
        with limit.held("other"):
            pass
    assert not limit.taken
    with limit.held("acme"):
        pass


async def test_a_timeout_of_the_message_itself_is_not_ours() -> None:
    async def read() -> bytes:
        raise TimeoutError("of the connection")

    found = Arriving(MIB)
    with pytest.raises(TimeoutError, match="of the connection"):
        await found.receive("acme", read)
    assert not found._receiving
