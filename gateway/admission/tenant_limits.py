"""Limits of tenants, keys and models: rates by token buckets, concurrent calls, costs of a day and a month.

A request takes one of each rate of requests when it arrives, and its prompt with its longest answer (a burst at most)
of each rate of tokens before it is sent. At its end, what it has used takes the place of what it reserved.

A request that is refused for its content counts as a request: to find that out is work. A request that is refused by a
limit, for lack of capacity or because it would be late does not count, because its caller is told to send it again. Nor
does a request that is admitted and ends like that before a batcher has it.
"""

import math
from calendar import monthrange
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from datetime import time as time_of_day
from functools import partial
from typing import Final, NamedTuple

from gateway.admission.token_bucket import TokenBucket
from gateway.identity.caller import Caller
from gateway.routing.budget import DAY_S, MONTH_PERIODS, STALE_S, RemoteTotals, Spending
from sluice.errors import LimitReached, SluiceError
from sluice.settings import Settings
from sluice.settings.limits import LimitSettings
from sluice.v1.admin_pb2 import LimitUse

COST_RETRY_S: Final = 60.0
"""When to come back while running requests may still cost what is left, in seconds: often they cost less."""
RUNNING_RETRY_S: Final = 1.0
"""When to come back while too many calls run, in seconds."""
_MINUTE_S: Final = 60.0
_REQUESTS: Final = "requests_per_minute"
_TOKENS: Final = "tokens_per_minute"
_RETRYABLE: Final = frozenset({"RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"})
"""Codes of limits, lack of capacity and lateness: a request that ends with one of them before a batcher has it does not
count."""


class RateName(NamedTuple):
    """The name of a rate: of a tenant or a key, for all models or for one.

    Attributes:
        kind: "tenant" or "key".
        owner: The name of the tenant or key.
        model: The name of the model; empty for all.
        setting: The field of `RateLimits`.
    """

    kind: str
    owner: str
    model: str
    setting: str

    @property
    def subject(self) -> str:
        """Whose rate it is, for people."""
        return f"{self.kind} {self.owner}" + (f" model {self.model}" if self.model else "")

    def to_wire(self) -> str:
        """Return the name as gateways send it to each other."""
        return " ".join(self)

    @classmethod
    def from_wire(cls, name: str) -> "RateName | None":
        """Return the rate that `to_wire` named; None for a name of another form."""
        fields = name.split(" ")
        return cls(*fields) if len(fields) == len(cls._fields) else None


Settle = Callable[[float, BaseException | None], None]
"""Gives back what a request has reserved, less the tokens that it has used; and its count, if the error that ended it
before a batcher had it asks to try again."""
Period = tuple[RateName, float]
"""A bucket, and since when something is taken of it (`TokenBucket.full_at`)."""


