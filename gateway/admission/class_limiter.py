"""Limits by class and tenant: how many calls run at the same time, and how many of them are inspected and tokenized.

Calls that run: less urgent classes may hold only a share of all, so their callers, most of whom wait, never hold what
an interactive caller needs. A tenant may hold only a share of what its class may, so a newcomer finds room.

Bulk calls begin while the event loop has nothing more urgent to do. gRPC hands calls over in order of arrival, one in
each turn of the loop, whatever their class; work for a bulk call makes every turn longer, and so the wait of an
interactive call behind thousands of them. So bulk calls are only taken over at first, and begin, one at a time, when no
call has come for a moment and the loop has had little to do; a few begin in any case.

Calls that are inspected and tokenized: this takes the gateway's processor. The limits of less urgent classes keep a
burst of bulk requests from delaying an interactive request that arrives after it; inside a class tenants take turns.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    contextmanager,
    nullcontext,
)
from typing import Final

from gateway.admission.tenant_threads import TenantSlots, counted
from sluice.errors import RETRY_AFTER_S, Overloaded, ShuttingDown
from sluice.settings import CallShares
from sluice.wire.subjects import BULK_CLASS, CLASSES, RANKS

MOMENT_S: Final = 0.001
BUSY_S: Final = 0.005
"""A loop that computes for longer than this in a moment has more to do than it can."""
PATIENCE_S: Final = 0.02
"""How often a call begins although the loop is busy, seconds."""
WAITING_MAX: Final = 16_384
ROWS_MAX: Final = 8000
PREPARED_MAX: Final[Mapping[str, int]] = {"standard": 8, "bulk": 2}
"""Requests that are prepared at the same time, by class; interactive ones are not limited."""


class ClassLimiter:
    """The calls of one gateway.

    Attributes:
        draining: set it to refuse new calls; those that run continue.
        idle: set while no call runs.
        turns: when the next bulk call may begin.
    """

    def __init__(
        self,
        limit: int,
        shares: CallShares,
        check_tenant: Callable[[str, int, int | None], None] | None = None,
        rows_max: int = ROWS_MAX,
    ) -> None:
        """All that may run at the same time.

        Args:
            limit: calls.
            check_tenant: refuses another call of a tenant, of which so many run here; the last argument says how many
                of class bulk, None that the call is of another class.
            rows_max: rows of a tenant's calls about texts, each of which has many.
        """
        self._check_tenant = check_tenant
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self.turns = Turns()
        by_class = (1.0, shares.standard, shares.bulk)
        self._limits = [_places(limit, share) for share in by_class]
        """Of a class together with the less urgent ones, by rank."""
        self._tenant_limits = [_places(most, shares.tenant) for most in self._limits]
        self._running = [0] * len(CLASSES)
        self._by_tenant: Counter[tuple[str, int]] = Counter()
        self._rows_max = rows_max
        self._rows: Counter[str] = Counter()
        self._slots = {name: TenantSlots(count) for name, count in PREPARED_MAX.items()}

    @property
    def active(self) -> int:
        """Calls that run."""
        return sum(self._running)

    async def turn(self, priority_class: str) -> None:
        """Returns when a call of this class may begin: `call` is next.

        Raises:
            Overloaded: too many wait.
        """
        if priority_class == BULK_CLASS:
            await self.turns.turn()

    @contextmanager
    def call(self, priority_class: str, tenant: str) -> Iterator[None]:
        """Counts a call while it runs.

        Raises:
            ShuttingDown, Overloaded: there is no room for it; with the time to retry.
        """
        rank = RANKS[priority_class]
        self._check(rank, tenant)
        self._running[rank] += 1
        self.idle.clear()
        try:
            with counted(self._by_tenant, (tenant, rank)):
                yield
        finally:
            self._running[rank] -= 1
            if not self.active:
                self.idle.set()

    def rows(self, tenant: str, count: int) -> AbstractContextManager[None]:
        """Counts the rows of a call about texts while it runs. One alone is never too large.

        Raises:
            Overloaded: with those of the tenant's other calls they are too many.
        """
        if self._rows[tenant] and self._rows[tenant] + count > self._rows_max:
            raise _overloaded(f"{self._rows_max} texts of your tenant are being computed")
        return counted(self._rows, tenant, count)

    def running(self, tenant: str, *, bulk: bool = False) -> int:
        """Calls of ``tenant`` that run, all or those of class bulk."""
        first = RANKS[BULK_CLASS] if bulk else 0
        return sum(self._by_tenant.get((tenant, rank), 0) for rank in range(first, len(CLASSES)))

    @property
    def tenants(self) -> set[str]:
        """Those of which calls run."""
        return {tenant for tenant, _ in self._by_tenant}

    def slot(self, priority_class: str, tenant: str) -> AbstractAsyncContextManager[None]:
        """Held while a request is prepared; tenants take turns. The caller limits the wait."""
        slots = self._slots.get(priority_class)
        return nullcontext() if slots is None else slots.held(tenant)

    def _check(self, rank: int, tenant: str) -> None:
        if self.draining:
            raise ShuttingDown("the gateway is shutting down", retry_after_s=RETRY_AFTER_S)
        own = [self._by_tenant.get((tenant, one), 0) for one in range(len(CLASSES))]
        for limits, running, whose in (
            (self._limits, self._running, ""),
            (self._tenant_limits, own, " of your tenant"),
        ):
            for upto, limit in enumerate(limits[: rank + 1]):
                if sum(running[upto:]) >= limit:
                    kind = "" if upto == 0 else f"{CLASSES[upto]} and less urgent "
                    raise _overloaded(f"{limit} {kind}calls{whose} are being answered")
        if self._check_tenant is not None:
            bulk = self.running(tenant, bulk=True) if CLASSES[rank] == BULK_CLASS else None
            self._check_tenant(tenant, self.running(tenant), bulk)


class Turns:
    """The calls of one gateway, over gRPC and HTTP."""

    def __init__(self) -> None:
        self._arrived = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._giving: asyncio.Task[None] | None = None

    def arrived(self) -> None:
        """A call has come, of any class."""
        self._arrived += 1

    async def turn(self) -> None:
        """Returns when the next bulk call may begin.

        Raises:
            Overloaded: too many wait.
        """
        if len(self._waiting) >= WAITING_MAX:
            raise _overloaded(f"{WAITING_MAX} bulk calls wait for their turn")
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        if self._giving is None or self._giving.done():
            self._giving = asyncio.create_task(self._give())
        await mine

    async def _give(self) -> None:
        loop = asyncio.get_running_loop()
        given_at = loop.time()
        while self._waiting:
            arrived, used_s = self._arrived, time.thread_time()
            await asyncio.sleep(MOMENT_S)
            # Not the time that has passed: a process that waits for a core gains nothing by waiting longer.
            busy_s, now = time.thread_time() - used_s, loop.time()
            calm = self._arrived == arrived and busy_s < BUSY_S
            if calm or now - given_at > PATIENCE_S:
                given_at = now
                self._give_next()

    def _give_next(self) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # its caller has not gone
                first.set_result(None)
                return


def _places(limit: int, share: float) -> int:
    """A share of ``limit`` places; a share of less than all leaves one, if there are two."""
    return min(math.ceil(limit * share), limit - (share < 1 < limit))


def _overloaded(message: str) -> Overloaded:
    return Overloaded(message, retry_after_s=RETRY_AFTER_S)
