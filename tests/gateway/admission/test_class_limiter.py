"""How many calls of a class run, and when bulk calls begin."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.class_limiter import PREPARING_MAX, BulkPacer, ClassLimiter
from gateway.admission.tenant_limits import TenantLimits
from sluice.errors import LimitReached, Overloaded, ShuttingDown
from sluice.settings import CallShares, Settings
from sluice.settings.limits import LimitSettings

BOUND_S = 60.0
ALL_TO_ONE = CallShares(tenant=1.0)


def new_limiter(limit: int = 100, shares: CallShares = ALL_TO_ONE) -> ClassLimiter:
    return ClassLimiter(limit, shares)


def enter(limiter: ClassLimiter, held: ExitStack, priority_class: str, tenant: str = "t") -> int:
    """Opens calls until one is refused; how many came in."""
    before = limiter.active
    try:
        while True:
            held.enter_context(limiter.running(priority_class, tenant))
    except Overloaded:
        return limiter.active - before


async def test_less_urgent_calls_leave_room_for_more_urgent_ones() -> None:
    limiter = new_limiter()
    with ExitStack() as held:
        assert enter(limiter, held, "bulk") == 50
        assert enter(limiter, held, "standard") == 25
        assert enter(limiter, held, "interactive") == 25
        assert limiter.active == 100
    assert limiter.active == 0


async def test_all_calls_of_a_tenant_together_leave_places_to_others() -> None:
    limiter = new_limiter(shares=CallShares())
    with ExitStack() as held:
        assert enter(limiter, held, "bulk") == 40
        assert enter(limiter, held, "interactive") == 40


ARRIVALS = st.lists(
    st.tuples(st.sampled_from(["bulk", "standard", "interactive"]), st.sampled_from("ab")),
    max_size=80,
)


@given(st.integers(2, 40), ARRIVALS)
async def test_neither_bulk_nor_one_tenant_takes_the_last_place(
    limit: int, arrivals: list[tuple[str, str]]
) -> None:
    limiter = new_limiter(limit, CallShares())
    with ExitStack() as held:
        tenants = set()
        for name, tenant in arrivals:
            with suppress(Overloaded):
                held.enter_context(limiter.running(name, tenant))
                tenants.add((name, tenant))
        # All of them bulk or standard, or all of one tenant: whoever comes then finds a place.
        if all(name != "interactive" for name, _ in tenants) or len({t for _, t in tenants}) < 2:
            held.enter_context(limiter.running("interactive", "c"))


async def test_nothing_is_kept_of_a_tenant_whose_calls_have_ended() -> None:
    limiter = new_limiter()
    assert limiter.idle.is_set()
    with limiter.running("interactive", "a"), limiter.running("bulk", "b"):
        with limiter.running("bulk", "b"):
            assert limiter.tenants == {"a", "b"}
            assert limiter.running_of("b") == limiter.running_of("b", bulk=True) == 2
            assert (limiter.running_of("a"), limiter.running_of("a", bulk=True)) == (1, 0)
        assert (limiter.active, limiter.tenants) == (2, {"a", "b"})
        assert limiter.running_of("b") == 1
        assert not limiter.idle.is_set()
    assert (limiter.active, limiter.tenants) == (0, set())
    assert limiter.running_of("b") == 0
    assert limiter.idle.is_set()


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (1.0, ("10 calls are", "8 standard and less", "5 bulk and less")),
        (0.5, ("5 calls of your tenant", "4 standard and less", "3 bulk and less")),
    ],
)
async def test_the_error_says_which_limit_it_is(share: float, said: tuple[str, ...]) -> None:
    for name, words in zip(("interactive", "standard", "bulk"), said, strict=True):
        limiter = new_limiter(10, CallShares(tenant=share))
        with ExitStack() as held:
            enter(limiter, held, name)
            with pytest.raises(Overloaded, match=words) as refused:
                held.enter_context(limiter.running(name, "t"))
            assert refused.value.retry_after_s == 1.0


@pytest.mark.parametrize(
    ("limit", "share", "places"),
    [(1, 0.5, 1), (2, 1.0, 2), (2, 0.9, 1), (3, 0.9, 2), (10, 0.55, 6), (1, 1.0, 1), (2, 0.1, 1)],
)
async def test_a_share_of_less_than_all_leaves_one_place(
    limit: int, share: float, places: int
) -> None:
    limiter = new_limiter(limit, CallShares(tenant=share, standard=1.0, bulk=1.0))
    with ExitStack() as held:
        assert enter(limiter, held, "bulk", "one") == places


async def test_tenant_settings_limit_calls_and_bulk_calls() -> None:
    settings = Settings(limits=LimitSettings(concurrent=3, concurrent_bulk=1))
    core = TenantLimits(lambda: settings, lambda: 0.0)
    in_force: Any = SimpleNamespace(policies=SimpleNamespace(has_limits=True))
    limiter = ClassLimiter(100, ALL_TO_ONE, in_force, core.check_running)
    with ExitStack() as held:
        held.enter_context(limiter.running("standard", "acme"))
        held.enter_context(limiter.running("bulk", "acme"))
        with pytest.raises(LimitReached, match="concurrent_bulk"):
            held.enter_context(limiter.running("bulk", "acme"))
        held.enter_context(limiter.running("interactive", "acme"))
        with pytest.raises(LimitReached, match="concurrent of 3"):
            held.enter_context(limiter.running("interactive", "acme"))
        held.enter_context(limiter.running("interactive", "other"))
    assert limiter.active == 0


async def test_while_draining_no_call_comes_in() -> None:
    limiter = new_limiter()
    with limiter.running("interactive", "t"):
        limiter.is_draining = True
        with pytest.raises(ShuttingDown):
            limiter.running("interactive", "t").__enter__()
        assert limiter.active == 1


async def waiting(
    limiter: ClassLimiter,
    priority_class: str,
    entered: list[str],
    leave: asyncio.Event,
    tenant: str = "",
) -> None:
    async with limiter.preparing(priority_class, tenant):
        entered.append(tenant or priority_class)
        await leave.wait()


async def settled() -> None:
    """What can run has run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_bulk_burst_is_prepared_a_few_at_a_time() -> None:
    limiter, entered, leave = new_limiter(), list[str](), asyncio.Event()
    names = ["bulk"] * 50 + ["interactive"] * 3 + ["standard"] * 9
    calls = [asyncio.create_task(waiting(limiter, name, entered, leave)) for name in names]
    await settled()
    counts = {name: entered.count(name) for name in set(names)}
    assert counts == {"bulk": 2, "standard": 8, "interactive": 3}
    leave.set()
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*calls)
    assert len(entered) == len(names)


