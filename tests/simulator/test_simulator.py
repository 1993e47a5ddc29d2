"""The simulated mesh: nothing lost, times that add up, deadlines kept, and the same numbers every time."""

from typing import get_args

import pytest

from model_workers.channels import DELAYS
from simulator.engines import EngineLimits
from simulator.results import Ending
from simulator.simulator import simulate
from simulator.trace import SimulationError
from sluice.settings.batching import PolicyName
from tests.simulator.kit import COST, LINKS, arrival, setup, trace

POLICIES = get_args(PolicyName)
MIXED = (
    "poisson:rate=8,class=interactive,lengths=desk,timeout_s=3",
    "bursty:rate=4,lengths=desk,tenant=a",
    "flood:count=100,class=bulk,lengths=desk,tenant=b",
)


def test_the_time_of_one_request_is_the_sum_of_its_ways() -> None:
    history = simulate([arrival(1.0, prompt=100, answer=3, priority_class="interactive")], setup())
    (outcome,) = history.outcomes
    ways = LINKS.in_s + LINKS.send_s + LINKS.out_s
    assert outcome.ttft_s == pytest.approx(ways + COST(100, 0, 0))
    decode = COST(0, 1, 101) + COST(0, 1, 102)
    assert outcome.latency_s == pytest.approx(ways + COST(100, 0, 0) + decode)
    assert history.busy_s == pytest.approx(COST(100, 0, 0) + decode)
    assert outcome.wait_s == 0


@pytest.mark.parametrize("answer", [200, 3])
def test_bulk_tokens_are_coalesced_after_the_first_read(answer: int) -> None:
    asked = [arrival(1.0, answer=answer, priority_class="bulk")]
    history = simulate(asked, setup())
    (outcome,) = history.outcomes
    assert outcome.ttft_s is not None
    assert outcome.latency_s is not None
    computed_at = 1.0 + LINKS.in_s + LINKS.send_s + COST(10, 0, 0)
    assert outcome.ttft_s == pytest.approx(computed_at + LINKS.out_s - 1.0)
    steps = [COST(10, 0, 0), *(COST(0, 1, 10 + one) for one in range(1, answer))]
    ways = LINKS.in_s + LINKS.send_s + LINKS.out_s
    assert outcome.latency_s == pytest.approx(ways + sum(steps) + DELAYS.soon_s)


@pytest.mark.parametrize("engine", ["continuous", "generate"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_and_no_token_is_lost(policy: str, engine: str) -> None:
    history = simulate(trace(*MIXED, seconds=10.0), setup(policy, workers=2, engine=engine))
    assert {outcome.ending for outcome in history.outcomes} <= {Ending.FINISHED, Ending.EXPIRED}
    finished = [o for o in history.outcomes if o.ending is Ending.FINISHED]
    assert len(finished) >= 100
    for outcome in finished:
        assert outcome.ttft_s is not None
        assert outcome.latency_s is not None
        assert 0 < outcome.ttft_s <= outcome.latency_s
        assert 0 <= outcome.wait_s < outcome.ttft_s
    assert 0 < history.busy_s <= 2 * history.seconds
    assert history.requests_sent >= len(finished)
    assert 0 < history.filled <= history.cells


@pytest.mark.parametrize("policy", POLICIES)
def test_deadlines_are_kept(policy: str) -> None:
    requests = [arrival(0.0, answer=400, timeout_s=0.5) for _ in range(20)]
    history = simulate([*requests, arrival(5.0)], setup(policy))
    late = [o for o in history.outcomes if o.ending is Ending.EXPIRED]
    assert len(late) == 20
    assert all(o.ended_at == pytest.approx(0.5) for o in late)
    last = history.outcomes[-1]
    assert last.ending is Ending.FINISHED
    assert last.latency_s is not None
    assert last.latency_s < 1.0, "rows that are too late have left the worker"


def test_the_same_input_gives_the_same_numbers() -> None:
    first, second = (simulate(trace(*MIXED, seconds=10.0), setup(workers=2)) for _ in range(2))
    assert first == second


def test_a_run_can_stop_early() -> None:
    requests = trace("flood:count=2000,lengths=desk")
    history = simulate(requests, setup(until_s=5.0))
    assert history.seconds == 5.0
    still = [o for o in history.outcomes if o.ending is Ending.OPEN]
    assert still
    assert max(o.wait_s for o in still) == pytest.approx(5.0, abs=0.1)
    assert history.busy_s == pytest.approx(5.0, abs=0.05)


def test_what_a_full_worker_refuses_waits_again() -> None:
    limits = EngineLimits(slots=4, waiting=0, cache_tokens=160)
    history = simulate(trace("flood:count=60,lengths=desk"), setup(limits=limits))
    assert all(o.ending is Ending.FINISHED for o in history.outcomes)


def test_a_request_that_does_not_fit_the_cache_is_told() -> None:
    limits = EngineLimits(cache_tokens=64)
    with pytest.raises(SimulationError, match="a row of 65 tokens does not fit a cache of 64"):
        simulate([arrival(0.0, prompt=60, answer=5)], setup(limits=limits))


def test_a_run_is_over_when_everything_has_ended() -> None:
    requests = [arrival(0.0, timeout_s=300.0), arrival(1.0)]
    assert simulate(requests, setup()).seconds < 2.0


def test_gateway_refuses_late_requests_only() -> None:
    load = ["poisson:rate=200,class=interactive,lengths=desk,timeout_s=2"]
    requests = trace(*load, seconds=8.0)
    histories = [simulate(requests, setup(admission=given)) for given in (False, True)]
    finished, refused, expired = (
        [sum(o.ending is ending for o in history.outcomes) for history in histories]
        for ending in (Ending.FINISHED, Ending.REFUSED, Ending.EXPIRED)
    )
    assert refused[0] == 0
    assert refused[1] > len(requests) / 4
    assert expired[1] < expired[0] / 2
    assert finished[1] > 0.9 * finished[0]
    for outcome in histories[1].outcomes:
        if outcome.ending is Ending.REFUSED:
            assert outcome.ended_at == outcome.arrival.at_s
