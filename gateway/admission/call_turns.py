"""Lets calls begin in turns by tenant, as soon as their callers are known.

gRPC hands calls over in order of arrival, one in a pass of the event loop. If each was worked on at once, a call would
wait for all that came before it, whoever sent them. So calls are taken over first, which is little work, and only a few
calls of a tenant begin at a time.

1. A tenant begins `BURST` calls. Later ones wait for the next round.
2. A round begins when no call has come for `MOMENT_S` and `PASSES` passes of the loop: then none waits to be taken
   over, however long a pass takes. If calls never stop arriving, it begins after `ARRIVALS` of them.
3. In a round every tenant begins `BURST` calls.
4. A tenant that has been the only one for `ALONE_S` begins `ALONE_BURST` calls instead, unless calls never stop
   arriving: waiting for a calm loop costs time, and there is nobody to gain it.
5. While fewer than `BURST` calls have come in a round, none can wait, and no timer looks for the end of the round.
"""

import asyncio
import time
from typing import Final

from gateway.admission.count_limit import overloaded
from gateway.admission.tenant_threads import TurnQueue

BURST: Final = 4
"""Calls of a tenant that begin in a round: together they take the event loop for a few milliseconds."""
ALONE_BURST: Final = 16
"""Calls that the only tenant begins in a round, so that rounds do not limit its throughput."""
ALONE_S: Final = 1.0
"""How long a tenant must have been the only one, in seconds."""
MOMENT_S: Final = 0.001
"""How long no call must come before a round begins, in seconds."""
PASSES: Final = 4
"""Passes of the loop without a call before a round begins; gRPC hands over a call in two."""
ARRIVALS: Final = 32
"""Calls after which a round begins although calls keep arriving."""
WAITING_MAX: Final = 4096
"""Calls of a tenant that may wait."""


class CallTurns:
    """Let calls begin, in turns by tenant. `take` returns at once while a tenant has few calls."""

    def __init__(self, waiting_max: int = WAITING_MAX, moment_s: float = MOMENT_S) -> None:
        """Let up to `waiting_max` calls of a tenant wait; see `MOMENT_S`."""
        self._waiting_max = waiting_max
        self._moment_s = moment_s
        self._begun: dict[str, int] = {}
        """Calls that began in this round, by tenant."""
        self._queue = TurnQueue()
        self._arrivals = self._seen = 0
        """Calls since the last round, and those of them before the last look."""
        self._passes = 0
        """Passes of the loop in which no call has come."""
        self._waits_since = 0.0
        self._next_look: asyncio.Handle | None = None
        self._latest = ""
        self._shared_until = 0.0

    async def take(self, tenant: str) -> None:
        """Wait until the next call of `tenant` may begin.

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
        if not self._queue.count(tenant) and (begun < BURST or begun < self._burst()):
            self._begun[tenant] = begun + 1
            return
        if self._queue.count(tenant) >= self._waiting_max:
            message = f"{self._waiting_max} calls of your tenant wait to begin"
            raise overloaded("tenant_waiting", message)
        await self._queue.wait(tenant)

    def close(self) -> None:
        """Begin nothing more."""
        if self._next_look is not None:
            self._next_look.cancel()
        self._queue.close()

    def _wait_a_moment(self) -> None:
        self._passes, self._waits_since = 0, time.monotonic()
        self._next_look = asyncio.get_running_loop().call_later(self._moment_s, self._look)

    def _look(self) -> None:
        is_calm, self._seen = self._seen == self._arrivals, self._arrivals
        is_idle = not self._queue and time.monotonic() - self._waits_since < 2 * self._moment_s
        if is_calm and self._passes < PASSES and not is_idle:
            self._passes += 1
            self._next_look = asyncio.get_running_loop().call_soon(self._look)
            return
        if is_calm or self._arrivals >= ARRIVALS:
            self._arrivals = self._seen = 0
            self._begun = self._queue.release(self._burst() if is_calm else BURST)
        if self._begun or self._queue:
            self._wait_a_moment()
        else:
            self._next_look = None

    def _burst(self) -> int:
        return BURST if time.monotonic() < self._shared_until else ALONE_BURST
