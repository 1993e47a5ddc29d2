import pytest

from jobs.core.pace import Budget, Rate, Speed


def test_a_rate_lets_a_second_of_it_through_at_once_and_then_its_share() -> None:
    rate, sent = Rate(per_minute=120, now=0.0), []
    now = 0.0
    while now < 60.0:
        wait_s = rate.wait_s(now)
        if wait_s:
            now += wait_s
        else:
            rate.took(1)
            sent.append(now)

    assert 119 <= len(sent) <= 123


def test_what_is_counted_afterwards_makes_the_next_ones_wait() -> None:
    rate = Rate(per_minute=600, now=0.0)

    rate.took(110)

    assert rate.wait_s(0.0) == pytest.approx(10.1)


def test_no_limit_never_waits() -> None:
    rate = Rate(0, now=0.0)
    rate.took(1e9)

    assert rate.wait_s(0.0) == 0.0


def test_the_speed_is_that_of_the_last_minute() -> None:
    speed = Speed()
    assert speed.remaining_s(10) is None
    for second in range(100):
        speed.told(float(second), 5 * second, 50 * second)

    assert (speed.items_per_s, speed.tokens_per_s) == (5.0, 50.0)
    assert speed.remaining_s(100) == 20.0


def test_a_budget_lets_one_go_until_it_is_known_what_one_costs() -> None:
    budget = Budget(10.0)
    assert budget.allows(0)
    assert not budget.allows(1)
    budget.took(2.0)

    assert [budget.allows(in_flight) for in_flight in range(5)] == [True] * 4 + [False]


def test_a_budget_is_overspent_by_one_item_at_most() -> None:
    budget, cost, in_flight = Budget(10.0), 0.0, 0
    while budget.allows(in_flight) or in_flight:
        if budget.allows(in_flight):
            in_flight += 1
            continue
        in_flight -= 1
        budget.took(3.0)
        cost += 3.0

    assert cost == 12.0


def test_no_budget_lets_all_go() -> None:
    budget = Budget(0.0)
    budget.took(1e9)
    assert budget.allows(1000)
