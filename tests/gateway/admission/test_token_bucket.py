"""The shared token bucket in virtual time."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.token_bucket import TokenBucket

HELLO_S = 1.0


class Gateways:
    """Several buckets that tell each other once a second, each at its own moment."""

    def __init__(self, count: int, rate_per_s: float, burst: float, seed: int = 0) -> None:
        dice = Random(seed)
        self.buckets = [TokenBucket(rate_per_s, burst, 0.0) for _ in range(count)]
        self._told: dict[tuple[int, float, int], float] = {}
        self._next = [dice.random() * HELLO_S for _ in range(count)]
        for number in range(count):
            self._tell(number, 0.0)

    def take(self, number: int, amount: float, now: float) -> bool:
        for teller, at in enumerate(self._next):
            while at <= now:
                self._tell(teller, at)
                at = self._next[teller] = at + HELLO_S
        bucket = self.buckets[number]
        if bucket.wait_s(amount, now) > 0:
            return False
        bucket.take(amount, now)
        return True

    def _tell(self, teller: int, now: float) -> None:
        own = self.buckets[teller]
        taken = own.report(now)
        if taken is None:
            return
        for number, bucket in enumerate(self.buckets):
            if number != teller:
                told = (teller, own.full_at, number)
                bucket.taken_elsewhere(taken - self._told.get(told, 0.0), now)
                self._told[told] = taken


def most_over(taken: Sequence[tuple[float, float]], rate_per_s: float) -> float:
    """The most that any window has beyond ``rate * t``; ``taken`` are times and amounts."""
    most, low, total = 0.0, 0.0, 0.0
    for at, amount in taken:
        low = min(low, total - rate_per_s * at)
        total += amount
        most = max(most, total - rate_per_s * at - low)
    return most


ARRIVALS = st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 10), st.integers(0, 3)), max_size=150)


@given(ARRIVALS, st.floats(0.5, 50), st.floats(10, 100))
def test_no_window_has_more_than_burst_and_rate(
    arrivals: list[tuple[float, float, int]], rate_per_s: float, burst: float
) -> None:
    alone, taken, now = Gateways(1, rate_per_s, burst), [], 0.0
    for after_s, amount, _ in arrivals:
        now += after_s
        if alone.take(0, amount, now):
            taken.append((now, amount))
    assert most_over(taken, rate_per_s) <= burst * (1 + 1e-6)


@given(ARRIVALS, st.floats(0.5, 50), st.floats(10, 100), st.integers(2, 4), st.integers(0, 99))
def test_several_gateways_exceed_it_by_a_stated_error(
    arrivals: list[tuple[float, float, int]], rate_per_s: float, burst: float, count: int, seed: int
) -> None:
    mesh, taken, now = Gateways(count, rate_per_s, burst, seed), [], 0.0
    for after_s, amount, number in arrivals:
        now += after_s
        if mesh.take(number % count, amount, now):
            taken.append((now, amount))
    error = (count - 1) * (burst + rate_per_s * HELLO_S)
    assert most_over(taken, rate_per_s) <= (burst + error) * (1 + 1e-6)


def test_request_above_the_burst_waits_for_a_full_bucket() -> None:
    bucket = TokenBucket(1.0, 10.0, 0.0)
    assert bucket.wait_s(25.0, 0.0) == 0.0
    bucket.take(25.0, 0.0)
    assert bucket.wait_s(1.0, 0.0) == pytest.approx(16.0)
    assert bucket.wait_s(1.0, 16.0) == 0.0


def empty(now: float = 0.0) -> TokenBucket:
    """8 a second, a burst of 16, and nothing there."""
    bucket = TokenBucket(8.0, 16.0, now)
    bucket.take(16.0, now)
    return bucket


def test_whatever_is_done_first_counts_the_time_that_has_passed() -> None:
    for act in (
        lambda bucket: bucket.take(0.0, 1.0),
        lambda bucket: bucket.taken_elsewhere(0.0, 1.0),
        lambda bucket: bucket.level(1.0),
    ):
        bucket = empty()
        act(bucket)
        assert bucket.level(0.0) == 8.0, "a clock that goes back changes nothing"
    bucket = empty()
    bucket.change(4.0, 16.0, 1.0)
    assert bucket.level(2.0) == 8.0 + 4.0, "the old rate until then"


def test_taken_elsewhere_is_not_reported_as_ours() -> None:
    bucket = TokenBucket(8.0, 16.0, 0.0)
    bucket.taken_elsewhere(5.0, 0.0)
    assert (bucket.level(0.0), bucket.taken) == (11.0, 0.0)
    bucket.taken_elsewhere(-8.0, 0.0)
    assert bucket.level(0.0) == 16.0, "what was returned, a burst at most"


def test_full_bucket_reports_nothing() -> None:
    bucket = TokenBucket(8.0, 16.0, 0.0)
    assert bucket.report(0.0) is None
    bucket.take(4.0, 0.0)
    assert [bucket.report(now) for now in (0.1, 0.2, 0.5, 0.6)] == [4.0, 4.0, None, None]
    assert (bucket.taken, bucket.full_at) == (0.0, 0.6)
    bucket.take(0.1, 0.6)
    assert bucket.report(1.0) == 0.1, "it is full again, and the others do not know it"
    assert bucket.full_at == 0.6
    assert bucket.report(1.0) is None


def test_rounding_does_not_refuse_what_is_there() -> None:
    bucket = TokenBucket(1.0, 10.0, 0.0)
    bucket.take(5.0 + 9e-9, 0.0)
    assert bucket.wait_s(5.0, 0.0) == 0.0
    bucket.take(2e-9, 0.0)
    assert bucket.wait_s(5.0, 0.0) == pytest.approx(1.1e-8)


def poisson(dice: Random, rate_per_s: float, until: float) -> Iterator[float]:
    now = 0.0
    while (now := now + dice.expovariate(rate_per_s)) < until:
        yield now


def conforming(dice: Random, rate_per_s: float, burst: float, until: float) -> Iterator[float]:
    """Arrivals in bursts that never exceed the limit: a bucket in front of Poisson's."""
    own = TokenBucket(rate_per_s * 0.95, burst * 0.9, 0.0)
    for at in poisson(dice, rate_per_s * 3, until):
        if own.wait_s(1.0, at) == 0:
            own.take(1.0, at)
            yield at


def test_tenants_over_three_gateways_get_their_limits() -> None:
    """600 a minute with a burst of 100: over minutes 2 to 5 none gets 5 % more, none that stays under is refused."""
    rate_per_s, burst, until = 10.0, 100.0, 300.0
    for tenant in range(20):
        dice = Random(tenant)
        mesh = Gateways(3, rate_per_s, burst, tenant)
        greedy = tenant % 2 == 0
        source = (
            poisson(dice, 10 + 2.5 * tenant, until)
            if greedy
            else conforming(dice, rate_per_s, burst, until)
        )
        # Its connections are spread unevenly, and move.
        weights = [dice.random() + 0.01 for _ in range(3)]
        taken, refused = [], 0
        for at in source:
            if dice.random() < 0.001:
                dice.shuffle(weights)
            (number,) = dice.choices((0, 1, 2), weights)
            if mesh.take(number, 1.0, at):
                taken.append(at)
            else:
                refused += 1
        late = len(taken) - bisect_left(taken, 60.0)
        assert late <= 240 * rate_per_s * 1.05
        if greedy:
            assert late >= 240 * rate_per_s * 0.95
        else:
            assert refused == 0
