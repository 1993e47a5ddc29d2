"""What tenants spend in an hour, and what their running requests may still cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.budget import HOUR_PERIODS, STALE_S, Spending

HOUR_S = HOUR_PERIODS * 60.0


def test_costs_add_up_by_tenant_and_are_forgotten_after_an_hour() -> None:
    spending = Spending()
    spending.add("a", 1.0, 0.0)
    spending.add("a", 2.0, 90.0)
    spending.add("b", 5.0, 90.0)
    assert spending.spent("a", 100.0) == 3.0
    assert spending.spent("a", HOUR_S) == 2.0
    assert spending.spent("a", 2 * HOUR_S) == 0.0
    assert spending.spent("nobody", 0.0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 400)), max_size=60))
def test_it_is_the_sum_of_the_last_hour_to_the_minute(steps: list[tuple[float, float]]) -> None:
    spending, now = Spending(), 0.0
    history: list[tuple[float, float]] = []
    for cost, passed_s in steps:
        now += passed_s
        spending.add("t", cost, now)
        history.append((now // 60 * 60, cost))
    expected = sum(cost for minute, cost in history if minute > now - HOUR_S)
    assert spending.spent("t", now) == pytest.approx(expected, abs=1e-9)


def test_nothing_is_kept_of_tenants_that_are_gone() -> None:
    spending = Spending()
    for number in range(1000):
        spending.reserve(f"t{number}", number, 1.0)
        spending.release(f"t{number}", number)
        spending.add(f"t{number}", 1.0, 0.0)
    spending.add("other", 1.0, 2 * HOUR_S)
    assert list(spending.own(2 * HOUR_S, HOUR_PERIODS)) == [(120, {"other": 1.0})]
    assert spending.reserved == {}
    assert spending.tenants(2 * HOUR_S) == {"other"}


def test_a_running_request_counts_with_what_it_may_cost() -> None:
    spending = Spending()
    spending.reserve("a", 1, 0.1)
    spending.reserve("a", 2, 0.2)
    assert spending.spent("a", 0.0) == pytest.approx(0.3)
    spending.reserve("a", 2, 1.2)
    assert spending.spent("a", 0.0) == pytest.approx(1.3)
    spending.release("a", 1)
    spending.release("a", 1)  # again: has no effect
    assert spending.spent("a", 0.0) == pytest.approx(1.2)
    spending.add("a", 0.5, 0.0)
    spending.release("a", 2)
    assert spending.spent("a", 0.0) == 0.5


def test_what_other_gateways_tell_replaces_what_they_told_before() -> None:
    spending, now = Spending(unix_offset_s=600.0), 30.0
    spending.add("a", 1.0, now)
    spending.record_remote("gw2", 10, {"a": 2.0})
    spending.record_remote("gw2", 10, {"a": 3.0})
    spending.record_remote("gw3", 9, {"a": 4.0})
    spending.record_remote("gw3", 10 - HOUR_PERIODS, {"a": 100.0})
    spending.elsewhere.update("gw2", {"a": 10.0}, now)
    assert spending.spent("a", now) == 18.0
    spending.elsewhere.update("gw3", {"a": 1.0}, now)
    assert spending.spent("a", now) == 19.0
    assert spending.spent("a", now + STALE_S + 0.1) == 8.0
    assert list(spending.own(now, 1)) == [(10, {"a": 1.0})]
