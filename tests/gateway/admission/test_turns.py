"""Tenants take turns, for slots, threads and the event loop: however much waits, another's work is next."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from grpc.aio import AioRpcError

from gateway.admission.class_limiter import PREPARING_MAX
from gateway.admission.turns import (
    CHAR_SHARE,
    LOOP_COST,
    TURN_COST,
    LoopTurns,
    TenantSlots,
    TenantThreads,
    TextThreads,
)
from gateway.safety.inspector import RequestInspection
from gateway.safety.policy import SafetyPolicy
from sluice.v1.inference_pb2 import GenerateRequest
from sluice.v1.safety_pb2 import CheckTextRequest
from tests.gateway.kit.wire import Wire

BOUND_S = 30.0


@pytest.fixture
async def threads() -> AsyncIterator[TenantThreads]:
    made = TenantThreads("test", 1)
    yield made
    made.close()


async def test_next_slot_goes_to_the_longest_waiting_tenant() -> None:
    slots, order = TenantSlots(1), list[str]()

    async def hold(tenant: str, name: str) -> None:
        async with slots.hold_slot(tenant):
            order.append(name)
            await asyncio.sleep(0)

    asked = (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"))
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*(hold(tenant, name) for tenant, name in asked))
    assert order == ["a1", "a2", "b1", "c1", "a3"]


async def test_a_tenant_leaves_slots_beyond_its_own_to_others() -> None:
    slots = TenantSlots(2, own=1)
    async with asyncio.timeout(BOUND_S):
        await slots.take("a")
        second = asyncio.ensure_future(slots.take("a"))
        await asyncio.sleep(0)
        assert not second.done()  # a slot is free, for others
        await slots.take("b")
        third = asyncio.ensure_future(slots.take("c"))
        await asyncio.sleep(0)
        slots.give("b")
        await third
        assert not second.done()
        slots.give("a")
        await second


async def test_slot_whose_waiters_have_gone_stays_free() -> None:
    slots = TenantSlots(1, own=1)
    async with asyncio.timeout(BOUND_S):
        await slots.take("a")
        gone = [asyncio.ensure_future(slots.take("b")) for _ in range(3)]
        await asyncio.sleep(0)
        for waiting in gone:
            waiting.cancel()
        await asyncio.wait(gone)
        slots.give("a")
        await slots.take("c")


async def test_slot_of_a_waiter_that_goes_with_it_is_the_next_ones() -> None:
    slots = TenantSlots(1)
    async with asyncio.timeout(BOUND_S):
        await slots.take("a")
        gone, stays = (asyncio.ensure_future(slots.take("b")) for _ in range(2))
        await asyncio.sleep(0)
        slots.give("a")
        gone.cancel()  # it has been given the slot, and has not run since
        await stays
        third = asyncio.ensure_future(slots.take("c"))
        await asyncio.sleep(0)
        assert not third.done(), "there is one slot"
        slots.give("b")
        await third


async def test_busy_tenant_delays_work_of_another_by_one(threads: TenantThreads) -> None:
    gate, order = threading.Event(), list[str]()

    def work(name: str) -> Callable[[], None]:
        def run() -> None:
            gate.wait(BOUND_S)
            order.append(name)

        return run

    many = [asyncio.ensure_future(threads.run("loud", work(f"loud {i}"))) for i in range(50)]
    await asyncio.sleep(0)
    quiet = asyncio.ensure_future(threads.run("quiet", work("quiet")))
    await asyncio.sleep(0)
    gate.set()
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*many, quiet)
    assert order[:3] == ["loud 0", "loud 1", "quiet"]  # one that runs, one whose turn it is


async def test_work_whose_caller_has_gone_is_not_begun(threads: TenantThreads) -> None:
    gate, begun = threading.Event(), list[int]()
    first = asyncio.ensure_future(threads.run("a", lambda: gate.wait(BOUND_S)))
    gone = asyncio.ensure_future(threads.run("a", lambda: begun.append(1)))
    await asyncio.sleep(0)
    gone.cancel()
    gate.set()
    async with asyncio.timeout(BOUND_S):
        assert await first
        assert await threads.run("a", lambda: "last") == "last"
    assert not begun


async def test_an_error_is_the_callers_and_threads_go_on(threads: TenantThreads) -> None:
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(ZeroDivisionError):
            await threads.run("a", lambda: 1 // 0)
        running = asyncio.ensure_future(threads.run("a", lambda: 1 // 0))
        await asyncio.sleep(0)
        running.cancel()
        assert await threads.run("a", lambda: 1) == 1


@pytest.mark.parametrize("method", ["CheckText", "GenerateText"])
async def test_long_texts_of_a_tenant_leave_others_their_turn(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    gate, order = threading.Event(), list[str]()
    begin = RequestInspection.__init__

    def slow(self: RequestInspection, policy: SafetyPolicy, texts: Sequence[str]) -> None:
        gate.wait(BOUND_S)
        order.append(texts[0][:5])
        begin(self, policy, texts)

    monkeypatch.setattr(RequestInspection, "__init__", slow)

    async def ask(tenant: str) -> None:
        text, metadata = (tenant + "7" * LOOP_COST, (("sluice-tenant", tenant),))
        if method == "CheckText":
            await wire.safety.CheckText(CheckTextRequest(text=text), metadata=metadata)
        else:  # each is refused
            with pytest.raises(AioRpcError, match="the prompt has"):
                await wire.stub.GenerateText(GenerateRequest(prompt=text), metadata=metadata)

    loud = [asyncio.create_task(ask("loud1")) for _ in range(40)]
    await wire.until(lambda: wire.gateway.active == 40)
    quiet = asyncio.create_task(ask("quiet"))
    await wire.until(lambda: wire.gateway.active == 41)
    gate.set()
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*loud, quiet)
    # Behind one that is inspected, and as many as have a slot.
    assert order.index("quiet") <= 1 + PREPARING_MAX["standard"]


@pytest.fixture
async def text_threads() -> AsyncIterator[TextThreads]:
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
    texts: list[str], in_loop: bool, text_threads: TextThreads
) -> None:
    async with asyncio.timeout(BOUND_S):
        worked_in = await text_threads.work_on(texts, "acme", threading.current_thread)
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
