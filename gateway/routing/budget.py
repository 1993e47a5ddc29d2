"""Spending of each tenant: what each recent period has cost, and what running requests may still cost.

A period is a minute of the last hour, or a day of the last month, counted from the Unix epoch.
Gateways exchange their costs of each period and their reservations, so that a budget holds for all
of them together.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

MINUTE_S: Final = 60.0
"""Length of the periods of hourly budgets, in seconds."""
HOUR_PERIODS: Final = 60
"""Periods of hourly budgets that are kept."""
DAY_S: Final = 86_400.0
"""Length of the periods of monthly costs, in seconds."""
MONTH_PERIODS: Final = 31
"""Periods of monthly costs that are kept."""
STALE_S: Final = 3.5
"""How long the numbers of another gateway count after its last heartbeat, in seconds."""
_OWN: Final = ""
"""Stands for this gateway among the ids of gateways."""

Costs = Mapping[str, float]
"""Cost by tenant, in the currency of the prices."""


class RemoteTotals:
    """A number per tenant, summed over the other gateways; a silent gateway stops counting."""

    def __init__(self) -> None:
        self._by_gateway: dict[str, tuple[Mapping[str, float], float]] = {}

    def update(self, gateway: str, numbers: Mapping[str, float], now: float) -> None:
        """Replace the numbers of another gateway."""
        self._by_gateway = {
            name: entry for name, entry in self._by_gateway.items() if now - entry[1] <= STALE_S
        }
        self._by_gateway[gateway] = dict(numbers), now

    def sum(self, tenant: str, now: float) -> float:
        """Return the sum over all other gateways."""
        live = [numbers for numbers, at in self._by_gateway.values() if now - at <= STALE_S]
        return sum([numbers.get(tenant, 0) for numbers in live])


class Spending:
    """Costs by tenant, of this gateway and of those that it hears from.

    Args:
        unix_offset_s: difference between the Unix epoch and `now`, in seconds.
        period_s: length of a period, in seconds.

    Attributes:
        periods: number of periods that are kept.
        elsewhere: reservations of the other gateways.
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
        """Cost by period, gateway and tenant."""
        self.elsewhere = RemoteTotals()
        self._running = defaultdict[str, dict[object, float]](dict)
        """Reserved costs by tenant and request."""

    def add(self, tenant: str, cost: float, now: float) -> None:
        """Book the cost of a request that has ended."""
        if cost <= 0:
            return
        self._expire(now)
        costs = self._costs.setdefault(self._period(now), {}).setdefault(_OWN, {})
        costs[tenant] = costs.get(tenant, 0.0) + cost

    def reserve(self, tenant: str, request: object, cost: float) -> None:
        """Reserve the highest possible cost of a running request, in place of what was reserved for it before."""
        self._running[tenant][request] = cost

    def release(self, tenant: str, request: object) -> None:
        """End what is reserved for a request, if anything is."""
        own = self._running.get(tenant, {})
        if own.pop(request, None) is not None and not own:
            del self._running[tenant]

    @property
    def reserved(self) -> dict[str, float]:
        """What this gateway's running requests may still cost, by tenant."""
        return {tenant: sum(own.values()) for tenant, own in self._running.items()}

    def spent(self, tenant: str, now: float, periods: int | None = None) -> float:
        """Return the cost of the last `periods` (None: all), reservations included."""
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
        """Return what a tenant's running requests may still cost, at all gateways."""
        return sum(self._running.get(tenant, {}).values()) + self.elsewhere.sum(tenant, now)

    def tenants(self, now: float) -> set[str]:
        """Return the tenants that have spent something."""
        self._expire(now)
        all_costs = (costs for by_gateway in self._costs.values() for costs in by_gateway.values())
        return {tenant for costs in all_costs for tenant in costs}

    def own(self, now: float, periods: int) -> Iterator[tuple[int, Costs]]:
        """Yield this gateway's costs in each of the last `periods` that has any."""
        for period, by_gateway in self._costs.items():
            if _OWN in by_gateway and period > self._period(now) - periods:
                yield period, by_gateway[_OWN]

    def record_remote(self, gateway: str, period: int, costs: Costs) -> None:
        """Replace the costs of another gateway in one period."""
        self._costs.setdefault(period, {})[gateway] = dict(costs)

    def _period(self, now: float) -> int:
        return int((now + self._unix_offset_s) // self._period_s)

    def _expire(self, now: float) -> None:
        """Drop periods that are too old."""
        first = self._period(now) - self.periods + 1
        for period in [period for period in self._costs if period < first]:
            del self._costs[period]
