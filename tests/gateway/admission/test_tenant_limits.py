"""The limits of tenants, keys and models, in virtual time."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from gateway.admission.tenant_limits import RateName, Settle, TenantLimits
from gateway.identity.caller import Caller
from sluice import errors
from sluice.settings import Settings
from sluice.settings.limits import LimitSettings, RateLimits
from sluice.settings.mesh import TenantSettings
from tests.support.settings import tuned

DAY_S = 86_400.0


@dataclass
class World:
    """One gateway's limits, and its clock."""

    limits: dict[str, Any] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.given = Settings(limits=tuned(LimitSettings, **self.limits))
        self.core = TenantLimits(lambda: self.given, lambda: self.now)
        self.hours, self.days = self.core.spending, self.core.days

    def hear(self, gateway: str, calls: dict[str, float], bulk: dict[str, float]) -> None:
        """So many calls of each tenant run at another gateway."""
        self.core.calls_elsewhere.update(gateway, calls, self.now)
        self.core.bulk_elsewhere.update(gateway, bulk, self.now)

    def enter(self, payer: Caller) -> Settle | None:
        return self.core.enter(payer)

    def reserve(self, payer: Caller, model: str, tokens: float) -> Settle:
        settle = self.core.reserve(payer, model, tokens)
        assert settle is not None
        return settle

    def refusal(self, payer: Caller | None = None) -> errors.LimitReached:
        with pytest.raises(errors.LimitReached) as refused:
            self.enter(payer or ACME)
        return refused.value


ACME = Caller("acme")
OWN = Settings(tenants={"acme": TenantSettings(limits=LimitSettings(requests_per_minute=1))})
REQUESTS = RateName("tenant", "acme", "", "requests_per_minute")


def test_a_tenant_without_limits_is_not_limited() -> None:
    world = World()
    for _ in range(1000):
        world.enter(ACME)
    assert world.core.reserve(ACME, "small", 1e9) is None
    world.core.check_running("acme", 10**6, 10**6)
    assert not world.core.uses("acme")
    assert not world.core.headers(ACME)
    assert not list(world.core.report())


def test_the_error_names_subject_limit_and_time() -> None:
    world = World({"requests_per_minute": 60})
    for _ in range(10):
        world.enter(ACME)
    error = world.refusal()
    assert list(error.metadata.values()) == ["tenant acme", "requests_per_minute", "60"]
    assert error.retry_after_s == pytest.approx(1.0)
    assert "requests_per_minute of 60" in error.message
    world.enter(Caller("other"))
    world.now += 1.0
    world.enter(ACME)


def test_tokens_are_reserved_and_settled() -> None:
    world = World({"tokens_per_minute": 6000})
    held = world.reserve(ACME, "small", 900)
    with pytest.raises(errors.LimitReached, match="tokens_per_minute"):
        world.reserve(ACME, "small", 200)
    held(150, None)
    world.reserve(ACME, "small", 850)
    assert world.refusal().metadata["limit"] == "tokens_per_minute"


def test_keys_and_models_have_limits_beside_the_tenants() -> None:
    world = World({"requests_per_minute": 6000, "models": {"large": {"requests_per_minute": 6}}})
    key = Caller("acme", key_id="k1", key_limits=RateLimits(requests_per_minute=12))
    for _ in range(2):
        world.enter(key)
    assert world.refusal(key).metadata["subject"] == "key k1"
    world.enter(ACME)
    world.reserve(ACME, "large", 10)
    with pytest.raises(errors.LimitReached, match="tenant acme model large"):
        world.reserve(ACME, "large", 10)
    assert world.core.reserve(ACME, "small", 10) is None


def test_a_models_rates_are_taken_from_when_a_request_goes_there() -> None:
    models = {"large": {"requests_per_minute": 12, "tokens_per_minute": 600}}
    world = World({"tokens_per_minute": 60_000, "models": models})
    world.reserve(ACME, "large", 60)
    with pytest.raises(errors.LimitReached) as refused:
        world.reserve(ACME, "large", 60)
    assert refused.value.metadata["limit"] == "tokens_per_minute"
    assert refused.value.metadata["subject"] == "tenant acme model large"
    # What one rate refuses was taken from no other.
    (use,) = world.core.uses("acme")
    assert use.used == 60.0
    world.now += 5.0
    world.reserve(ACME, "large", 40)


def test_calls_elsewhere_go_with_their_gateway() -> None:
    world = World()
    assert world.core.running("acme", 2, 1) == (2, 1)
    world.hear("one", {"acme": 3}, {"acme": 1})
    world.now += 2.0
    world.hear("two", {"acme": 4, "other": 9}, {})
    assert world.core.running("acme", 2, 1) == (2 + 3 + 4, 1 + 1)
    assert world.core.running("other", 0, 0) == (9, 0)
    world.now = 3.5
    assert world.core.running("acme", 0, 0) == (7, 1)
    world.now = 3.6
    assert world.core.running("acme", 0, 0) == (4, 0)
    world.now = 5.5
    world.hear("two", {"acme": 5}, {})
    assert world.core.running("acme", 0, 0) == (5, 0)


