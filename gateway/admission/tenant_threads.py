"""Turns between tenants: in a queue, and for the threads in which long texts are inspected and encoded."""

import asyncio
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Generic, TypeVar

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


class TenantThreads:
    """Threads for one kind of work. That of one tenant, however much, delays that of another by a turn at most."""

    def __init__(self, name: str, threads: int = CORES_THREADS) -> None:
        self._executor = ThreadPoolExecutor(threads, name)
        self._free = threads
        self._waiting: TenantQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = TenantQueue()

    async def run(self, tenant: str, work: Callable[[], _T]) -> _T:
        """What ``work`` returns or raises, in a thread. Work whose caller has gone before its turn is not begun."""
        found: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._waiting.add(tenant, (work, found))
        self._begin()
        return await found

    def close(self) -> None:
        """Begins nothing more."""
        while (one := self._waiting.next()) is not None:
            one[1].cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        while self._free and (one := self._waiting.next()) is not None:
            work, found = one
            if found.done():
                continue
            self._free -= 1
            running = asyncio.get_running_loop().run_in_executor(self._executor, work)
            running.add_done_callback(partial(self._ended, found))

    def _ended(self, found: "asyncio.Future[Any]", running: "asyncio.Future[Any]") -> None:
        self._free += 1
        if running.cancelled():
            found.cancel()
        elif found.done():
            running.exception()  # nobody waits for it
        elif (error := running.exception()) is not None:
            found.set_exception(error)
        else:
            found.set_result(running.result())
        self._begin()
