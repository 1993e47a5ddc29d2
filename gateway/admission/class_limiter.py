"""How many calls of each class run, and are prepared, at the same time.

- Running: less urgent classes may hold only a share of all calls. Most of their callers wait, and must not hold what an
  interactive caller needs. A tenant may hold only a share of what its class may, so a newcomer finds room.
- Preparing, which is inspecting and tokenizing: this takes the gateway's processor. Limits of less urgent classes keep
  a burst of bulk requests from delaying an interactive request that arrives after it; inside a class tenants take
  turns.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from gateway.admission.bulk_pacer import BulkPacer
from gateway.admission.count_limit import CountLimit, overloaded
from gateway.admission.tenant_threads import TenantSlots
from sluice.errors import RETRY_AFTER_S, ShuttingDown
from sluice.settings import CallShares
from sluice.wire.subjects import BULK_CLASS, CLASSES, RANKS, URGENT_CLASS

TEXTS_MAX: Final = 8000
"""Texts of one tenant, in calls such as Embed, that are computed at the same time; each is a task."""
PREPARING_MAX: Final[Mapping[str, int]] = {"standard": 8, "bulk": 2}
"""Requests that are prepared at the same time, by class; interactive ones are not limited."""


class ClassLimiter:
    """Limits and counts the calls of one gateway.

    Attributes:
        is_draining: Set it to refuse new calls; those that run continue.
        idle: Set while no call runs.
        pacer: Says when the next bulk call may begin.
        texts: Counts texts of a tenant, of which a call may have many.
        tenant_limits: The most calls of one tenant, by rank: of each class together with the less urgent ones.
    """

    def __init__(
        self,
        limit: int,
        shares: CallShares,
        check_tenant: Callable[[str, int, int | None], None] | None = None,
    ) -> None:
        """Let up to `limit` calls run.

        Args:
            limit: The most calls of all classes and tenants.
            shares: What less urgent classes, and one tenant, may have of it.
            check_tenant: Refuses another call of a tenant. It gets the tenant, its calls that run here, and how many of
                them are of class bulk, or None if the call is of another class.
        """
        self._check_tenant = check_tenant
        self.is_draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self.pacer = BulkPacer()
        self._limits = [slots_of(limit, share) for share in (1.0, shares.standard, shares.bulk)]
        self.tenant_limits = [slots_of(most, shares.tenant) for most in self._limits]
        self._running = [0] * len(CLASSES)
        self._running_by_tenant: dict[str, list[int]] = {}
        self._preparing = dict.fromkeys(CLASSES, 0)
        self._slots = {name: TenantSlots(count) for name, count in PREPARING_MAX.items()}
        self.texts = CountLimit(
            TEXTS_MAX, "tenant_texts", "texts of your tenant are being computed"
        )

    @property
    def active(self) -> int:
        """Calls that run."""
        return sum(self._running)

    async def begin(self, priority_class: str, *, is_entry: bool = False) -> None:
        """Wait until a call of the class may begin: a bulk call, or an entry of a call with many that is not urgent.

        Raises:
            Overloaded: Too many bulk calls wait. Entries wait without bound: their call is read no faster.
        """
        if priority_class == BULK_CLASS or (is_entry and priority_class != URGENT_CLASS):
            await self.pacer.wait(is_bounded=not is_entry)

    @contextmanager
    def running(self, priority_class: str, tenant: str) -> Iterator[None]:
        """Count a call that runs in the block.

        Raises:
            ShuttingDown: The gateway is draining.
            Overloaded: The limit of its class, or of its tenant in the class, is reached.
            LimitReached: The tenant has as many calls as its settings allow.
        """
        if self.is_draining:
            raise ShuttingDown("the gateway is shutting down", retry_after_s=RETRY_AFTER_S)
        rank = RANKS[priority_class]
        own = self._running_by_tenant.get(tenant) or [0] * len(CLASSES)
        _check_ranks(rank, self._limits, self._running, "calls", "")
        _check_ranks(rank, self.tenant_limits, own, "tenant_calls", " of your tenant")
        if self._check_tenant is not None:
            bulk = own[rank] if priority_class == BULK_CLASS else None
            self._check_tenant(tenant, sum(own), bulk)
        self._running[rank] += 1
        self._running_by_tenant[tenant] = own
        own[rank] += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._running[rank] -= 1
            own[rank] -= 1
            if not any(own):
                del self._running_by_tenant[tenant]
            if not self._running_by_tenant:
                self.idle.set()

    def running_of(self, tenant: str, *, bulk: bool = False) -> int:
        """Return the calls of `tenant` that run, all or those of class bulk."""
        first = RANKS[BULK_CLASS] if bulk else 0
        return sum(self._running_by_tenant.get(tenant, ())[first:])

    @property
    def tenants(self) -> set[str]:
        """Tenants whose calls run."""
        return set(self._running_by_tenant)

    @asynccontextmanager
    async def preparing(self, priority_class: str, tenant: str) -> AsyncIterator[None]:
        """Hold a slot for preparing a request in the block. The caller limits the wait for it."""
        slots = self._slots.get(priority_class)
        self._preparing[priority_class] += 1
        try:
            if slots is None:
                yield
            else:
                async with slots.held(tenant):
                    yield
        finally:
            self._preparing[priority_class] -= 1

    @property
    def pending(self) -> Mapping[str, int]:
        """Calls of which nothing was sent to a batcher yet, by class; bulk calls that wait to begin included."""
        bulk = self._preparing[BULK_CLASS] + self.pacer.waiting
        return {**self._preparing, BULK_CLASS: bulk}


def _check_ranks(rank: int, limits: list[int], running: list[int], name: str, whose: str) -> None:
    """Raise Overloaded if another call of the class with `rank` exceeds the limit of a class that includes it."""
    for upto, limit in enumerate(limits[: rank + 1]):
        if sum(running[upto:]) >= limit:
            kind = "" if upto == 0 else f"{CLASSES[upto]} and less urgent "
            raise overloaded(name, f"{limit} {kind}calls{whose} are being answered")


def slots_of(limit: int, share: float) -> int:
    """Return a share of `limit` slots; a share of less than all leaves one, if there are two."""
    return min(math.ceil(limit * share), limit - (share < 1 < limit))
