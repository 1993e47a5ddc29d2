"""Threads for what blocks: reading inputs, opening URLs, calling webhooks. A tenant has a few of each kind.

asyncio's own pool is one for all: calls of one tenant that do not end would keep those of all others waiting. Threads
have the priority of the process: one below it would lose its core while it holds the interpreter's lock, and the event
loop would wait with it, for minutes on busy cores.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final, ParamSpec, TypeVar

from sluice.errors import Overloaded

OF_TENANT: Final = 2
THREADS_MAX: Final = 64
WAITING_MAX: Final = 1000
"""Calls of a tenant that may wait for its threads."""
RETRY_AFTER_S: Final = 5.0

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Places:
    """So many of each tenant do something at the same time; others of it wait, those of other tenants do not."""

    def __init__(self, of_tenant: int, what: str) -> None:
        """``what`` they wait for."""
        self._of_tenant = of_tenant
        self._what = what
        self._places: dict[str, tuple[asyncio.Semaphore, list[int]]] = {}

    async def take(self, tenant: str) -> None:
        """Returns when there is a place; `leave` gives it back.

        Raises:
            Overloaded: too many wait.
        """
        places, users = self._places.setdefault(tenant, (asyncio.Semaphore(self._of_tenant), [0]))
        if users[0] >= WAITING_MAX:
            message = f"{WAITING_MAX} calls of your tenant wait for {self._what}"
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S)
        users[0] += 1
        try:
            await places.acquire()
        except BaseException:
            self._count_out(tenant)
            raise

    def leave(self, tenant: str) -> None:
        """The place is free."""
        self._places[tenant][0].release()
        self._count_out(tenant)

    @asynccontextmanager
    async def one(self, tenant: str) -> AsyncIterator[None]:
        """A place while the block runs; raises as `take`."""
        await self.take(tenant)
        try:
            yield
        finally:
            self.leave(tenant)

    def _count_out(self, tenant: str) -> None:
        users = self._places[tenant][1]
        users[0] -= 1
        if not users[0]:
            del self._places[tenant]


class Threads:
    """The threads of one kind of work."""

    def __init__(self, name: str, of_tenant: int = OF_TENANT) -> None:
        self._executor = ThreadPoolExecutor(THREADS_MAX, name)
        self._places = Places(of_tenant, "a thread")

    async def run(
        self, tenant: str, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """What ``work`` returns, in a thread of ``tenant``; the place is free when the thread is, also after a cancel.

        Raises:
            Overloaded: too many wait.
        """
        await self._places.take(tenant)
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._executor, lambda: work(*args, **kwargs))
        running.add_done_callback(lambda _: self._places.leave(tenant))
        return await asyncio.shield(running)

    def close(self) -> None:
        """Takes no more; does not wait for what runs."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class Stop:
    """Ends work in a thread, from outside. The work asks `is_set` now and then, and says what to call to end a wait."""

    def __init__(self) -> None:
        self.is_set = False
        self._calls: list[Callable[[], None]] = []

    def set(self) -> None:
        """From any thread."""
        self.is_set = True
        for call in self._calls:
            call()

    def then(self, call: Callable[[], None]) -> None:
        """``call`` is called by `set`, now if that has been."""
        self._calls.append(call)
        if self.is_set:
            call()


class Stopped(Exception):
    """The work was to end."""
