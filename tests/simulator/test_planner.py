"""Plans: the fewest workers that are enough, and a shortcut that agrees with the simulation."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from simulator.arrivals import LengthMix, parse_lengths
from simulator.engines import EngineLimits
from simulator.planner import plan_job, plan_trace
from simulator.results import parse_slos, summarize
from simulator.simulator import simulate
from simulator.trace import Arrival, SimulationError
from tests.simulator.kit import setup, trace

SLOS = parse_slos(["interactive:ttft=0.3"])
LOAD = ("poisson:rate=60,class=interactive,lengths=desk",)


def test_a_plan_has_just_enough_workers() -> None:
    requests = trace(*LOAD, seconds=3.0)
    plan = plan_trace(requests, setup(), SLOS, share=0.95, workers_max=64)
    assert plan.workers > 1
    assert plan.one_less is not None
    shares = {n: _share(requests, n) for n in (plan.workers - 1, plan.workers)}
    assert shares[plan.workers - 1] < 0.95 <= shares[plan.workers]
    assert plan.summary.workers == plan.workers
    assert plan.one_less.workers == plan.workers - 1


def _share(requests: list[Arrival], workers: int) -> float:
    history = simulate(requests, setup(workers=workers))
    return summarize(history, SLOS).classes[0].within_slo


def test_one_worker_may_be_enough() -> None:
    requests = trace("poisson:rate=1,class=interactive,lengths=desk")
    plan = plan_trace(requests, setup(), SLOS, share=0.99, workers_max=8, worker_hour_price=1.0)
    assert (plan.workers, plan.one_less) == (1, None)
    assert plan.summary.cost is not None


def test_objectives_that_no_number_of_workers_meets_are_an_error() -> None:
    impossible = parse_slos(["interactive:ttft=0.001"])
    with pytest.raises(SimulationError, match="4 workers do not meet"):
        plan_trace(trace(*LOAD, seconds=2.0), setup(), impossible, share=0.9, workers_max=4)


@settings(max_examples=8)
@given(
    prompt=st.sampled_from(["50", "lognormal/300/0.7/2048", "uniform/10/900"]),
    answer=st.sampled_from(["1", "20", "lognormal/60/0.5/512"]),
    prefill=st.sampled_from([0, 512]),
    cache=st.sampled_from([0, 8192]),
)
@example(prompt="50", answer="1", prefill=0, cache=0)
@example(prompt="50", answer="20", prefill=512, cache=0)
@pytest.mark.long
def test_the_shortcut_agrees_with_the_simulation(
    prompt: str, answer: str, prefill: int, cache: int
) -> None:
    limits = EngineLimits(slots=16, prefill_tokens=prefill, cache_tokens=cache)
    mix = LengthMix(parse_lengths(prompt), parse_lengths(answer))
    job = plan_job(1_000_000, 24.0, mix, setup(limits=limits), seed=1)
    assert abs(job.shortcut_error) < 0.25
    slower = min(job.worker_documents_per_s, job.simulated_documents_per_s)
    assert (job.workers - 1) * slower < job.documents_per_s <= job.workers * slower


def test_a_job_has_its_price() -> None:
    mix = LengthMix(parse_lengths("100"), parse_lengths("10"))
    job = plan_job(3_600_000, 10.0, mix, setup(), seed=1, worker_hour_price=2.0)
    assert job.documents_per_s == pytest.approx(100.0)
    assert job.cost == pytest.approx(2.0 * job.worker_hours)
    assert job.worker_hours <= job.workers * 10.0
