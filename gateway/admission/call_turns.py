"""Turns of tenants to begin calls, as soon as it is known who calls.

gRPC hands calls over in order of arrival, one in a pass of the event loop. If each was worked on at once, a call would
wait for all that came before it, whoever sent them: 300 callers of one tenant kept another waiting for a second. So
what arrives is taken over first, which is little work, and calls of a tenant begin few at a time.

1. A tenant begins `BURST` calls. Later ones wait for the next round.
2. A round begins when no call has come for `MOMENT_S` and `PASSES` passes of the loop: then nothing waits to be taken
   over, however long a pass takes. While calls come without an end it begins after `ARRIVALS` of them all the same.
3. In a round every tenant begins `BURST` calls.
4. Who has been the only tenant for `ALONE_S` begins `ALONE_BURST` in place of `BURST`, but not while calls come without
   an end: waiting for a calm loop costs time that nobody gains.
5. While fewer than `BURST` calls have come in a round, none can wait, and nobody looks for its end: that costs a timer.
"""

import asyncio
import time
from collections import deque
from typing import Final

from sluice.errors import RETRY_AFTER_S, Overloaded

BURST: Final = 4
"""Calls of a tenant that begin in a round; each takes 1 to 2 ms of the event loop."""
ALONE_BURST: Final = 16
"""With `BURST` the 32 callers of one tenant got 0.83 of the requests a second, with 16 they get 0.96."""
ALONE_S: Final = 1.0
MOMENT_S: Final = 0.001
PASSES: Final = 4
"""gRPC hands over a call in two."""
ARRIVALS: Final = 32
WAITING_MAX: Final = 4096
"""Calls of a tenant that wait."""


class CallTurns:
    """Let calls begin, in turns by tenant. `take` returns at once while a tenant has few calls."""

    def __init__(self, waiting_max: int = WAITING_MAX, moment_s: float = MOMENT_S) -> None:
        self._waiting_max = waiting_max
        self._moment_s = moment_s
        self._begun: dict[str, int] = {}
        """In this round, by tenant."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._arrivals = self._seen = 0
        """Since the last round, and of those the ones before the last look."""
        self._passes = 0
        """Of the loop, in which no call has come."""
        self._waits_since = 0.0
        self._next_look: asyncio.Handle | None = None
        self._latest = ""
        self._shared_until = 0.0

    async def take(self, tenant: str) -> None:
        """Wait until the next call of ``tenant`` may begin.

        Raises:
            Overloaded: Too many calls of the tenant wait.
        """
        self._arrivals += 1
        if self._next_look is None and self._arrivals >= BURST:
            self._seen = self._arrivals
            self._wait_a_moment()
        if tenant != self._latest:
            self._latest, before = tenant, self._latest
            self._shared_until = time.monotonic() + ALONE_S if before else 0.0
        begun = self._begun.get(tenant, 0)
        if tenant not in self._waiting and (begun < BURST or begun < self._burst()):
            self._begun[tenant] = begun + 1
            return
        waiting = self._waiting.setdefault(tenant, deque())
        if len(waiting) >= self._waiting_max:
            raise Overloaded(
                f"{self._waiting_max} calls of your tenant wait to begin",
                retry_after_s=RETRY_AFTER_S,
            )
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(mine)
        await mine

    def close(self) -> None:
        """Begin nothing more."""
        if self._next_look is not None:
            self._next_look.cancel()
        for waiting in self._waiting.values():
            for call in waiting:
                call.cancel()

    def _wait_a_moment(self) -> None:
        self._passes, self._waits_since = 0, time.monotonic()
        self._next_look = asyncio.get_running_loop().call_later(self._moment_s, self._look)

    def _look(self) -> None:
        is_calm, self._seen = self._seen == self._arrivals, self._arrivals
        is_idle = not self._waiting and time.monotonic() - self._waits_since < 2 * self._moment_s
        if is_calm and self._passes < PASSES and not is_idle:
            self._passes += 1
            self._next_look = asyncio.get_running_loop().call_soon(self._look)
            return
        if is_calm or self._arrivals >= ARRIVALS:
            self._arrivals = self._seen = 0
            self._begin_round(self._burst() if is_calm else BURST)
        if self._begun or self._waiting:
            self._wait_a_moment()
        else:
            self._next_look = None

    def _burst(self) -> int:
        return BURST if time.monotonic() < self._shared_until else ALONE_BURST

    def _begin_round(self, burst: int) -> None:
        self._begun.clear()
        for tenant, waiting in list(self._waiting.items()):
            begun = 0
            while waiting and begun < burst:
                first = waiting.popleft()
                if not first.done():  # its caller has not gone
                    first.set_result(None)
                    begun += 1
            if begun:
                self._begun[tenant] = begun
            if not waiting:
                del self._waiting[tenant]
