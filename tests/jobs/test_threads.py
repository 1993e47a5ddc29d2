"""A tenant's calls that do not end keep its own threads."""

import asyncio
from threading import Event

import pytest

from jobs.threads import OF_TENANT, JobThreads, TenantLimiter
from sluice.errors import Overloaded

BOUND_S = 20.0


async def test_a_tenant_has_a_few_threads() -> None:
    threads, gate = JobThreads("test", waiting_max=OF_TENANT + 1), Event()
    stuck = [
        asyncio.ensure_future(threads.run("stuck", gate.wait, BOUND_S)) for _ in range(OF_TENANT)
    ]
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(threads.run("stuck", str, 1))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="wait for a thread"):
        await threads.run("stuck", str, 2)
    assert await asyncio.wait_for(threads.run("other", str, 3), BOUND_S) == "3"
    stuck[0].cancel()
    await asyncio.sleep(0)
    assert not waiting.done()  # the thread of the cancelled call is still at work
    gate.set()
    assert await asyncio.wait_for(waiting, BOUND_S) == "1"
    assert await stuck[1]
    await asyncio.sleep(0)
    threads.close()


async def test_limiter_forgets_tenants_without_calls() -> None:
    limiter = TenantLimiter(1, "a slot")
    async with limiter.slot("acme"):
        waiting = asyncio.ensure_future(limiter.take("acme"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert len(limiter) == 1
    assert len(limiter) == 0
