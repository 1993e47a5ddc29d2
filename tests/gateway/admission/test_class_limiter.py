import asyncio

from gateway.admission.class_limiter import CONCURRENT_MAX, ClassLimiter

BOUND_S = 5.0


async def waiting(
    limiter: ClassLimiter, priority_class: str, entered: list[str], leave: asyncio.Event
) -> None:
    async with limiter.slot(priority_class):
        entered.append(priority_class)
        await leave.wait()


async def settled() -> None:
    """What can run has run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_burst_of_bulk_is_let_in_a_few_at_a_time_and_does_not_hold_up_others() -> None:
    limiter, entered, leave = ClassLimiter(), list[str](), asyncio.Event()
    names = ["bulk"] * 50 + ["interactive"] * 3 + ["standard"] * 9
    calls = [asyncio.create_task(waiting(limiter, name, entered, leave)) for name in names]
    await settled()
    counts = {name: entered.count(name) for name in set(names)}
    assert counts == {
        "bulk": CONCURRENT_MAX["bulk"],
        "standard": CONCURRENT_MAX["standard"],
        "interactive": 3,
    }
    leave.set()
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*calls)
    assert len(entered) == len(names)


async def test_who_gives_up_while_waiting_takes_no_turn() -> None:
    limiter, entered, leave = ClassLimiter(), list[str](), asyncio.Event()
    calls = [asyncio.create_task(waiting(limiter, "bulk", entered, leave)) for _ in range(4)]
    await settled()
    calls[2].cancel()
    leave.set()
    async with asyncio.timeout(BOUND_S):
        await asyncio.wait(calls)
    assert len(entered) == 3
    async with asyncio.timeout(BOUND_S), limiter.slot("bulk"), limiter.slot("bulk"):
        pass  # All slots came back.
