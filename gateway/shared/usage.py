"""What tenants use, shared with the other gateways in every heartbeat, and summed for operators.

Use of calls and rates is shared, not stored. Costs are stored in JetStream too: an hour by the
minute and a month by the day. They are read at the start and after messages were lost, so a restart
forgets the last second at most.
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
from sluice.internal.v1.gateway_pb2 import GatewayHeartbeat, MinuteCosts, RateUse
from sluice.v1.admin_pb2 import LimitUse, ListTenantsResponse, TenantUse
from sluice.wire.bucket import Bucket

logger = logging.getLogger(__name__)

_SHARED_PERIODS: Final = 2
"""Periods in each heartbeat: the current one, and the one before, which may have ended since the last
heartbeat.
"""


@dataclass(frozen=True)
class StoredCosts:
    """Costs by period, and the bucket that stores them.

    Attributes:
        instance: name of this process.
        written: what this process has stored, by period.
    """

    spending: Spending
    bucket: Bucket
    instance: str
    written: dict[int, Costs] = field(default_factory=dict)

    async def read(self) -> None:
        """Read what the other processes have spent; raises TransportUnavailable."""
        async for key, stored in self.bucket.read_all(MinuteCosts):
            other = key.partition(".")[0]
            # This process counts its own costs in memory.
            if other != self.instance:
                self.spending.record_remote(other, stored.minute, stored.costs)

    async def write(self) -> None:
        """Store the periods that changed since the last call; raises TransportUnavailable."""
        own = self.spending.own(time.monotonic(), self.spending.periods)
        current = {period: dict(costs) for period, costs in own}
        for period in [period for period in self.written if period not in current]:
            del self.written[period]
        for period, costs in current.items():
            if self.written.get(period) != costs:
                message = MinuteCosts(minute=period, costs=costs)
                await self.bucket.write(f"{self.instance}.{period}", message)
                self.written[period] = costs

    def recent(self) -> list[MinuteCosts]:
        """Return this gateway's latest costs, for a heartbeat."""
        own = self.spending.own(time.monotonic(), _SHARED_PERIODS)
        return [MinuteCosts(minute=period, costs=costs) for period, costs in own]


@dataclass(frozen=True, eq=False)
class SharedUsage:
    """Exchanges the use of limits and the costs of tenants with the other gateways."""

    in_force: InForce
    limits: TenantLimits
    limiter: ClassLimiter
    minutes: StoredCosts
    days: StoredCosts

    async def read(self) -> None:
        """Read what the other gateways have spent; raises TransportUnavailable."""
        for costs in (self.minutes, self.days):
            await costs.read()

    async def write(self) -> None:
        """Store what this gateway's requests have cost; a failure is only logged, and the next call tries again."""
        try:
            for costs in (self.minutes, self.days):
                await costs.write()
        except SluiceError as error:
            logger.warning("storing the spending of tenants failed: %s", error)

    def listed(self, tenant: str, currency: str) -> ListTenantsResponse:
        """Return the use of `tenant`, or of every tenant that has limits of its own or is active."""
        tenants = self.in_force.policies.settings.tenants
        limited = {name for name, settings in tenants.items() if settings.limits is not None}
        spent = self.minutes.spending.tenants(time.monotonic())
        names = [tenant] if tenant else sorted({*limited, *self.limiter.tenants, *spent})
        return ListTenantsResponse(tenants=map(self._use_of, names), currency=currency)

    def _use_of(self, tenant: str) -> TenantUse:
        settings = self.in_force.policies.settings
        calls, bulk = self.limits.running(
            tenant, self.limiter.running_of(tenant), self.limiter.running_of(tenant, bulk=True)
        )
        uses, own = self.limits.uses(tenant), settings.limits_of(tenant)
        for name, limit, used in (
            ("concurrent", own.concurrent, calls),
            ("concurrent_bulk", own.concurrent_bulk, bulk),
        ):
            if limit is not None:
                uses.append(LimitUse(name=name, limit=limit, used=used))
        cost = self.minutes.spending.spent(tenant, time.monotonic())
        return TenantUse(tenant=tenant, running=calls, cost_last_hour=cost, limits=uses)

    def add_to(self, heartbeat: GatewayHeartbeat) -> None:
        """Add this gateway's use and costs."""
        heartbeat.rates.extend(
            RateUse(name=name.to_wire(), taken=amount, full_at=at)
            for (name, at), amount in self.limits.report()
        )
        for tenant in self.limiter.tenants:
            limits = self.in_force.policies.settings.limits_of(tenant)
            # Nobody needs the running calls of a tenant without a limit.
            if limits.concurrent is not None or limits.concurrent_bulk is not None:
                heartbeat.running[tenant] = self.limiter.running_of(tenant)
                heartbeat.running_bulk[tenant] = self.limiter.running_of(tenant, bulk=True)
        heartbeat.minutes.extend(self.minutes.recent())
        heartbeat.reserved.update(self.minutes.spending.reserved)
        heartbeat.days.extend(self.days.recent())

    def on_heartbeat(self, heartbeat: GatewayHeartbeat) -> None:
        """Record the use and costs that another gateway reports."""
        now, gateway = time.monotonic(), heartbeat.instance
        uses = ((RateName.from_wire(use.name), use) for use in heartbeat.rates)
        rates = {(name, use.full_at): use.taken for name, use in uses if name is not None}
        self.limits.on_report(gateway, rates)
        self.limits.calls_elsewhere.update(gateway, heartbeat.running, now)
        self.limits.bulk_elsewhere.update(gateway, heartbeat.running_bulk, now)
        self.minutes.spending.elsewhere.update(gateway, heartbeat.reserved, now)
        for costs, periods in ((self.minutes, heartbeat.minutes), (self.days, heartbeat.days)):
            for use in periods:
                costs.spending.record_remote(gateway, use.minute, use.costs)
