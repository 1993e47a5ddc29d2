"""Tries are bounded, waits grow, and no wait goes past the deadline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.client.answer import Delta, Route, Started
from sluice.client.channel import ConnectionLost
from sluice.client.retry import Retries, RetryPolicy
from sluice.errors import (
    BudgetSpent,
    DeadlinePassed,
    LimitReached,
    Overloaded,
    ShuttingDown,
    SluiceError,
)

POLICY = RetryPolicy(start_tries=2, resume_tries=4, first_wait_s=1.0, wait_s_max=3.0)
LOST = ConnectionLost("lost")
STARTED = Started("r", "t", "small", Route("small", "rules", "default"), 1, 1)


def retries(timeout_s: float | None = None) -> Retries:
    return Retries(POLICY, timeout_s, now=100.0, dice=lambda: 1.0)


def test_request_that_was_never_accepted_gets_few_tries() -> None:
    subject = retries()
    assert subject.wait_s_after(LOST, 100.0) == 1.0
    with pytest.raises(ConnectionLost):
        subject.wait_s_after(LOST, 101.0)


def test_accepted_request_gets_more_with_growing_waits() -> None:
    subject = retries()
    subject.saw(STARTED)
    assert [subject.wait_s_after(LOST, 100.0) for _ in range(3)] == [1.0, 2.0, 3.0]
    with pytest.raises(ConnectionLost):
        subject.wait_s_after(LOST, 106.0)


def test_new_tokens_count_anew() -> None:
    subject = retries()
    subject.saw(STARTED)
    for _ in range(10):
        assert subject.wait_s_after(LOST, 100.0) == 1.0
        subject.saw(Delta("a", (1,), 0))


def test_server_says_when() -> None:
    assert retries().wait_s_after(ShuttingDown("bye", retry_after_s=7.0), 100.0) == 7.0


def test_request_gets_more_tries_where_the_server_says_when() -> None:
    subject = retries()
    for _ in range(POLICY.resume_tries - 1):
        assert subject.wait_s_after(ShuttingDown("bye", retry_after_s=7.0), 100.0) == 7.0
    with pytest.raises(ShuttingDown):
        subject.wait_s_after(ShuttingDown("bye", retry_after_s=7.0), 100.0)


def test_default_waits_outlast_the_restart_of_a_gateway() -> None:
    subject = Retries(RetryPolicy(), None, now=0.0, dice=lambda: 0.0)
    waits = [subject.wait_s_after(LOST, 0.0) for _ in range(RetryPolicy().start_tries - 1)]
    assert sum(waits) > 10, "the shortest of the spread waits"
    with pytest.raises(ConnectionLost):
        subject.wait_s_after(LOST, 0.0)


@pytest.mark.parametrize(
    "error",
    [
        LimitReached("enough", retry_after_s=0.1),
        BudgetSpent("spent", retry_after_s=0.1),
        Overloaded("full"),
    ],
)
def test_refusal_is_final(error: SluiceError) -> None:
    with pytest.raises(type(error)):
        retries(60.0).wait_s_after(error, 100.0)


def test_a_lack_of_room_is_waited_out_until_the_deadline() -> None:
    full, subject, now = Overloaded("full", retry_after_s=4.0), retries(100.0), 100.0
    for _ in range(5 * POLICY.resume_tries // 4):
        wait_s = subject.wait_s_after(full, now)
        assert wait_s == 6.0, "a third of it is spread"
        now += wait_s
    assert subject.wait_s_after(LOST, now) == 1.0, "refusals are no failures"
    with pytest.raises(Overloaded):
        subject.wait_s_after(full, 195.0)


def test_overload_is_final_without_deadline_or_once_accepted() -> None:
    full = Overloaded("full", retry_after_s=0.1)
    with pytest.raises(Overloaded):
        retries().wait_s_after(full, 100.0)
    subject = retries(60.0)
    subject.saw(STARTED)
    with pytest.raises(Overloaded):
        subject.wait_s_after(full, 100.0)


def test_wait_past_the_deadline_is_not_begun() -> None:
    assert retries(timeout_s=1.5).wait_s_after(LOST, 100.0) == 1.0
    with pytest.raises(ConnectionLost):
        retries(timeout_s=1.5).wait_s_after(LOST, 100.6)


def test_what_is_left_of_the_deadline() -> None:
    assert retries(timeout_s=5.0).timeout_s(102.0) == 3.0
    assert retries().timeout_s(102.0) is None
    with pytest.raises(DeadlinePassed):
        retries(timeout_s=5.0).timeout_s(105.0)


@given(st.integers(1, 1000), st.floats(0, 1))
def test_waits_are_spread_and_bounded(failures: int, dice: float) -> None:
    wait_s = POLICY.wait_s(failures, dice)
    assert POLICY.first_wait_s / 2 <= wait_s <= POLICY.wait_s_max


def test_a_slow_connection_attempt_is_not_repeated() -> None:
    policy = RetryPolicy(start_tries=5, resume_tries=5, start_s=1.0)
    subject = Retries(policy, None, now=100.0, dice=lambda: 1.0)
    subject.wait_s_after(LOST, 100.5)
    with pytest.raises(ConnectionLost):
        subject.wait_s_after(LOST, 101.0)
    accepted = Retries(policy, None, now=100.0, dice=lambda: 1.0)
    accepted.saw(STARTED)
    accepted.wait_s_after(LOST, 500.0)
