"""Work on texts: short ones in the event loop, long ones in threads. Tenants take turns for both.

To inspect 1,000 characters takes about 2 ms, to encode them less. docs/internals/decisions/0015-work-beside-the-loop.md
has the measurements.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from gateway.admission.tenant_threads import CORES_THREADS, OWN_THREADS, TenantThreads

LOOP_CHARS: Final = 1024
"""Longer texts are worked on in threads: a short one is done sooner than it is handed to a thread and back."""
TURN_CHARS: Final = 128
"""What a message costs beside its text, in characters."""

_T = TypeVar("_T")


def size_of(texts: Sequence[str]) -> int:
    """Return what it costs to work on ``texts``, in characters."""
    return sum(map(len, texts)) + TURN_CHARS * len(texts)


class LoopTurns:
    """Shares the event loop between tenants: short texts are inspected and encoded in it.

    In one pass of the loop the work of a tenant stops at a size; what is over it waits for the next pass. Other calls
    run in between. `take` returns at once, without giving way, while a tenant has little to do.
    """

    def __init__(self, size: int) -> None:
        """Let work of ``size``, in the unit of `take`, begin for one tenant in a pass."""
        self._size = size
        self._taken: dict[str, int] = {}
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    async def take(self, tenant: str, size: int) -> None:
        """Wait until work of ``size`` may begin for ``tenant`` in this pass of the loop."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            loop.call_soon(self._next_pass)
        taken = self._taken.get(tenant, 0)
        if taken < self._size and tenant not in self._waiting:
            self._taken[tenant] = taken + size
            return
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append((size, mine))
        await mine

    def _next_pass(self) -> None:
        self._taken.clear()
        for tenant, waiting in list(self._waiting.items()):
            begun = 0
            while waiting and begun < self._size:
                size, first = waiting.popleft()
                if not first.done():  # its caller has not gone
                    first.set_result(None)
                    begun += size
            if begun:
                self._taken[tenant] = begun
            if not waiting:
                del self._waiting[tenant]
        if self._taken:
            asyncio.get_running_loop().call_soon(self._next_pass)


class TextThreads(TenantThreads):
    """Does one kind of work on texts, in the event loop or in threads of its own."""

    def __init__(
        self,
        name: str,
        turns: LoopTurns,
        threads: int = CORES_THREADS,
        own: int = OWN_THREADS,
    ) -> None:
        """Take turns in the event loop by ``turns``, which are for all kinds of work together."""
        super().__init__(name, threads, own)
        self._turns = turns

    async def work_on(self, texts: Sequence[str], tenant: str, work: Callable[[], _T]) -> _T:
        """Return or raise what ``work`` on ``texts`` does, once it is the turn of ``tenant``."""
        size = size_of(texts)
        if size > LOOP_CHARS:
            return await self.run(tenant, work)
        await self._turns.take(tenant, size)
        return work()
