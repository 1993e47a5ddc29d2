"""What tenants spend in an hour."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.budget import WINDOW_S, Spending


def test_costs_add_up_by_tenant_and_are_forgotten_after_an_hour() -> None:
    spending = Spending()
    spending.add("a", 1.0, 0.0)
    spending.add("a", 2.0, 90.0)
    spending.add("b", 5.0, 90.0)
    assert spending.spent("a", 100.0) == 3.0
    assert spending.spent("a", WINDOW_S) == 2.0
    assert spending.spent("a", 2 * WINDOW_S) == 0.0
    assert spending.spent("nobody", 0.0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 400)), max_size=60))
def test_it_is_the_sum_of_the_last_hour_to_the_minute(steps: list[tuple[float, float]]) -> None:
    spending, now = Spending(), 0.0
    history: list[tuple[float, float]] = []
    for cost, passed_s in steps:
        now += passed_s
        spending.add("t", cost, now)
        history.append((now // 60 * 60, cost))
    expected = sum(cost for minute, cost in history if minute > now - WINDOW_S)
    assert spending.spent("t", now) == pytest.approx(expected, abs=1e-9)
