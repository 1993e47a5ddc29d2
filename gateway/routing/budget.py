"""The spending of each tenant: what it cost in each of the last periods, and what running requests may still cost.

A period is a minute of the last hour, or a day of the last month, counted from the Unix epoch. Gateways tell each other
their costs of each period and their reservations, so that a budget holds for all of them together.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

MINUTE_S: Final = 60.0
HOUR_PERIODS: Final = 60
DAY_S: Final = 86_400.0
MONTH_PERIODS: Final = 31
STALE_S: Final = 3.5
"""What another gateway has told counts for this long, seconds."""
_OWN: Final = ""

Costs = Mapping[str, float]
"""By tenant, in the currency of the prices."""


class Elsewhere:
    """A number for each tenant that the other gateways tell again and again; what a silent one told does not count."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[Mapping[str, float], float]] = {}

    def told(self, gateway: str, numbers: Mapping[str, float], now: float) -> None:
        """Another gateway tells its numbers."""
        self._told = {name: one for name, one in self._told.items() if now - one[1] <= STALE_S}
        self._told[gateway] = dict(numbers), now

    def sum(self, tenant: str, now: float) -> float:
        """Of all other gateways."""
        live = [numbers for numbers, at in self._told.values() if now - at <= STALE_S]
        return sum([numbers.get(tenant, 0) for numbers in live])


class Settle(Protocol):
    """Gives back what a request has reserved of its limits, less what it has used."""

    def __call__(self, used: float, refusal: BaseException | None = None) -> None:
        """Settle a request that used so many tokens, or that ``refusal`` ended before a batcher had it."""


@dataclass(eq=False)
class Reservation:
    """What one running request of ``tenant`` may cost at most.

    Attributes:
        running: the reservations of all tenants.
        settle: settles its limits; None: none is reserved.
        take_back: takes back that the request was counted, where the error asks for another try.
    """

    tenant: str
    cost: float
    running: dict[str, set["Reservation"]]
    settle: Settle | None = None
    take_back: Callable[[BaseException], None] | None = None

    def __enter__(self) -> None:
        """An error in the block ends the request."""

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is not None:
            self.release(refusal=error)

    def release(self, tokens: int = 0, refusal: BaseException | None = None) -> None:
        """End the reservation; a second call has no effect.

        Args:
            tokens: What the request used.
            refusal: The error that ended it before a batcher had it.
        """
        own = self.running.get(self.tenant, set())
        if self not in own:
            return
        if self.settle is not None:
            self.settle(tokens, refusal)
        if refusal is not None and self.take_back is not None:
            self.take_back(refusal)
        own.remove(self)
        if not own:
            del self.running[self.tenant]


class Spending:
    """Costs by tenant, of this gateway and of those that it has heard of.

    Args:
        unix_offset_s: added to ``now`` gives seconds since the Unix epoch.
        period_s: length of a period, seconds.

    Attributes:
        periods: how many of them are kept.
        elsewhere: what the running requests of the other gateways may still cost.
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
        self.elsewhere = Elsewhere()
        self._running: dict[str, set[Reservation]] = {}
        """By tenant."""

    def add(self, tenant: str, cost: float, now: float) -> None:
        """A request of ``tenant`` has cost ``cost``."""
        if cost <= 0:
            return
        self._expire(now)
        costs = self._costs.setdefault(self._period(now), {}).setdefault(_OWN, {})
        costs[tenant] = costs.get(tenant, 0.0) + cost

    def reserve(self, tenant: str, cost: float) -> Reservation:
        """A request of ``tenant`` begins that may cost ``cost``."""
        made = Reservation(tenant, cost, self._running)
        self._running.setdefault(tenant, set()).add(made)
        return made

    @property
    def reserved(self) -> dict[str, float]:
        """What the running requests of this gateway may still cost, by tenant."""
        return {tenant: sum(one.cost for one in own) for tenant, own in self._running.items()}

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
        own = sum(one.cost for one in self._running.get(tenant, ()))
        return own + self.elsewhere.sum(tenant, now)

    def tenants(self, now: float) -> set[str]:
        """Those that have spent something."""
        self._expire(now)
        every = (costs for by_gateway in self._costs.values() for costs in by_gateway.values())
        return {tenant for costs in every for tenant in costs}

    def own(self, now: float, periods: int) -> Iterator[tuple[int, Costs]]:
        """What this gateway's requests have cost in each of the last ``periods``, where it is anything."""
        for period, by_gateway in self._costs.items():
            if _OWN in by_gateway and period > self._period(now) - periods:
                yield period, by_gateway[_OWN]

    def told(self, gateway: str, period: int, costs: Costs) -> None:
        """Another gateway's requests have cost ``costs`` in ``period``; replaces what it has told of it before."""
        self._costs.setdefault(period, {})[gateway] = dict(costs)

    def _period(self, now: float) -> int:
        return int((now + self._unix_offset_s) // self._period_s)

    def _expire(self, now: float) -> None:
        """Forgets what is older than the window."""
        first = self._period(now) - self.periods + 1
        for period in [period for period in self._costs if period < first]:
            del self._costs[period]
