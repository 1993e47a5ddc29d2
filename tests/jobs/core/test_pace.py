import pytest

from jobs.core.pace import CostBudget, RateLimit, Throughput


def test_rate_limit_allows_a_burst_of_one_second() -> None:
    rate, sent = RateLimit(per_minute=120, now=0.0), []
    now = 0.0
    while now < 60.0:
        wait_s = rate.wait_s(now)
        if wait_s:
            now += wait_s
        else:
            rate.consume(1)
            sent.append(now)

    assert 119 <= len(sent) <= 123


def test_what_is_counted_afterwards_makes_the_next_ones_wait() -> None:
    rate = RateLimit(per_minute=600, now=0.0)

    rate.consume(110)

    assert rate.wait_s(0.0) == pytest.approx(10.1)


def test_no_limit_never_waits() -> None:
    rate = RateLimit(0, now=0.0)
    rate.consume(1e9)

    assert rate.wait_s(0.0) == 0.0


def test_the_speed_is_that_of_the_last_minute() -> None:
    speed = Throughput()
    assert speed.sample(0.0, 7, 70) == (0.0, 0.0)
    for second in range(100):
        rates = speed.sample(float(second), 5 * second, 50 * second)

    assert rates == (5.0, 50.0)


def test_a_budget_lets_one_go_until_it_is_known_what_one_costs() -> None:
    budget = CostBudget(10.0)
    assert budget.allows(0)
    assert not budget.allows(1)
    budget.consume(2.0)

    assert [budget.allows(in_flight) for in_flight in range(5)] == [True] * 4 + [False]


def test_a_budget_is_overspent_by_one_item_at_most() -> None:
    budget, cost, in_flight = CostBudget(10.0), 0.0, 0
    while budget.allows(in_flight) or in_flight:
        if budget.allows(in_flight):
            in_flight += 1
            continue
        in_flight -= 1
        budget.consume(3.0)
        cost += 3.0

    assert cost == 12.0


def test_no_budget_lets_all_go() -> None:
    budget = CostBudget(0.0)
    budget.consume(1e9)
    assert budget.allows(1000)
