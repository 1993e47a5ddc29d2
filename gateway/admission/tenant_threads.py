"""Turns between tenants: for places, and for the threads in which long texts are worked on."""

import asyncio
import os
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final, TypeVar

CORES_THREADS: Final = min(32, (os.cpu_count() or 1) + 4)
"""As many as asyncio's own pool has, which is one for all tenants."""

_T = TypeVar("_T")


class TenantSlots:
    """A semaphore whose next place is that of the tenant that waits longest for its turn."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def held(self, tenant: str) -> AsyncIterator[None]:
        """A place, in the block."""
        await self.take(tenant)
        try:
            yield
        finally:
            self.give()

    async def take(self, tenant: str) -> None:
        """Waits for a place; `give` gives it back."""
        if self._free:
            self._free -= 1
            return
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(given)
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():  # it came in the same moment
                self.give()
            raise

    def give(self) -> None:
        """A place is free."""
        while self._waiting:
            tenant, own = self._waiting.popitem(last=False)
            first = own.popleft()
            if own:
                self._waiting[tenant] = own  # behind the others
            if not first.done():  # its caller has not gone
                first.set_result(None)
                return
        self._free += 1

    def close(self) -> None:
        """Who waits is cancelled."""
        for own in self._waiting.values():
            for waiting in own:
                waiting.cancel()


class TenantThreads:
    """Threads for one kind of work. That of one tenant, however much, delays that of another by a turn at most."""

    def __init__(self, name: str, threads: int = CORES_THREADS) -> None:
        self._executor = ThreadPoolExecutor(threads, name)
        self._slots = TenantSlots(threads)

    async def run(self, tenant: str, work: Callable[[], _T]) -> _T:
        """What ``work`` returns or raises, in a thread. Work whose caller has gone before its turn is not begun."""
        await self._slots.take(tenant)
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        running.add_done_callback(lambda _: self._slots.give())
        return await asyncio.shield(running)  # a thread goes on when its caller has gone

    def close(self) -> None:
        """Begins nothing more."""
        self._slots.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
