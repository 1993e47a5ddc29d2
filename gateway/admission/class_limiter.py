"""How many calls of each class run, and are prepared, at the same time; and when the next bulk call begins.

- Running: less urgent classes may hold only a share of all calls. Most of their callers wait, and must not hold what an
  interactive caller needs. A tenant may hold only a share of what its class may, so a newcomer finds room.
- Preparing, which is inspecting and tokenizing: this takes the gateway's processor. Limits of less urgent classes keep
  a burst of bulk requests from delaying an interactive request that arrives after it; inside a class tenants take
  turns.
- Beginning: gRPC hands calls over in order of arrival, one in each pass of the event loop, whatever their class. Work
  for a bulk call makes every pass longer, and so the wait of an interactive call behind thousands of them. So a bulk
  call is only taken over at first, and begins when `BulkPacer` lets it.
"""

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Final

from gateway.admission.policies import InForce
from gateway.admission.turns import TenantSlots
from sluice.errors import RETRY_AFTER_S, Overloaded, ShuttingDown
from sluice.settings import CallShares
from sluice.wire.subjects import BULK_CLASS, CLASSES, RANKS

TEXTS_MAX: Final = 8000
"""Texts of one tenant, in calls such as Embed, that are computed at the same time; each is a task."""
PREPARING_MAX: Final[Mapping[str, int]] = {"standard": 8, "bulk": 2}
"""Requests that are prepared at the same time, by class; interactive ones are not limited."""
CALM_S: Final = 0.001
"""How long the loop is watched before a bulk call begins, in seconds: shorter than most work for one call."""
BUSY_S: Final = 0.005
"""CPU time of the loop while it is watched from which on it counts as busy, in seconds: more than one call takes."""
PATIENCE_S: Final = 0.02
"""How long the loop may be busy before a bulk call begins anyway, in seconds. Moments are no measure of it: they take
1 ms while thousands of calls arrive, and much longer while the loop computes."""
BULK_WAITING_MAX: Final = 16_384
"""Bulk calls of a gateway that may wait; a call that waits holds its message in memory."""


def overloaded(limit: str, message: str) -> Overloaded:
    """Return the refusal of a call by the gateway's own limit named `limit`; see docs/operate/limits.md."""
    return Overloaded(message, metadata={"limit": limit}, retry_after_s=RETRY_AFTER_S)


@dataclass
class CountLimit:
    """Counts what each tenant has, up to a maximum.

    Attributes:
        maximum: The most that one tenant may have.
        name: The limit in errors, for programs.
        what: Names what is limited in errors, for people.
        counts: What each tenant has; a tenant that has nothing has no entry.
    """

    maximum: int
    name: str
    what: str
    counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def take(self, tenant: str, count: int = 1) -> None:
        """Count `count` more for `tenant`, until `give`.

        Raises:
            Overloaded: It would exceed the maximum; nothing was counted.
        """
        if self.counts.get(tenant, 0) + count > self.maximum:
            raise overloaded(self.name, f"{self.maximum} {self.what} are being answered")
        self.counts[tenant] += count

    def give(self, tenant: str, count: int = 1) -> None:
        """Count `count` less for `tenant`."""
        self.counts[tenant] -= count
        if not self.counts[tenant]:
            del self.counts[tenant]

    @contextmanager
    def hold(self, tenant: str, count: int = 1) -> Iterator[Callable[[int], None]]:
        """Count `count` until the block ends; the yielded function counts more. Both raise as `take`."""

        def take(more: int) -> None:
            nonlocal count
            self.take(tenant, more)
            count += more

        self.take(tenant, count)
        try:
            yield take
        finally:
            self.give(tenant, count)


