"""Turns of tenants: for slots, for passes of the event loop, and for threads.

However much work of one tenant waits, that of another is next. `TenantSlots` is a semaphore with turns, `LoopTurns`
limits the work of a tenant in one pass of the event loop, and `TenantThreads` works in threads. `TextThreads` chooses
between the last two by the cost of texts: it depends on what is in them, because digits and addresses are checked one
by one. The unit of cost is a digit, or `CHAR_SHARE` plain characters; measurements are in
docs/internals/decisions/0015-work-beside-the-loop.md.

The event loop and the threads share one interpreter, which switches between them after `sluice.interpreter.SWITCH_S`. A
tenant has few threads, so a call of another tenant waits that long behind each of them, however much work they have.
"""

import asyncio
import os
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeVar

CORES_THREADS: Final = min(32, (os.cpu_count() or 1) + 4)
"""Threads of all tenants: as many as asyncio's own pool has."""
OWN_THREADS: Final = max(1, (os.cpu_count() or 1) // 2)
"""Threads of one tenant: half of the cores, so that the event loop and other tenants always find one."""
LOOP_COST: Final = 1024
"""Largest cost of texts that are worked on in the event loop: this takes less time than to hand them to a thread and
back."""
TURN_COST: Final = 128
"""What a message costs in addition to its text."""
CHAR_SHARE: Final = 5
"""Plain ASCII characters that cost as much as one digit or one character beyond ASCII."""
_DIGITS: Final = "0123456789"

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
    async def hold_slot(self, tenant: str) -> AsyncIterator[None]:
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
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came in the same moment
                self.give(tenant)
            raise

    def give(self, tenant: str) -> None:
        """Return a slot of `tenant`, and hand it to the next tenant that may have one."""
        self._free += 1
        self._counts[tenant] -= 1
        for name in [name for name in self._waiting if self._counts[name] < self._own]:
            own = self._waiting.pop(name)
            while own and own[0].done():  # its caller has gone
                own.popleft()
            if own:
                first = own.popleft()
                if own:
                    self._waiting[name] = own  # behind the others
                self._hold(name)
                first.set_result(None)
                break
        if not self._counts[tenant]:
            del self._counts[tenant]

    def _hold(self, tenant: str) -> None:
        self._free -= 1
        self._counts[tenant] += 1

    def close(self) -> None:
        """Cancel whoever waits."""
        for own in self._waiting.values():
            for waiting in own:
                waiting.cancel()


class TurnQueue:
    """Work of tenants that begins in turns: each begins a little at a time, the rest waits for `_release`."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}
        """What work that has begun since the last release costs, by tenant."""
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        """Work that waits, each with its cost."""

    async def _wait(self, tenant: str, cost: int = 1) -> None:
        """Wait until `_release` lets work of `tenant` begin that costs `cost`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((cost, turn))
        await turn

    def _release(self, limit: int) -> None:
        """Let waiting work of each tenant begin until its cost reaches `limit`, in order."""
        self._begun = {}
        for tenant, waiting in list(self._waiting.items()):
            total = 0
            while waiting and total < limit:
                cost, turn = waiting.popleft()
                if not turn.done():  # its caller has not gone
                    turn.set_result(None)
                    total += cost
            if total:
                self._begun[tenant] = total
            if not waiting:
                del self._waiting[tenant]

    def close(self) -> None:
        """Cancel whatever waits."""
        for waiting in self._waiting.values():
            for _, turn in waiting:
                turn.cancel()


class LoopTurns(TurnQueue):
    """Shares the event loop between tenants, for work on short texts.

    In one pass of the loop the work of a tenant stops at a size; the rest waits for the next pass, and other calls run
    in between. `take` returns at once, without giving way, while a tenant has little to do.
    """

    def __init__(self, size: int = LOOP_COST) -> None:
        """Let work of `size`, in the unit of `take`, begin for one tenant in a pass."""
        super().__init__()
        self._size = size

    async def take(self, tenant: str, size: int) -> None:
        """Wait until work of `size` may begin for `tenant`."""
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._next_pass)
        begun = self._begun.get(tenant, 0)
        if begun < self._size and tenant not in self._waiting:
            self._begun[tenant] = begun + size
        else:
            await self._wait(tenant, size)

    def _next_pass(self) -> None:
        if not self._waiting:
            self._begun = {}
            return
        self._release(self._size)
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next_pass)


class TenantThreads:
    """Threads for one kind of work. That of one tenant, however much, delays that of another by a turn at most."""

    def __init__(
        self, name: str, threads: int = CORES_THREADS, own: int | None = OWN_THREADS
    ) -> None:
        """Let up to `threads` threads work, `own` of them for one tenant at a time (None: all of them)."""
        self._slots = TenantSlots(threads, own)
        self._pool = ThreadPoolExecutor(threads, name)

    async def run(self, tenant: str, work: Callable[[], _T]) -> _T:
        """Return or raise what `work` does in a thread. Work whose caller has gone before its turn is not begun."""
        await self._slots.take(tenant)
        loop = asyncio.get_running_loop()

        def ended(_: Future[_T]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._slots.give, tenant)

        working = self._pool.submit(work)
        # When the caller goes, a thread that works keeps its slot until it is done.
        working.add_done_callback(ended)
        return await asyncio.wrap_future(working)

    def close(self) -> None:
        """Begin nothing more, and end each thread after its work."""
        self._slots.close()
        self._pool.shutdown(wait=False)


class TextThreads(TenantThreads):
    """Does one kind of work on texts, in the event loop or in threads of its own."""

    def __init__(
        self, name: str, turns: LoopTurns, threads: int = CORES_THREADS, own: int = OWN_THREADS
    ) -> None:
        """Take turns in the event loop by `turns`, which are for all kinds of work together."""
        super().__init__(name, threads, own)
        self._turns = turns

    async def work_on(self, texts: Sequence[str], tenant: str, work: Callable[[], _T]) -> _T:
        """Return or raise what `work` on `texts` does, once it is the turn of `tenant`."""
        size = sum(map(_cost_of, texts)) + TURN_COST * len(texts)
        if size > LOOP_COST:
            return await self.run(tenant, work)
        await self._turns.take(tenant, size)
        return work()


def _cost_of(text: str) -> int:
    """Return the cost of one text; for a long one, any cost above `LOOP_COST`."""
    chars = len(text)
    if chars <= LOOP_COST // 8 or chars > CHAR_SHARE * LOOP_COST or not text.isascii():
        return chars
    return chars // CHAR_SHARE + sum(map(text.count, _DIGITS)) + 16 * text.count("@")
