"""Work on texts: cheap ones in the event loop, others in threads. Tenants take turns for both.

What it costs to inspect a text depends on what is in it: digits and addresses are checked one by one.
docs/internals/decisions/0015-work-beside-the-loop.md has the measurements.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from gateway.admission.tenant_threads import CORES_THREADS, OWN_THREADS, TenantThreads

LOOP_COST: Final = 1024
"""Texts that cost more are worked on in threads. To inspect and encode others takes at most 8 ms, and they are done
sooner than they are handed to a thread and back."""
TURN_COST: Final = 128
"""What a message costs beside its text."""
CHAR_SHARE: Final = 5
"""As many characters cost as much as one digit, address or character beyond ASCII."""
_DIGITS: Final = "0123456789"

_T = TypeVar("_T")


def cost_of(texts: Sequence[str]) -> int:
    """Estimate what it costs to inspect and encode ``texts``; `LOOP_COST` is the unit's scale."""
    return sum(map(_cost_of, texts)) + TURN_COST * len(texts)


def _cost_of(text: str) -> int:
    """Return the cost of one text; of a long one, that it is above `LOOP_COST`."""
    chars = len(text)
    if chars <= LOOP_COST // 8 or chars > CHAR_SHARE * LOOP_COST or not text.isascii():
        return chars
    return chars // CHAR_SHARE + sum(map(text.count, _DIGITS)) + 16 * text.count("@")


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
        size = cost_of(texts)
        if size > LOOP_COST:
            return await self.run(tenant, work)
        await self._turns.take(tenant, size)
        return work()
