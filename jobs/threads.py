"""Threads for blocking work: reading inputs, opening URLs, calling webhooks; a few per tenant and kind.

asyncio's own pool is shared: calls of one tenant that do not end would block all others. Threads
have the priority of the process: with a lower one, a thread would lose its core while it holds the
interpreter's lock, and the event loop would wait with it.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final, ParamSpec, TypeVar

from sluice.errors import Overloaded

OF_TENANT: Final = 2
"""Threads of one tenant for one kind of work."""
THREADS_MAX: Final = 64
"""Threads for one kind of work."""
WAITING_MAX: Final = 1000
"""Calls of a tenant that may run in its threads or wait for them, together."""
RETRY_AFTER_S: Final = 5.0
"""Retry delay in the error of a tenant with too many waiting calls, in seconds."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class TenantLimiter:
    """Limits how many calls of a tenant run at the same time; others of it wait in turn."""

    def __init__(self, of_tenant: int, what: str, waiting_max: int = WAITING_MAX) -> None:
        """Create it; `what` names what calls wait for, in the error."""
        self._what, self._waiting_max = what, waiting_max
        self._slots = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(of_tenant))
        self._calls = Counter[str]()

    def __len__(self) -> int:
        """Return the number of tenants whose calls run or wait."""
        return len(self._calls)

    async def take(self, tenant: str) -> None:
        """Wait for a slot, which `leave` frees.

        Raises:
            Overloaded: too many wait.
        """
        if self._calls[tenant] >= self._waiting_max:
            message = f"{self._waiting_max} calls of the tenant wait for {self._what}"
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S)
        self._calls[tenant] += 1
        try:
            await self._slots[tenant].acquire()
        except BaseException:
            self._count_out(tenant)
            raise

    def leave(self, tenant: str) -> None:
        """Free a slot."""
        self._slots[tenant].release()
        self._count_out(tenant)

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Take a slot while the block runs; raises as `take`."""
        await self.take(tenant)
        try:
            yield
        finally:
            self.leave(tenant)

    def _count_out(self, tenant: str) -> None:
        self._calls[tenant] -= 1
        if not self._calls[tenant]:
            del self._calls[tenant], self._slots[tenant]


class JobThreads:
    """Threads of one kind of work."""

    def __init__(self, name: str, waiting_max: int = WAITING_MAX) -> None:
        self._executor = ThreadPoolExecutor(THREADS_MAX, name)
        self._tenants = TenantLimiter(OF_TENANT, "a thread", waiting_max)

    async def run(
        self, tenant: str, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Return what `work` returns, from a thread of the tenant; after a cancel the thread still ends its work.

        Raises:
            Overloaded: too many wait.
        """
        await self._tenants.take(tenant)
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._executor, lambda: work(*args, **kwargs))
        running.add_done_callback(lambda _: self._tenants.leave(tenant))
        return await asyncio.shield(running)

    def close(self) -> None:
        """Accept no more work; does not wait for running work."""
        self._executor.shutdown(wait=False, cancel_futures=True)


StopSignal = Future[None]
"""Is done when the work in a thread has to stop: the work polls it, and registers what ends a wait."""


class ReadingStopped(Exception):
    """Raised in a thread whose work was stopped."""
