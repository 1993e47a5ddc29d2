"""Works on texts: on cheap ones in the event loop, on others in threads. Tenants take turns for both.

What it costs to inspect a text depends on what is in it: digits and addresses are checked one by one. Costs are
estimated in characters of plain text; docs/internals/decisions/0015-work-beside-the-loop.md has the measurements.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from gateway.admission.tenant_threads import (
    CORES_THREADS,
    OWN_THREADS,
    TenantThreads,
    TurnQueue,
)

LOOP_COST: Final = 1024
"""Largest cost of texts that are worked on in the event loop: this takes less time than to hand them to a thread and
back."""
TURN_COST: Final = 128
"""What a message costs in addition to its text."""
CHAR_SHARE: Final = 5
"""Plain ASCII characters that cost as much as one digit or one character beyond ASCII."""
_DIGITS: Final = "0123456789"

_T = TypeVar("_T")


def cost_of(texts: Sequence[str]) -> int:
    """Return the estimated cost of inspecting and encoding `texts`."""
    return sum(map(_cost_of, texts)) + TURN_COST * len(texts)


def _cost_of(text: str) -> int:
    """Return the cost of one text; for a long one, any cost above `LOOP_COST`."""
    chars = len(text)
    if chars <= LOOP_COST // 8 or chars > CHAR_SHARE * LOOP_COST or not text.isascii():
        return chars
    return chars // CHAR_SHARE + sum(map(text.count, _DIGITS)) + 16 * text.count("@")


class LoopTurns:
    """Shares the event loop between tenants, for work on short texts.

    In one pass of the loop the work of a tenant stops at a size; the rest waits for the next pass, and other calls run
    in between. `take` returns at once, without giving way, while a tenant has little to do.
    """

    def __init__(self, size: int) -> None:
        """Let work of `size`, in the unit of `take`, begin for one tenant in a pass."""
        self._size = size
        self._begun: dict[str, int] = {}
        self._queue = TurnQueue()

    async def take(self, tenant: str, size: int) -> None:
        """Wait until work of `size` may begin for `tenant`."""
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._next_pass)
        begun = self._begun.get(tenant, 0)
        if begun < self._size and not self._queue.count(tenant):
            self._begun[tenant] = begun + size
            return
        await self._queue.wait(tenant, size)

    def _next_pass(self) -> None:
        self._begun = self._queue.release(self._size)
        if self._begun:
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
        """Take turns in the event loop by `turns`, which are for all kinds of work together."""
        super().__init__(name, threads, own)
        self._turns = turns

    async def work_on(self, texts: Sequence[str], tenant: str, work: Callable[[], _T]) -> _T:
        """Return or raise what `work` on `texts` does, once it is the turn of `tenant`."""
        size = cost_of(texts)
        if size > LOOP_COST:
            return await self.run(tenant, work)
        await self._turns.take(tenant, size)
        return work()