def test_a_gateway_that_was_silent_is_new_again() -> None:
    world = World({"requests_per_minute": 60})
    name = (REQUESTS, 0.0)
    world.core.on_report("gone", {name: 7.0})
    world.core.on_report("one", {name: 100.0})
    world.now = 3.5
    world.core.on_report("one", {name: 103.0})
    (use,) = world.core.uses("acme")
    assert use.used == pytest.approx(3.0), "it was heard 3.5 s ago"
    # What it says of for the first time is all that it has taken, while it is heard.
    other = (REQUESTS._replace(owner="other"), 0.0)
    world.now = 7.0
    world.core.on_report("one", {other: 4.0})
    (use,) = world.core.uses("other")
    assert use.used == pytest.approx(4.0)
    world.now = 100.0
    world.core.on_report("one", {name: 150.0})
    (use,) = world.core.uses("acme")
    assert use.used == pytest.approx(0.0)


def test_late_key_counts_only_what_it_takes_then() -> None:
    world = World()
    payer = Caller("acme", key_id="k1", key_limits=RateLimits(requests_per_minute=60))
    name = (RateName("key", "k1", "", "requests_per_minute"), 0.0)
    for taken in (0.0, 500.0):
        world.core.on_report("one", {name: taken})
    world.enter(payer)
    world.core.on_report("one", {name: 503.0})
    for _ in range(6):
        world.enter(payer)
    assert world.refusal(payer)


def test_a_limit_for_the_day_alone_and_for_the_month_alone() -> None:
    # February 10, 6 o'clock: the month ends in 18 days and as many hours as the day.
    for name, left_s in (("cost_per_day", 18 * 3600.0), ("cost_per_month", 18.75 * DAY_S)):
        world = World({name: 2.0}, now=40.25 * DAY_S)
        world.hours.reserve("acme", "request", 2.0)
        error = world.refusal()
        assert (error.metadata["limit"], error.retry_after_s) == (name, 60.0), "it may cost less"
        world.hours.release("acme", "request")
        world.days.add("acme", 2.0, world.now)
        error = world.refusal()
        assert (error.metadata["limit"], error.retry_after_s) == (name, left_s)
        (use,) = world.core.uses("acme")
        assert (use.name, use.limit, use.used) == (name, 2.0, 2.0)


def test_the_day_of_the_month_is_that_of_the_unix_clock() -> None:
    limits = Settings(limits=LimitSettings(cost_per_month=2.0))

    def used(now: float, offset_s: float = 0.0) -> float:
        core = TenantLimits(lambda: limits, lambda: now, offset_s)
        core.days.add("acme", 2.0, 0.5 * DAY_S)
        core.days.add("acme", 3.0, 5 * DAY_S - 4 * offset_s)
        (use,) = core.uses("acme")
        return use.used

    # Half a second before the first of February, and then.
    assert used(31 * DAY_S - 0.5) == 5.0
    assert used(31 * DAY_S) == 0.0
    # Monotonic day 1 is the first of a month.
    assert used(1.5 * DAY_S, 30 * DAY_S) == 0.0


def test_calls_at_the_same_time_count_at_all_gateways() -> None:
    world = World({"concurrent": 5, "concurrent_bulk": 2})
    world.hear("other", {"acme": 3}, {"acme": 1})
    world.core.check_running("acme", 1, None)
    world.now += 3.5
    for calls, bulk, limit in ((2, None, "concurrent"), (1, 1, "concurrent_bulk")):
        with pytest.raises(errors.LimitReached) as refused:
            world.core.check_running("acme", calls, bulk)
        assert (refused.value.metadata["limit"], refused.value.retry_after_s) == (limit, 1.0)
    world.now += 0.1
    world.core.check_running("acme", 2, 1)


@pytest.mark.parametrize("day", [0, 27, 30, 31, 58, 334])
def test_spent_cost_is_back_after_its_period(day: int) -> None:
    for limit in ("cost_per_day", "cost_per_month"):
        world = World({limit: 2.0}, now=day * DAY_S + 100)
        world.days.add("acme", 2.0, world.now)
        wait_s = world.refusal().retry_after_s
        assert wait_s is not None
        world.now += wait_s - 1
        world.refusal()
        world.now += 1
        world.enter(ACME)


def test_other_limits_hold_at_once_and_what_was_taken_stays() -> None:
    world = World({"requests_per_minute": 60})
    for _ in range(10):
        world.enter(ACME)
    world.given = Settings(limits=LimitSettings(requests_per_minute=120))
    for _ in range(10):
        world.enter(ACME)
    assert world.refusal().metadata["value"] == "120"
    world.given = OWN
    assert world.refusal().metadata["value"] == "1"
    world.given = Settings()
    world.enter(ACME)


