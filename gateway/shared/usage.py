"""What tenants use: told to the other gateways with every hello, and summed for operators.

Limits count calls and rates at all gateways; they are told and not kept. Costs are kept in JetStream too, for an hour
by the minute and for a month by the day. It is read at the start and after a loss of messages, so a restart forgets at
most the last second.
"""

import logging
import time
from dataclasses import dataclass, field
from typing import Final

from gateway.admission.class_limiter import ClassLimiter
from gateway.admission.policies import InForce
from gateway.admission.tenant_limits import RateName, TenantLimits
from gateway.routing.budget import Costs, Spending
from sluice.errors import SluiceError
from sluice.internal.v1.gateway_pb2 import GatewayHello, MinuteCosts, RateUse
from sluice.v1.admin_pb2 import LimitUse, ListTenantsResponse, TenantUse
from sluice.wire.bucket import Bucket

_log = logging.getLogger(__name__)

_TOLD_PERIODS: Final = 2
"""In each hello: the present period and the one before, which may have ended since the last hello."""


@dataclass(frozen=True)
class KeptCosts:
    """Costs by the period, with the bucket that keeps them.

    Attributes:
        instance: names this process.
        written: what this process has stored, by period.
    """

    spending: Spending
    bucket: Bucket
    instance: str
    written: dict[int, Costs] = field(default_factory=dict)

    async def read(self) -> None:
        """Reads what the other processes have spent; raises TransportUnavailable."""
        async for key, stored in self.bucket.read_all(MinuteCosts):
            other = key.partition(".")[0]
            if other != self.instance:
                self.spending.told(other, stored.minute, stored.costs)

    async def write(self) -> None:
        """Stores the periods that have changed since the last call; raises TransportUnavailable."""
        own = self.spending.own(time.monotonic(), self.spending.periods)
        current = {period: dict(costs) for period, costs in own}
        for period in [period for period in self.written if period not in current]:
            del self.written[period]
        for period, costs in current.items():
            if self.written.get(period) != costs:
                message = MinuteCosts(minute=period, costs=costs)
                await self.bucket.write(f"{self.instance}.{period}", message)
                self.written[period] = costs

    def told(self) -> list[MinuteCosts]:
        """For the next hello."""
        own = self.spending.own(time.monotonic(), _TOLD_PERIODS)
        return [MinuteCosts(minute=period, costs=costs) for period, costs in own]


@dataclass(frozen=True, eq=False)
class SharedUsage:
    """Exchanges the use of limits and the costs of tenants with the other gateways."""

    in_force: InForce
    limits: TenantLimits
    limiter: ClassLimiter
    minutes: KeptCosts
    days: KeptCosts

    async def read(self) -> None:
        """Reads what all gateways have spent; raises TransportUnavailable."""
        for costs in (self.minutes, self.days):
            await costs.read()

    async def write(self) -> None:
        """Stores what this gateway's requests have cost."""
        try:
            for costs in (self.minutes, self.days):
                await costs.write()
        except SluiceError as error:
            _log.warning("the spending of tenants was not stored: %s", error)

    def listed(self, tenant: str, currency: str) -> ListTenantsResponse:
        """The use of ``tenant``, or of all that have limits of their own or do something."""
        tenants = self.in_force.policies.settings.tenants
        own = {name for name, one in tenants.items() if one.limits is not None}
        spent = self.minutes.spending.tenants(time.monotonic())
        names = [tenant] if tenant else sorted({*own, *self.limiter.tenants, *spent})
        return ListTenantsResponse(tenants=map(self._use_of, names), currency=currency)

    def _use_of(self, tenant: str) -> TenantUse:
        settings = self.in_force.policies.settings
        calls, bulk = self.limits.running(
            tenant, self.limiter.running_of(tenant), self.limiter.running_of(tenant, bulk=True)
        )
        uses, own = self.limits.uses(settings, tenant), settings.limits_of(tenant)
        for name, limit, used in (
            ("concurrent", own.concurrent, calls),
            ("concurrent_bulk", own.concurrent_bulk, bulk),
        ):
            if limit is not None:
                uses.append(LimitUse(name=name, limit=limit, used=used))
        cost = self.minutes.spending.spent(tenant, time.monotonic())
        return TenantUse(tenant=tenant, running=calls, cost_last_hour=cost, limits=uses)

    def tell(self, hello: GatewayHello) -> None:
        """Adds to the next hello what is used here."""
        hello.rates.extend(
            RateUse(name=name.to_wire(), taken=taken, full_at=at)
            for (name, at), taken in self.limits.report()
        )
        for tenant in self.limiter.tenants:
            limits = self.in_force.policies.settings.limits_of(tenant)
            if limits.concurrent is not None or limits.concurrent_bulk is not None:
                hello.running[tenant] = self.limiter.running_of(tenant)
                hello.running_bulk[tenant] = self.limiter.running_of(tenant, bulk=True)
        hello.minutes.extend(self.minutes.told())
        hello.reserved.update(self.minutes.spending.reserved)
        hello.days.extend(self.days.told())

    def hear(self, hello: GatewayHello) -> None:
        """Another gateway says what is used there."""
        now, gateway = time.monotonic(), hello.instance
        named = ((RateName.from_wire(one.name), one) for one in hello.rates)
        rates = {(name, one.full_at): one.taken for name, one in named if name is not None}
        self.limits.on_report(self.in_force.policies.settings, gateway, rates)
        self.limits.calls_elsewhere.told(gateway, hello.running, now)
        self.limits.bulk_elsewhere.told(gateway, hello.running_bulk, now)
        self.minutes.spending.elsewhere.told(gateway, hello.reserved, now)
        for kept, told in ((self.minutes, hello.minutes), (self.days, hello.days)):
            for one in told:
                kept.spending.told(gateway, one.minute, one.costs)
