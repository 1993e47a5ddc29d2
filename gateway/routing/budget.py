"""The spending of each tenant: what it cost in each of the last periods, and what running requests may still cost.

A period is a minute of the last hour, or a day of the last month, counted from the Unix epoch. Gateways tell each other
their costs of each period and their reservations, so that a budget holds for all of them together.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

MINUTE_S: Final = 60.0
HOUR_PERIODS: Final = 60
DAY_S: Final = 86_400.0
MONTH_PERIODS: Final = 31
STALE_S: Final = 3.5
"""Reservations of another gateway count for this long after it has told them, seconds."""
_OWN: Final = ""

Costs = Mapping[str, float]
"""By tenant, in the currency of the prices."""


class Reservation:
    """What one running request may cost at most.

    Attributes:
        settle: gives back what it has reserved of its limits, less what it has used.
    """

    def __init__(self, reserved: "_Reserved", tenant: str, cost: float) -> None:
        self.settle: Callable[[float], None] | None = None
        self._reserved, self._tenant, self._cost = reserved, tenant, 0.0
        self._held = True
        reserved.running[tenant] = reserved.running.get(tenant, 0) + 1
        self.change(cost)

    def change(self, cost: float) -> None:
        """It is ``cost`` from now on."""
        assert self._held, "it was released"
        self._reserved.add(self._tenant, cost - self._cost)
        self._cost = cost

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """An error that passes through ends the request."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def release(self, tokens: int = 0) -> None:
        """The request has ended, and used so many tokens; a second call has no effect."""
        if not self._held:
            return
        if self.settle is not None:
            self.settle(tokens)
        self.change(0.0)
        self._held = False
        self._reserved.running[self._tenant] -= 1
        if not self._reserved.running[self._tenant]:  # drops rounding errors
            del self._reserved.running[self._tenant], self._reserved.costs[self._tenant]


class _Reserved:
    """Reservations of this gateway, by tenant: how many, and their sum."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self.costs: dict[str, float] = {}

    def add(self, tenant: str, cost: float) -> None:
        self.costs[tenant] = self.costs.get(tenant, 0.0) + cost


class Spending:
    """Costs by tenant, of this gateway and of those that it has heard of.

    Args:
        unix_offset_s: added to ``now`` gives seconds since the Unix epoch.
        period_s: length of a period, seconds.

    Attributes:
        periods: how many of them are kept.
    """

    def __init__(
        self,
        unix_offset_s: float = 0.0,
        period_s: float = MINUTE_S,
        periods: int = HOUR_PERIODS,
    ) -> None:
        self._unix_offset_s = unix_offset_s
        self._period_s = period_s
        self.periods = periods
        self._costs: dict[int, dict[str, dict[str, float]]] = {}
        """By period, gateway and tenant."""
        self._reserved = _Reserved()
        self._others: dict[str, tuple[Costs, float]] = {}
        """Reservations of other gateways, with the time at which they were told."""

    def add(self, tenant: str, cost: float, now: float) -> None:
        """A request of ``tenant`` has cost ``cost``."""
        if cost <= 0:
            return
        self._expire(now)
        costs = self._costs.setdefault(self._period(now), {}).setdefault(_OWN, {})
        costs[tenant] = costs.get(tenant, 0.0) + cost

    def reserve(self, tenant: str, cost: float) -> Reservation:
        """A request of ``tenant`` begins that may cost ``cost``."""
        return Reservation(self._reserved, tenant, cost)

    def spent(self, tenant: str, now: float, periods: int | None = None) -> float:
        """What the last ``periods`` (None: all) have cost and running requests may still cost."""
        self._expire(now)
        first = self._period(now) - (periods or self.periods) + 1
        settled = sum(
            costs.get(tenant, 0.0)
            for period, by_gateway in self._costs.items()
            if period >= first
            for costs in by_gateway.values()
        )
        return settled + self.may_cost(tenant, now)

    def may_cost(self, tenant: str, now: float) -> float:
        """What running requests may still cost."""
        others = sum(
            costs.get(tenant, 0.0)
            for costs, told_at in self._others.values()
            if now - told_at <= STALE_S
        )
        return self._reserved.costs.get(tenant, 0.0) + others

    def tenants(self, now: float) -> set[str]:
        """Those that have spent something."""
        self._expire(now)
        every = (costs for by_gateway in self._costs.values() for costs in by_gateway.values())
        return {tenant for costs in every for tenant in costs}

    @property
    def reserved(self) -> Costs:
        """What the running requests of this gateway may still cost."""
        return self._reserved.costs

    def own(self, now: float, periods: int) -> Iterator[tuple[int, Costs]]:
        """What this gateway's requests have cost in each of the last ``periods``, where it is anything."""
        for period, by_gateway in self._costs.items():
            if _OWN in by_gateway and period > self._period(now) - periods:
                yield period, by_gateway[_OWN]

    def told(self, gateway: str, period: int, costs: Costs, now: float) -> None:
        """Another gateway's requests have cost ``costs`` in ``period``; replaces what it has told of it before."""
        if period > self._period(now) - self.periods:
            self._costs.setdefault(period, {})[gateway] = dict(costs)

    def told_reserved(self, gateway: str, costs: Costs, now: float) -> None:
        """Another gateway's running requests may still cost ``costs``."""
        self._others = {
            name: told for name, told in self._others.items() if now - told[1] <= STALE_S
        }
        self._others[gateway] = dict(costs), now

    def _period(self, now: float) -> int:
        return int((now + self._unix_offset_s) // self._period_s)

    def _expire(self, now: float) -> None:
        """Forgets what is older than the window."""
        first = self._period(now) - self.periods + 1
        for period in [period for period in self._costs if period < first]:
            del self._costs[period]