def test_taken_elsewhere_counts_without_its_past() -> None:
    one, two = World({"requests_per_minute": 60}), World({"requests_per_minute": 60})
    two.core.on_report("one", {})
    for _ in range(6):
        one.enter(ACME)
    two.core.on_report("one", dict(one.core.report()))
    (use,) = two.core.uses("acme")
    assert use.used == pytest.approx(6.0)
    late = World({"requests_per_minute": 60})
    late.core.on_report("one", dict(one.core.report()))
    (use,) = late.core.uses("acme")
    assert use.used == pytest.approx(0.0)


def test_names_that_no_setting_knows_are_not_kept() -> None:
    world = World({"requests_per_minute": 60, "models": {"large": {"tokens_per_minute": 60}}})
    names = (
        REQUESTS,
        RateName("tenant", "acme", "large", "tokens_per_minute"),
        RateName("tenant", "acme", "", "tokens_per_minute"),
        RateName("tenant", "acme", "small", "tokens_per_minute"),
        RateName("key", "k1", "", "requests_per_minute"),
        RateName("tenant", "acme", "large", "nonsense"),
    )
    world.core.on_report("one", {})
    world.core.on_report("one", {(name, 0.0): 1.0 for name in names})
    assert list(world.core.buckets) == list(names[:2])
    for name in names:
        assert RateName.from_wire(name.to_wire()) == name
    for name in ("nonsense", "", "tenant acme tokens_per_minute"):
        assert RateName.from_wire(name) is None


@pytest.mark.parametrize(
    ("limits", "requests", "used", "after_s", "expected"),
    [
        ({"requests_per_minute": 60}, 1, 0, 0.0, {"requests": ("60", "9", "1s")}),
        ({"requests_per_minute": 60}, 10, 0, 0.97, {"requests": ("60", "0", "9s")}),
        ({"tokens_per_minute": 600}, 0, 350, 0.0, {"tokens": ("600", "0", "35s")}),
        (
            {"requests_per_minute": 60, "tokens_per_minute": 600},
            1,
            0,
            0.0,
            {"requests": ("60", "9", "1s"), "tokens": ("600", "100", "0s")},
        ),
    ],
    ids=["one request", "all requests", "overdrawn tokens", "both"],
)
def test_headers_say_what_remains(
    limits: dict[str, Any],
    requests: int,
    used: int,
    after_s: float,
    expected: dict[str, tuple[str, str, str]],
) -> None:
    world = World(limits)
    for _ in range(requests):
        world.enter(ACME)
    if used:
        world.reserve(ACME, "small", 100)(used, None)
    world.now += after_s
    words = ("limit", "remaining", "reset")
    assert world.core.headers(ACME) == {
        f"x-ratelimit-{word}-{name}": value
        for name, values in expected.items()
        for word, value in zip(words, values, strict=True)
    }


def test_taken_elsewhere_before_idling_counts_once() -> None:
    one, two = World({"requests_per_minute": 60}), World({"requests_per_minute": 60})

    def pass_s(seconds: int) -> None:
        """A hello each second."""
        for _ in range(seconds):
            two.core.on_report("one", dict(one.core.report()))
            one.now, two.now = one.now + 1.0, two.now + 1.0

    pass_s(1)
    for _ in range(30):
        one.enter(ACME)
        pass_s(1)
    pass_s(120)
    one.enter(ACME)
    two.core.on_report("one", dict(one.core.report()))
    (use,) = two.core.uses("acme")
    assert use.used == pytest.approx(1.0)


AGAIN = "ExpectedLate Overloaded ModelUnavailable BudgetSpent DeadlinePassed"


@pytest.mark.parametrize(
    "name", [*AGAIN.split(), "PromptTooLong", "SafetyBlocked", "InvalidRequest"]
)
def test_refusals_that_ask_for_another_try_do_not_count(name: str) -> None:
    kind, counts = getattr(errors, name), name not in AGAIN
    small = RateLimits(requests_per_minute=1)
    world = World({"requests_per_minute": 1, "models": {"small": small}, "burst_s": 60})
    with pytest.raises(kind), world.core.counted(ACME):
        raise kind("no")
    world.reserve(ACME, "small", 10)(0, kind("no"))
    for again in (partial(world.enter, ACME), partial(world.reserve, ACME, "small", 10)):
        with pytest.raises(errors.LimitReached) if counts else nullcontext():
            again()


def test_a_soft_limit_names_its_model_before_the_hard_one() -> None:
    world = World({"requests_per_minute": 60, "soft": {"share": 0.8, "model": "small"}})
    for number in range(10):
        assert (world.core.soft_limit("acme") is not None) is (number >= 8)
        world.enter(ACME)
    found = world.core.soft_limit("acme")
    assert found is not None
    assert found[0] == "small"
    assert "requests_per_minute" in found[1]