class TenantLimits:
    """This gateway's view of what is used of the limits.

    Attributes:
        spending: Costs of the last hour, with what running requests may still cost.
        days: Costs of each day of a month.
        calls_elsewhere: Calls that run at the other gateways.
        bulk_elsewhere: Those of class bulk.
        buckets: Buckets of rates that are in use here.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        clock: Callable[[], float],
        unix_offset_s: float = 0.0,
    ) -> None:
        """Begin with nothing used.

        Args:
            settings: Returns the settings in force, which have the limits.
            clock: Returns monotonic seconds.
            unix_offset_s: Seconds between `clock` and the Unix epoch.
        """
        self.spending = Spending(unix_offset_s)
        self.days = Spending(unix_offset_s, DAY_S, MONTH_PERIODS)
        self._settings, self._clock, self._unix_offset_s = settings, clock, unix_offset_s
        self.buckets: dict[RateName, TokenBucket] = {}
        self.calls_elsewhere, self.bulk_elsewhere = RemoteTotals(), RemoteTotals()
        self._reports: dict[str, tuple[float, Mapping[Period, float]]] = {}
        """When each other gateway reported last, and its report."""

    def running(self, tenant: str, calls: int, bulk: int) -> tuple[int, int]:
        """Return the calls of `tenant` at all gateways, and those of class bulk; here run `calls` and `bulk`."""
        now = self._clock()
        others = self.calls_elsewhere.sum(tenant, now), self.bulk_elsewhere.sum(tenant, now)
        return calls + int(others[0]), bulk + int(others[1])

    def enter(self, payer: Caller, *, computes: bool = True) -> Settle | None:
        """Count a request of `payer`; return what settles that, None if no rate of requests is limited.

        Args:
            payer: Whose request it is.
            computes: Whether it goes to a model, so that tokens and costs must be left too.

        Raises:
            LimitReached: A limit is reached.
        """
        limits, now = self._settings().limits_of(payer.tenant), self._clock()
        if computes:
            for cost in self._costs(payer.tenant, limits, now):
                if cost.used >= cost.limit:
                    # What running requests may cost is often more than they do.
                    is_final = cost.used - self.spending.may_cost(payer.tenant, now) >= cost.limit
                    wait_s = self._period_left_s(cost.name, now) if is_final else COST_RETRY_S
                    raise _reached(f"tenant {payer.tenant}", cost.name, cost.limit, wait_s)
            _check(self._buckets(payer, limits, _TOKENS), 1.0, now)
        rates = self._buckets(payer, limits, _REQUESTS)
        return partial(self._take_back, self._take(rates, 1.0, now)) if rates else None

    def count_refused(self, payer: Caller) -> None:
        """Count a request of `payer` that is refused for its content; raise LimitReached if none is left."""
        self.enter(payer, computes=False)

    @contextmanager
    def counted(self, payer: Caller) -> Iterator[None]:
        """Count a call that no model answers; take that back if the block ends with an error that asks to try again."""
        settle = self.enter(payer, computes=False)
        try:
            yield
        except SluiceError as error:
            if settle is not None:
                settle(0.0, error)
            raise

    def _take_back(
        self,
        amounts: Sequence[tuple[TokenBucket, float]],
        _: float,
        error: BaseException | None = None,
    ) -> None:
        if isinstance(error, SluiceError) and error.code.name in _RETRYABLE:
            self._settle(amounts, 0.0)

    def reserve(self, payer: Caller, model: str, tokens: float) -> Settle | None:
        """Reserve `tokens` for a request that goes to `model`, and count it for the limits of the model.

        Returns what settles the reservation; None if nothing is limited.

        Raises:
            LimitReached: It may not take so many.
        """
        limits, now = self._settings().limits_of(payer.tenant), self._clock()
        of_model = self._buckets(payer, limits, _REQUESTS, model)
        buckets = self._buckets(payer, limits, _TOKENS)
        buckets |= self._buckets(payer, limits, _TOKENS, model)
        if not buckets and not of_model:
            return None
        _check(buckets, tokens, now)  # a request that is refused takes nothing
        counted = self._take(of_model, 1.0, now)
        reserved = self._take(buckets, tokens, now)

        def settle(used: float, refusal: BaseException | None = None) -> None:
            self._settle(reserved, used)
            self._take_back(counted, used, refusal)

        return settle

    def _settle(self, reserved: Sequence[tuple[TokenBucket, float]], used: float) -> None:
        now = self._clock()
        for bucket, amount in reserved:
            bucket.take(used - amount, now)

    def check_running(self, tenant: str, calls: int, bulk: int | None) -> None:
        """Raise LimitReached if `tenant` may not begin another call.

        Args:
            tenant: Whose call it is.
            calls: Calls of the tenant that run here.
            bulk: Those of class bulk; None if the call is of another class.
        """
        limits = self._settings().limits_of(tenant)
        most, most_bulk = limits.concurrent, None if bulk is None else limits.concurrent_bulk
        everywhere = self.running(tenant, calls, bulk or 0)
        named = ("concurrent", most), ("concurrent_bulk", most_bulk)
        for running, (name, limit) in zip(everywhere, named, strict=True):
            if limit is not None and running >= limit:
                raise _reached(f"tenant {tenant}", name, limit, RUNNING_RETRY_S)

    def soft_limit(self, tenant: str) -> tuple[str, str] | None:
        """Return the model that answers `tenant` now instead of others, and why; None if no limit is near."""
        soft = self._settings().limits_of(tenant).soft
        if soft is None:
            return None
        for use in self.uses(tenant):
            if use.used >= soft.share * use.limit:
                return soft.model, f"{tenant} has used {use.used:g} of its {use.limit:g} {use.name}"
        return None

    def uses(self, tenant: str) -> list[LimitUse]:
        """Return the use of each limited rate and cost; of a rate: what is missing in its bucket."""
        limits, now = self._settings().limits_of(tenant), self._clock()
        rates = [
            LimitUse(name=name.setting, limit=bucket.burst, used=bucket.burst - bucket.level(now))
            for name, bucket in self._of_tenant(tenant, limits).items()
        ]
        return [*rates, *self._costs(tenant, limits, now)]

    def headers(self, payer: Caller) -> dict[str, str]:
        """Return the rates of a tenant as HTTP headers, with OpenAI's names."""
        limits, now, headers = (
            self._settings().limits_of(payer.tenant),
            self._clock(),
            dict[str, str](),
        )
        for name, bucket in self._of_tenant(payer.tenant, limits).items():
            word, level = name.setting.partition("_")[0], max(0.0, bucket.level(now))
            headers[f"x-ratelimit-limit-{word}"] = f"{bucket.rate_per_s * _MINUTE_S:.0f}"
            headers[f"x-ratelimit-remaining-{word}"] = str(math.floor(level))
            headers[f"x-ratelimit-reset-{word}"] = f"{bucket.wait_s(bucket.burst, now):.0f}s"
        return headers

    # What gateways report to each other.

    def report(self) -> Iterator[tuple[Period, float]]:
        """Yield what was taken of each bucket that is in use."""
        now = self._clock()
        for name, bucket in self.buckets.items():
            if (amount := bucket.report(now)) is not None:
                yield (name, bucket.full_at), amount

    def on_report(self, gateway: str, amounts: Mapping[Period, float]) -> None:
        """Take what another gateway has taken since its last report; its first report is where that begins."""
        now = self._clock()
        self._reports = {
            name: report for name, report in self._reports.items() if now - report[0] <= STALE_S
        }
        last = self._reports.get(gateway)
        self._reports[gateway] = now, amounts
        if last is None:
            return
        for period, amount in amounts.items():
            bucket = self.buckets.get(period[0]) or self._bucket_of(period[0])
            if bucket is not None:
                bucket.taken_elsewhere(amount - last[1].get(period, 0.0), now)

    def _take(
        self, rates: Mapping[RateName, TokenBucket], amount: float, now: float
    ) -> list[tuple[TokenBucket, float]]:
        """Take `amount`, a burst at most, from all buckets or from none; return what was taken of each."""
        amounts = [(bucket, min(amount, bucket.burst)) for bucket in rates.values()]
        _check(rates, amount, now)
        for bucket, part in amounts:
            bucket.take(part, now)
        return amounts

    def _buckets(
        self, payer: Caller, limits: LimitSettings, setting: str, model: str = ""
    ) -> dict[RateName, TokenBucket]:
        """Return the buckets that a request of `payer` takes from: those of its model, or of all models."""
        buckets, now = dict[RateName, TokenBucket](), self._clock()
        tenant_rates = limits.models.get(model) if model else limits
        rates = [("tenant", payer.tenant, tenant_rates)]
        if payer.key_id and not model:
            rates.append(("key", payer.key_id, payer.key_limits))
        for kind, owner, rate in rates:
            per_minute: float | None = None if rate is None else getattr(rate, setting)
            if per_minute is None:
                continue
            name, rate_per_s = RateName(kind, owner, model, setting), per_minute / _MINUTE_S
            # A request fits in any case.
            burst = max(1.0, rate_per_s * limits.burst_s)
            bucket = self.buckets.get(name)
            if bucket is None:
                bucket = self.buckets[name] = TokenBucket(rate_per_s, burst, now)
            elif (bucket.rate_per_s, bucket.burst) != (rate_per_s, burst):
                bucket.change(rate_per_s, burst, now)
            buckets[name] = bucket
        return buckets

    def _of_tenant(self, tenant: str, limits: LimitSettings) -> dict[RateName, TokenBucket]:
        payer = Caller(tenant)
        return self._buckets(payer, limits, _REQUESTS) | self._buckets(payer, limits, _TOKENS)

    def _bucket_of(self, name: RateName) -> TokenBucket | None:
        """Make the bucket of a tenant's rate; None without such a limit, and for keys: calls bring theirs."""
        if name.kind != "tenant" or name.setting not in (_REQUESTS, _TOKENS):
            return None
        limits = self._settings().limits_of(name.owner)
        return self._buckets(Caller(name.owner), limits, name.setting, name.model).get(name)

    def _costs(self, tenant: str, limits: LimitSettings, now: float) -> Iterator[LimitUse]:
        """Yield the use of each limited cost."""
        day = datetime.fromtimestamp(now + self._unix_offset_s, UTC).day
        costs = (
            ("cost_per_day", limits.cost_per_day, 1),
            ("cost_per_month", limits.cost_per_month, day),
        )
        for name, limit, days in costs:
            if limit is not None:
                used = self.days.spent(tenant, now, days) + self.spending.may_cost(tenant, now)
                yield LimitUse(name=name, limit=limit, used=used)

    def _period_left_s(self, name: str, now: float) -> float:
        """Return the seconds until the day or month of a cost limit ends."""
        at = datetime.fromtimestamp(now + self._unix_offset_s, UTC)
        days = 1 if name == "cost_per_day" else monthrange(at.year, at.month)[1] - at.day + 1
        end = datetime.combine(at.date() + timedelta(days), time_of_day.min, UTC)
        return (end - at).total_seconds()


def _check(rates: Mapping[RateName, TokenBucket], amount: float, now: float) -> None:
    """Raise LimitReached if `amount` cannot be taken from one of the buckets."""
    for name, bucket in rates.items():
        if (wait_s := bucket.wait_s(amount, now)) > 0:
            raise _reached(name.subject, name.setting, bucket.rate_per_s * _MINUTE_S, wait_s)


def _reached(subject: str, setting: str, limit: float, wait_s: float) -> LimitReached:
    return LimitReached(
        f"{subject}: the limit {setting} of {limit:g} is reached",
        metadata={"subject": subject, "limit": setting, "value": f"{limit:g}"},
        retry_after_s=wait_s,
    )
