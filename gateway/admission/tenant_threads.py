"""Shares slots, and threads for long texts, between tenants in turns.

The event loop and the threads share one interpreter, which switches between them after `sluice.startup.SWITCH_S`. A
tenant has few threads, so a call of another tenant waits that long behind each of them, however much work they have.
"""

import asyncio
import os
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Final, TypeVar

CORES_THREADS: Final = min(32, (os.cpu_count() or 1) + 4)
"""Threads of all tenants: as many as asyncio's own pool has."""
OWN_THREADS: Final = max(1, (os.cpu_count() or 1) // 2)
"""Threads of one tenant: half of the cores, so that the event loop and other tenants always find one."""

_T = TypeVar("_T")


class TenantSlots:
    """A semaphore whose next slot goes to the tenant that waits longest for its turn."""

    def __init__(self, count: int, own: int | None = None) -> None:
        """Divide `count` slots, of which one tenant may hold `own` at a time (None: all of them)."""
        self._free = count
        self._own = own or count
        self._counts = Counter[str]()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def held(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot in the block."""
        await self.take(tenant)
        try:
            yield
        finally:
            self.give(tenant)

    async def take(self, tenant: str) -> None:
        """Wait for a slot; `give` returns it."""
        if self._free and self._counts[tenant] < self._own:
            self._hold(tenant)
            return
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(given)
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():  # it came in the same moment
                self.give(tenant)
            raise

    def give(self, tenant: str) -> None:
        """Return a slot of `tenant`, and hand it to the next tenant that may have one."""
        self._free += 1
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]
        for waiting in [name for name in self._waiting if self._counts[name] < self._own]:
            if self._hand_to(waiting):
                return

    def _hand_to(self, tenant: str) -> bool:
        """Give a slot to the first of `tenant` that still waits; return False if all of them have gone."""
        own = self._waiting.pop(tenant)
        while own:
            first = own.popleft()
            if not first.done():  # its caller has not gone
                if own:
                    self._waiting[tenant] = own  # behind the others
                self._hold(tenant)
                first.set_result(None)
                return True
        return False

    def _hold(self, tenant: str) -> None:
        self._free -= 1
        self._counts[tenant] += 1

    def close(self) -> None:
        """Cancel whoever waits."""
        for own in self._waiting.values():
            for waiting in own:
                waiting.cancel()


class TurnQueue:
    """Work of tenants that waits for its turn, with what it costs."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def count(self, tenant: str) -> int:
        """Return how much work of `tenant` waits."""
        return len(self._waiting.get(tenant, ()))

    async def wait(self, tenant: str, cost: int = 1) -> None:
        """Wait until `release` lets work of `tenant` begin that costs `cost`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((cost, turn))
        await turn

    def release(self, limit: int) -> dict[str, int]:
        """Let work of each tenant begin until its cost reaches `limit`, in order; return the costs by tenant."""
        begun = dict[str, int]()
        for tenant, waiting in list(self._waiting.items()):
            total = 0
            while waiting and total < limit:
                cost, turn = waiting.popleft()
                if not turn.done():  # its caller has not gone
                    turn.set_result(None)
                    total += cost
            if total:
                begun[tenant] = total
            if not waiting:
                del self._waiting[tenant]
        return begun

    def close(self) -> None:
        """Cancel whatever waits."""
        for waiting in self._waiting.values():
            for _, turn in waiting:
                turn.cancel()


class TenantThreads:
    """Threads for one kind of work. That of one tenant, however much, delays that of another by a turn at most.

    A thread is started when all others work. `ThreadPoolExecutor` has no turns by tenant, and takes more CPU for a
    piece of work.
    """

    def __init__(
        self, name: str, threads: int = CORES_THREADS, own: int | None = OWN_THREADS
    ) -> None:
        """Let up to `threads` threads work, `own` of them for one tenant at a time (None: all of them)."""
        self._name = name
        self._slots = TenantSlots(threads, own)
        self._queue = SimpleQueue[Callable[[], None] | None]()
        self.threads = list[Thread]()
        self._working = 0

    async def run(self, tenant: str, work: Callable[[], _T]) -> _T:
        """Return or raise what `work` does in a thread. Work whose caller has gone before its turn is not begun."""
        await self._slots.take(tenant)
        loop = asyncio.get_running_loop()
        result: asyncio.Future[_T] = loop.create_future()

        def ended(settle: Callable[[], None]) -> None:
            self._working -= 1
            self._slots.give(tenant)
            if not result.done():  # its caller has not gone
                settle()

        def do() -> None:
            try:
                settle = partial(result.set_result, work())
            except BaseException as error:
                settle = partial(result.set_exception, error)
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(ended, settle)
            del settle  # an error has this frame, which would keep the text in a cycle

        self._working += 1
        if self._working > len(self.threads):
            self._start()
        self._queue.put(do)
        return await result

    def close(self) -> None:
        """Begin nothing more, and end each thread after its work."""
        self._slots.close()
        for _ in self.threads:
            self._queue.put(None)

    def _start(self) -> None:
        thread = Thread(target=_work_off, args=(self._queue,), name=self._name, daemon=True)
        thread.start()
        self.threads.append(thread)


def _work_off(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (do := queue.get()) is not None:
        do()
        del do  # what it holds must not wait for the next one