async def test_busy_tenant_delays_another_by_one_slot() -> None:
    limiter, entered, leave = new_limiter(), list[str](), asyncio.Event()
    calls = [
        asyncio.create_task(waiting(limiter, "bulk", entered, leave, tenant))
        for tenant in ["loud"] * 50 + ["quiet"]
    ]
    await settled()
    leave.set()
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*calls)
    assert entered.index("quiet") <= PREPARING_MAX["bulk"] + 1


async def test_texts_of_a_tenant_are_bounded_together() -> None:
    texts = new_limiter().texts
    with texts.hold("acme", 7_999), texts.hold("acme", 1):
        with pytest.raises(Overloaded, match="8000 texts of your tenant"), texts.hold("acme"):
            pytest.fail("there was room")
        with texts.hold("other", 1):
            pass
        assert texts.counts == {"acme": 8000}
    assert not texts.counts


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


async def test_bulk_call_waits_a_limited_time_while_calls_arrive() -> None:
    patient, pacer = BulkPacer(patience_s=inf), BulkPacer()
    waiting = asyncio.create_task(patient.wait())
    async with arrivals(patient):
        await asyncio.sleep(0.02)
        assert not waiting.done()
    async with arrivals(pacer), asyncio.timeout(BOUND_S):
        await waiting
        for _ in range(3):
            await pacer.wait()


async def test_bulk_calls_begin_apart_while_calls_arrive() -> None:
    patience_s, began_at = 0.01, time.monotonic()
    pacer = BulkPacer(patience_s=patience_s)
    async with arrivals(pacer), asyncio.timeout(BOUND_S):
        await asyncio.gather(*(pacer.wait() for _ in range(5)))
    assert time.monotonic() - began_at > 5 * patience_s, "they waited for moments, not for time"


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
