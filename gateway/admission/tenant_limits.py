"""The limits of tenants, keys and models: rates by token buckets, calls at the same time, costs of a day and a month.

A request takes one of each rate of requests when it comes, and its prompt with its longest answer (a burst at most) of
each rate of tokens before it is sent. At its end what it has used takes the place of what it reserved.

A request that is refused for its content counts as a request: to find that out is work. One that is refused for a
limit, for want of capacity or because it would be late does not: its caller is told to send it again. Nor does one that
was let in and ends like that before a batcher has it.
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
from gateway.routing.budget import STALE_S, Elsewhere, Settle, Spending
from sluice.errors import LimitReached, SluiceError
from sluice.settings import Settings
from sluice.settings.limits import LimitSettings, RateLimits
from sluice.v1.admin_pb2 import LimitUse

COST_RETRY_S: Final = 60.0
RUNNING_RETRY_S: Final = 1.0
_MINUTE_S: Final = 60.0
_REQUESTS: Final = "requests_per_minute"
_TOKENS: Final = "tokens_per_minute"
_COME_AGAIN: Final = frozenset({"RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"})
"""Codes of limits, capacity and lateness: a request that ends with one of them before a batcher has it does not
count."""


class RateName(NamedTuple):
    """Which rate of whom it is: of a tenant or a key, for all models or for one.

    Attributes:
        kind: "tenant" or "key".
        owner: its name.
        model: empty: all.
        setting: of `RateLimits`.
    """

    kind: str
    owner: str
    model: str
    setting: str

    @property
    def subject(self) -> str:
        """Whose it is, for people."""
        return f"{self.kind} {self.owner}" + (f" model {self.model}" if self.model else "")

    def to_wire(self) -> str:
        """As gateways name it to each other."""
        return " ".join(self)

    @classmethod
    def from_wire(cls, name: str) -> "RateName | None":
        """What `to_wire` gave; None: a name of another form."""
        fields = name.split(" ")
        return cls(*fields) if len(fields) == len(cls._fields) else None


TakeBack = Callable[[BaseException], None]
"""Takes back that a request was counted, where the error that it ends with asks for another try."""
Taken = tuple[RateName, float]
"""Of which bucket something is taken, and since when (`TokenBucket.full_at`)."""


class TenantLimits:
    """This gateway's view of what is used of the limits.

    Args:
        hours: what was spent lately, with what running requests may still cost.
        days: what was spent by the day.
        clock: monotonic seconds; ``unix_offset_s`` more are seconds since the Unix epoch.

    Attributes:
        calls_elsewhere, bulk_elsewhere: calls that run at the other gateways: all, and those of class bulk.
    """

    def __init__(
        self,
        hours: Spending,
        days: Spending,
        clock: Callable[[], float],
        unix_offset_s: float = 0.0,
    ) -> None:
        self._hours, self._days = hours, days
        self._clock, self._unix_offset_s = clock, unix_offset_s
        self._buckets: dict[RateName, TokenBucket] = {}
        self.calls_elsewhere, self.bulk_elsewhere = Elsewhere(), Elsewhere()
        self._told: dict[str, tuple[float, Mapping[Taken, float]]] = {}
        """When each other gateway was heard last, and what it told."""

    def running(self, tenant: str, calls: int, bulk: int) -> tuple[int, int]:
        """Calls of ``tenant`` at all gateways, and those of class bulk; ``calls`` and ``bulk`` are here."""
        now = self._clock()
        others = self.calls_elsewhere.sum(tenant, now), self.bulk_elsewhere.sum(tenant, now)
        return calls + int(others[0]), bulk + int(others[1])

    def enter(self, settings: Settings, payer: Caller, *, computes: bool = True) -> TakeBack:
        """Count a request of ``payer``.

        Args:
            computes: Whether it goes to a model, so that tokens and costs must be left too.

        Raises:
            LimitReached: It may not come now.
        """
        limits, now = settings.limits_of(payer.tenant), self._clock()
        if computes:
            self._check_left(payer, limits, now)
        taken = self._take(self._rates(payer, limits, _REQUESTS), 1.0, now)
        return partial(self._take_back, taken)

    @contextmanager
    def counted(self, settings: Settings, payer: Caller) -> Iterator[None]:
        """Count a call that no model answers; take that back if the block ends with an error that asks to try again."""
        take_back = self.enter(settings, payer, computes=False)
        try:
            yield
        except SluiceError as error:
            take_back(error)
            raise

    def _take_back(
        self, taken: Sequence[tuple[TokenBucket, float]], error: BaseException | None
    ) -> None:
        if isinstance(error, SluiceError) and error.code.name in _COME_AGAIN:
            self._settle(taken, 0.0)

    def _check_left(self, payer: Caller, limits: LimitSettings, now: float) -> None:
        """Raise LimitReached unless costs and tokens of ``payer`` are left."""
        for cost in self._costs(payer.tenant, limits, now):
            if cost.used >= cost.limit:
                # What running requests may cost is often more than they do.
                is_final = cost.used - self._hours.may_cost(payer.tenant, now) >= cost.limit
                wait_s = self._period_left_s(cost.name, now) if is_final else COST_RETRY_S
                raise _reached(f"tenant {payer.tenant}", cost.name, cost.limit, wait_s)
        _check(self._rates(payer, limits, _TOKENS), 1.0, now)

    def reserve(self, settings: Settings, payer: Caller, model: str, tokens: float) -> Settle:
        """Reserve so many tokens for a request that goes to ``model``, and count it for the limits of the model.

        Raises:
            LimitReached: It may not take so many.
        """
        limits, now = settings.limits_of(payer.tenant), self._clock()
        buckets, counted = self._rates(payer, limits, _TOKENS), list[tuple[TokenBucket, float]]()
        if (rates := limits.models.get(model)) is not None:
            of_model = partial(self._rate, rates, limits, "tenant", payer.tenant, model)
            buckets |= of_model(_TOKENS)
            _check(buckets, tokens, now)  # one that is refused takes nothing
            counted = self._take(of_model(_REQUESTS), 1.0, now)
        held = self._take(buckets, tokens, now)

        def end(used: float, refusal: BaseException | None = None) -> None:
            self._settle(held, used)
            self._take_back(counted, refusal)

        return end

    def _settle(self, taken: Sequence[tuple[TokenBucket, float]], used: float) -> None:
        now = self._clock()
        for bucket, held in taken:
            bucket.take(used - held, now)

    def check_running(self, settings: Settings, tenant: str, calls: int, bulk: int | None) -> None:
        """Another call of ``tenant`` comes, while so many run at this gateway.

        ``bulk``: those of class bulk; None: the call is of another class. Raises LimitReached.
        """
        limits = settings.limits_of(tenant)
        most, most_bulk = limits.concurrent, None if bulk is None else limits.concurrent_bulk
        if most is None and most_bulk is None:
            return
        everywhere, bulk_everywhere = self.running(tenant, calls, bulk or 0)
        if most is not None and everywhere >= most:
            raise _reached(f"tenant {tenant}", "concurrent", most, RUNNING_RETRY_S)
        if most_bulk is not None and bulk_everywhere >= most_bulk:
            raise _reached(f"tenant {tenant}", "concurrent_bulk", most_bulk, RUNNING_RETRY_S)

    def soft_limit(self, settings: Settings, tenant: str) -> tuple[str, str] | None:
        """The model that answers ``tenant`` now instead of others, and why; None: no limit is near."""
        soft = settings.limits_of(tenant).soft
        if soft is None:
            return None
        for use in self.uses(settings, tenant):
            if use.used >= soft.share * use.limit:
                return soft.model, f"{tenant} has used {use.used:g} of its {use.limit:g} {use.name}"
        return None

    def uses(self, settings: Settings, tenant: str) -> list[LimitUse]:
        """Each rate and cost that is limited. Of a rate: what is missing in its bucket, of the whole bucket."""
        limits, now = settings.limits_of(tenant), self._clock()
        rates = [
            LimitUse(name=name.setting, limit=bucket.burst, used=bucket.burst - bucket.level(now))
            for name, bucket in self._rates_of(tenant, limits).items()
        ]
        return [*rates, *self._costs(tenant, limits, now)]

    def headers(self, settings: Settings, payer: Caller) -> dict[str, str]:
        """The rates of a tenant as headers of HTTP, with OpenAI's names."""
        limits, now, headers = settings.limits_of(payer.tenant), self._clock(), dict[str, str]()
        for name, bucket in self._rates_of(payer.tenant, limits).items():
            word, level = name.setting.partition("_")[0], max(0.0, bucket.level(now))
            headers[f"x-ratelimit-limit-{word}"] = f"{bucket.rate_per_s * _MINUTE_S:.0f}"
            headers[f"x-ratelimit-remaining-{word}"] = str(math.floor(level))
            headers[f"x-ratelimit-reset-{word}"] = f"{bucket.wait_s(bucket.burst, now):.0f}s"
        return headers

    # What gateways tell each other.

    def tell(self) -> Iterator[tuple[Taken, float]]:
        """What was taken of each bucket that is in use."""
        now = self._clock()
        for name, bucket in self._buckets.items():
            if (taken := bucket.tell(now)) is not None:
                yield (name, bucket.full_at), taken

    def told(self, settings: Settings, gateway: str, counts: Mapping[Taken, float]) -> None:
        """Another gateway says it of its buckets. What one took that was not heard lately is not counted."""
        now = self._clock()
        self._told = {name: one for name, one in self._told.items() if now - one[0] <= STALE_S}
        known = self._told.get(gateway)
        self._told[gateway] = now, counts
        if known is None:
            return
        for taken, amount in counts.items():
            bucket = self._buckets.get(taken[0]) or self._known(settings, taken[0])
            if bucket is not None:
                bucket.taken_elsewhere(amount - known[1].get(taken, 0.0), now)

    def _take(
        self, rates: Mapping[RateName, TokenBucket], amount: float, now: float
    ) -> list[tuple[TokenBucket, float]]:
        """Takes it from all of them or from none; what is above a burst is not waited for."""
        held = [(bucket, min(amount, bucket.burst)) for bucket in rates.values()]
        _check(rates, amount, now)
        for bucket, part in held:
            bucket.take(part, now)
        return held

    def _rates(
        self, payer: Caller, limits: LimitSettings, setting: str
    ) -> dict[RateName, TokenBucket]:
        """The buckets that a request of ``payer`` takes from, those of the model apart."""
        found = self._rate(limits, limits, "tenant", payer.tenant, "", setting)
        if payer.key_id:
            found |= self._rate(payer.key_limits, limits, "key", payer.key_id, "", setting)
        return found

    def _rates_of(self, tenant: str, limits: LimitSettings) -> dict[RateName, TokenBucket]:
        rate = partial(self._rate, limits, limits, "tenant", tenant, "")
        return rate(_REQUESTS) | rate(_TOKENS)

    def _rate(
        self,
        rates: RateLimits,
        limits: LimitSettings,
        kind: str,
        owner: str,
        model: str,
        setting: str,
    ) -> dict[RateName, TokenBucket]:
        """The bucket of one rate by its name, if it is limited."""
        per_minute: float | None = getattr(rates, setting)
        if per_minute is None:
            return {}
        name, now = RateName(kind, owner, model, setting), self._clock()
        rate_per_s = per_minute / _MINUTE_S
        # A request fits in any case.
        burst = max(1.0, rate_per_s * limits.burst_s)
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = TokenBucket(rate_per_s, burst, now)
        elif (bucket.rate_per_s, bucket.burst) != (rate_per_s, burst):
            bucket.change(rate_per_s, burst, now)
        return {name: bucket}

    def _known(self, settings: Settings, name: RateName) -> TokenBucket | None:
        """The bucket of a rate that is not in use here; of a key only what was used here is known."""
        if name.kind != "tenant" or name.setting not in (_REQUESTS, _TOKENS):
            return None
        limits = settings.limits_of(name.owner)
        rates = limits.models.get(name.model) if name.model else limits
        return None if rates is None else self._rate(rates, limits, *name).get(name)

    def _costs(self, tenant: str, limits: LimitSettings, now: float) -> Iterator[LimitUse]:
        """Each cost that is limited."""
        if limits.cost_per_day is None and limits.cost_per_month is None:
            return
        day = datetime.fromtimestamp(now + self._unix_offset_s, UTC).day
        running = self._hours.may_cost(tenant, now)
        if limits.cost_per_day is not None:
            used = self._days.spent(tenant, now, 1) + running
            yield LimitUse(name="cost_per_day", limit=limits.cost_per_day, used=used)
        if limits.cost_per_month is not None:
            used = self._days.spent(tenant, now, day) + running
            yield LimitUse(name="cost_per_month", limit=limits.cost_per_month, used=used)

    def _period_left_s(self, name: str, now: float) -> float:
        """Until the day or the month ends that a cost is limited in."""
        at = datetime.fromtimestamp(now + self._unix_offset_s, UTC)
        days = 1 if name == "cost_per_day" else monthrange(at.year, at.month)[1] - at.day + 1
        end = datetime.combine(at.date() + timedelta(days), time_of_day.min, UTC)
        return (end - at).total_seconds()


def _check(rates: Mapping[RateName, TokenBucket], amount: float, now: float) -> None:
    """Raises LimitReached where ``amount`` does not fit."""
    for name, bucket in rates.items():
        if (wait_s := bucket.wait_s(amount, now)) > 0:
            raise _reached(name.subject, name.setting, bucket.rate_per_s * _MINUTE_S, wait_s)


def _reached(subject: str, setting: str, limit: float, wait_s: float) -> LimitReached:
    return LimitReached(
        f"{subject}: the limit {setting} of {limit:g} is reached",
        metadata={"subject": subject, "limit": setting, "value": f"{limit:g}"},
        retry_after_s=wait_s,
    )