class BulkPacer:
    """Lets bulk calls begin, in order of arrival: one at a time, while the event loop has nothing more urgent to do.

    One begins after a calm moment: no call came, and the loop computed little. When none has begun for `patience_s`,
    one begins all the same, so bulk work never stands still.

    Attributes:
        arrived_at: When the last call of any class came, in monotonic seconds.
        waiting: Calls that wait.
    """

    def __init__(
        self, waiting_max: float = BULK_WAITING_MAX, patience_s: float = PATIENCE_S
    ) -> None:
        """Let up to `waiting_max` calls wait; see `PATIENCE_S`."""
        self.arrived_at = -math.inf
        self._waiting_max = waiting_max
        self._patience_s = patience_s
        self.waiting: deque[asyncio.Future[None]] = deque()
        self._pacing: asyncio.Task[None] | None = None

    async def wait(self, *, is_bounded: bool = True) -> None:
        """Wait until the next bulk call may begin.

        Args:
            is_bounded: Whether too many waiting calls refuse this one; entries of a call wait without bound, because
                their call is read no faster than they begin.

        Raises:
            Overloaded: Too many calls wait.
        """
        if is_bounded and len(self.waiting) >= self._waiting_max:
            raise overloaded("bulk_waiting", f"{self._waiting_max} bulk calls wait to begin")
        turn = asyncio.Future[None]()
        self.waiting.append(turn)
        if self._pacing is None or self._pacing.done():
            self._pacing = asyncio.create_task(self._pace())
        await turn

    async def _pace(self) -> None:
        latest_at = time.monotonic()
        while self.waiting:
            begun_at, used_s = time.monotonic(), time.thread_time()
            await asyncio.sleep(CALM_S)
            # CPU time, not the time that has passed: a process that waits for a core gains nothing by waiting longer.
            is_calm = self.arrived_at < begun_at and time.thread_time() - used_s < BUSY_S
            if is_calm or time.monotonic() - latest_at > self._patience_s:
                latest_at = time.monotonic()
                while self.waiting and (turn := self.waiting.popleft()).done():
                    pass  # its caller has gone
                if not turn.done():
                    turn.set_result(None)


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
        in_force: InForce | None = None,
        check_tenant: Callable[[str, int, int | None], None] = lambda *_: None,
    ) -> None:
        """Let up to `limit` calls run.

        Args:
            limit: The most calls of all classes and tenants.
            shares: What less urgent classes, and one tenant, may have of it.
            in_force: The policies in force: whether any tenant has limits.
            check_tenant: Refuses another call of a tenant; see `TenantLimits.check_running`.
        """
        self._in_force, self._check_tenant = in_force, check_tenant
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
        self.texts = CountLimit(TEXTS_MAX, "tenant_texts", "texts of your tenant")

    @property
    def active(self) -> int:
        """Calls that run."""
        return sum(self._running)

    @contextmanager
    def running(self, priority_class: str, tenant: str) -> Iterator[None]:
        """Count a call that runs in the block.

        Raises:
            ShuttingDown: The gateway is draining.
            Overloaded: The limit of its class, or of its tenant in the class, is reached.
            LimitReached: The tenant has as many calls as its settings allow.
        """
        if self.is_draining:
            raise ShuttingDown("the gateway is shutting down")
        rank = RANKS[priority_class]
        own = self._running_by_tenant.get(tenant) or [0] * len(CLASSES)
        # A call counts against the limit of its class, and against those of more urgent ones, which include it.
        for running, limits, name, whose in (
            (self._running, self._limits, "calls", ""),
            (own, self.tenant_limits, "tenant_calls", " of your tenant"),
        ):
            for upto, limit in enumerate(limits[: rank + 1]):
                if sum(running[upto:]) >= limit:
                    kind = f"{CLASSES[upto]} and less urgent " if upto else ""
                    raise overloaded(name, f"{limit} {kind}calls{whose} are being answered")
        if self._in_force is not None and self._in_force.policies.has_limits:
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
                async with slots.hold_slot(tenant):
                    yield
        finally:
            self._preparing[priority_class] -= 1

    @property
    def pending(self) -> Mapping[str, int]:
        """Calls of which nothing was sent to a batcher yet, by class; bulk calls that wait to begin included."""
        bulk = self._preparing[BULK_CLASS] + len(self.pacer.waiting)
        return {**self._preparing, BULK_CLASS: bulk}


def slots_of(limit: int, share: float) -> int:
    """Return a share of `limit` slots; a share of less than all leaves one, if there are two."""
    return min(math.ceil(limit * share), limit - (share < 1 < limit))
