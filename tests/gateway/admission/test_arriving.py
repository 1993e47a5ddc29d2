"""What arrives and what calls keep is bounded for each tenant, and one tenant's bound is no other's."""

import asyncio
from contextlib import ExitStack

import pytest

from gateway.admission import calls as arriving
from gateway.admission.calls import Arriving
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
    assert (found.receiving_max, found.held_max) == (receiving, held)


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


def test_bytes_of_a_tenants_calls_are_bounded_together() -> None:
    found = Arriving(MIB)
    with found.kept_by("other") as other:
        with found.kept_by("acme") as one:
            one(100 * MIB)
            with found.kept_by("acme") as two:
                two(28 * MIB)
                with pytest.raises(Overloaded) as refused:
                    two(1)
                assert refused.value.retry_after_s == 1.0
                other(128 * MIB)
            one(28 * MIB)
            with pytest.raises(Overloaded):
                one(1)
        assert found._held.keys() == {"other"}
    assert not found._held


def test_what_is_too_large_alone_leaves_nothing_behind() -> None:
    found = Arriving(MIB)
    with found.kept_by("acme") as keep:
        with pytest.raises(Overloaded):
            keep(128 * MIB + 1)
        assert not found._held
        keep(5)
        keep(7)
        assert found._held["acme"] == 12
        with pytest.raises(Overloaded):
            keep(128 * MIB)
        assert found._held["acme"] == 12
    assert not found._held


def test_calls_without_a_class_are_counted_by_tenant() -> None:
    found = Arriving(MIB)
    with ExitStack() as stack:
        for _ in range(256):
            stack.enter_context(found.stream("acme", sends=False))
        with (
            pytest.raises(Overloaded, match="256 calls about jobs") as refused,
            found.stream("acme", sends=False),
        ):
            pytest.fail("there was room")
        assert refused.value.retry_after_s == 1.0
        with pytest.raises(Overloaded), found.stream("acme", sends=True):
            pytest.fail("there was room")
        with found.stream("other", sends=False):
            pass
    assert not found._streams
    with found.stream("acme", sends=False):
        pass


def test_uploads_are_fewer_and_count_as_calls() -> None:
    found = Arriving(MIB)
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(found.stream("acme", sends=True))
        with pytest.raises(Overloaded, match="4 uploads"), found.stream("acme", sends=True):
            pytest.fail("there was room")
        assert (found._streams["acme"], found._sending["acme"]) == (4, 4)
        with found.stream("other", sends=True), found.stream("acme", sends=False):
            pass
    assert (found._streams, found._sending) == ({}, {})
    with found.stream("acme", sends=True):
        pass


def test_calls_about_health_are_counted_by_address() -> None:
    found = Arriving(MIB)
    with ExitStack() as stack:
        for _ in range(1024):
            stack.enter_context(found.health("10.0.0.1"))
        with (
            pytest.raises(Overloaded, match="1024 calls about health"),
            found.health("10.0.0.1"),
        ):
            pytest.fail("there was room")
        with found.health("10.0.0.2"), found.stream("10.0.0.1", sends=False):
            pass
    assert not found._health
    with found.health("10.0.0.1"):
        pass


async def test_a_timeout_of_the_message_itself_is_not_ours() -> None:
    async def read() -> bytes:
        raise TimeoutError("of the connection")

    found = Arriving(MIB)
    with pytest.raises(TimeoutError, match="of the connection"):
        await found.receive("acme", read)
    assert not found._receiving
