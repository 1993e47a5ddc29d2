"""Turns between tenants: in a queue, and for the threads in which long texts are inspected and encoded."""

import asyncio
import os
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final, Generic, TypeVar

CORES_THREADS: Final = min(32, (os.cpu_count() or 1) + 4)
"""As many as asyncio's own pool has, which is one for all tenants."""

_T = TypeVar("_T")


class TenantQueue(Generic[_T]):
    """What waits, by tenant: the next is of the tenant that waits longest for its turn."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[_T]] = OrderedDict()

    def add(self, tenant: str, one: _T) -> None:
        """Behind all others of ``tenant``."""
        self._waiting.setdefault(tenant, deque()).append(one)

    def count(self, tenant: str) -> int:
        """How many of ``tenant`` wait."""
        return len(self._waiting.get(tenant, ()))

    def next(self) -> _T | None:
        """Taken out; None: nothing waits."""
        if not self._waiting:
            return None
        tenant, own = self._waiting.popitem(last=False)
        one = own.popleft()
        if own:
            self._waiting[tenant] = own  # behind the others
        return one


class TenantSlots:
    """A semaphore whose next place is that of the tenant that waits longest for its turn."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: TenantQueue[asyncio.Future[None]] = TenantQueue()

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
        self._waiting.add(tenant, given)
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():  # it came in the same moment
                self.give()
            raise

    def give(self) -> None:
        """A place is free."""
        while (first := self._waiting.next()) is not None:
            if not first.done():  # its caller has not gone
                first.set_result(None)
                return
        self._free += 1

    def close(self) -> None:
        """Who waits is cancelled."""
        while (first := self._waiting.next()) is not None:
            first.cancel()


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
