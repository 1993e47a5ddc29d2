"""When messages to batchers leave."""

import asyncio
import time
from typing import Any

import pytest
import uvloop

from gateway.upstream.nats_transport import FREQUENT, INTERACTIVE_S, LAG_S, UNREAD_S, Coalescer
from tests.gateway.kit.runs import new_run

HOUR_MS = 3_600_000


async def waited_s(coalescer: Coalescer) -> float:
    began_at = time.monotonic()
    await coalescer.wait()
    return time.monotonic() - began_at


def run(priority_class: str, coalesce_ms: int = 0) -> Any:
    return new_run(priority_class=priority_class, coalesce_ms=coalesce_ms)


@pytest.mark.parametrize(
    ("priority_class", "coalesce_ms", "waits"),
    [
        ("bulk", HOUR_MS, True),
        ("bulk", 250, False),
        ("standard", HOUR_MS, False),
        ("interactive", HOUR_MS, False),
    ],
)
async def test_only_unread_bulk_tasks_wait(
    priority_class: str, coalesce_ms: int, waits: bool
) -> None:
    coalescer = Coalescer()
    coalescer.notify(run(priority_class, coalesce_ms))
    assert (await waited_s(coalescer) >= 0.9 * UNREAD_S) == waits


def test_tasks_of_any_delay_are_accepted_on_uvloop() -> None:
    """A timer of uvloop that is due within half a millisecond has no time."""

    async def notify_for(seconds: float) -> None:
        coalescer = Coalescer()
        coalescer.note_lag(2 * LAG_S)
        for _ in range(FREQUENT + 1):
            coalescer.notify(run("interactive"))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            coalescer.notify(run("interactive"))
            coalescer.notify(run("interactive"))
            coalescer.notify()
            await coalescer.wait()

    uvloop.run(notify_for(4 * INTERACTIVE_S))


async def test_message_that_does_not_wait_takes_others_along() -> None:
    coalescer = Coalescer()
    coalescer.notify(run("bulk", HOUR_MS))
    coalescer.notify()
    assert await waited_s(coalescer) < UNREAD_S / 2
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2 * UNREAD_S):
            await coalescer.wait()


@pytest.mark.parametrize(("lag_s", "waits"), [(2 * LAG_S, True), (LAG_S / 2, False)])
async def test_frequent_interactive_tasks_leave_together(lag_s: float, waits: bool) -> None:
    coalescer = Coalescer()
    coalescer.note_lag(lag_s)
    for _ in range(FREQUENT + 1):
        coalescer.notify(run("interactive"))
    await coalescer.wait()  # the first of them did not wait
    coalescer.notify(run("interactive"))
    coalescer.notify(run("interactive"))
    assert (await waited_s(coalescer) > INTERACTIVE_S / 4) == waits
