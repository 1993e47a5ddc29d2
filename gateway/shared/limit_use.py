"""What tenants take of their limits: told to the other gateways with every hello, and summed for operators."""

from collections.abc import Callable

from gateway.admission.class_limiter import ClassLimiter
from gateway.admission.policies import InForce
from gateway.admission.tenant_limits import RateName
from gateway.admission.usage import UsageAccounting
from gateway.shared.peers import Peers
from sluice.internal.v1.gateway_pb2 import GatewayHello, RateUse
from sluice.v1.admin_pb2 import LimitUse, ListTenantsResponse, TenantUse


class SharedLimits:
    """Exchanges the use of tenants' limits with the other gateways."""

    def __init__(
        self,
        in_force: InForce,
        usage: UsageAccounting,
        limiter: ClassLimiter,
        peers: Peers,
        connected: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """``connected``: whether NATS is reached."""
        self._in_force = in_force
        self._usage = usage
        self._limits = usage.limits
        self._limiter = limiter
        self._connected = connected
        self._clock = clock
        peers.fill.append(self._tell)
        peers.heard.append(self._hear)

    def listed(self, tenant: str, currency: str) -> ListTenantsResponse:
        """The use of ``tenant``, or of all that have limits of their own or do something."""
        now = self._clock()
        tenants = self._in_force.policies.limits.tenants
        active = {*tenants, *self._limiter.tenants, *self._usage.spending.tenants(now)}
        names = [tenant] if tenant else sorted(active)
        return ListTenantsResponse(
            tenants=[self._use_of(name, now) for name in names], currency=currency
        )

    def _use_of(self, tenant: str, now: float) -> TenantUse:
        of_all = self._in_force.policies.limits
        limits = of_all.of(tenant)
        calls, bulk = self._limits.running(
            tenant, self._limiter.running(tenant), self._limiter.running(tenant, bulk=True)
        )
        uses = [
            LimitUse(name=one.name, limit=one.limit, used=max(0.0, one.used))
            for one in self._limits.uses(of_all, tenant)
        ]
        for name, limit, used in (
            ("concurrent", limits.concurrent, calls),
            ("concurrent_bulk", limits.concurrent_bulk, bulk),
        ):
            if limit is not None:
                uses.append(LimitUse(name=name, limit=limit, used=used))
        return TenantUse(
            tenant=tenant,
            running=calls,
            cost_last_hour=self._usage.spending.spent(tenant, now),
            limits=uses,
        )

    def _tell(self, hello: GatewayHello) -> None:
        # A hello is due once a second, connected or not.
        self._limits.connected(is_connected=self._connected())
        rates = self._limits.tell()
        hello.rates.extend(
            RateUse(name=name.to_wire(), taken=taken, asked=asked) for name, taken, asked in rates
        )
        for tenant in self._limiter.tenants:
            limits = self._in_force.policies.limits.of(tenant)
            if limits.concurrent is not None or limits.concurrent_bulk is not None:
                hello.running[tenant] = self._limiter.running(tenant)
                hello.running_bulk[tenant] = self._limiter.running(tenant, bulk=True)

    def _hear(self, hello: GatewayHello) -> None:
        named = ((RateName.from_wire(one.name), one) for one in hello.rates)
        rates = ((name, one.taken, one.asked) for name, one in named if name is not None)
        self._limits.told(self._in_force.policies.limits, hello.instance, rates)
        self._limits.told_running(hello.instance, hello.running, hello.running_bulk)
