"""Plans: the fewest workers that are enough for a trace, and those of a job by the rate of one of them."""

import pytest

from simulator.arrivals import LengthMix, parse_lengths
from simulator.planner import plan_job, plan_trace
from simulator.results import parse_slos, summarize
from simulator.simulator import simulate
from simulator.trace import Arrival, SimulationError
from tests.simulator.kit import COST, setup, trace

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


@pytest.mark.parametrize(("prompt", "answer"), [(50, 20), (300, 60), (10, 200)])
def test_a_full_worker_has_the_rate_of_its_steps(prompt: int, answer: int) -> None:
    """A document stays for a step a token; in that time as many prompts are computed as there are slots."""
    slots = setup().limits.slots
    decoding = slots * (answer - 1) / answer
    step_s = COST(slots * prompt / answer, decoding, decoding * (prompt + answer / 2))
    mix = LengthMix(parse_lengths(f"{prompt}"), parse_lengths(f"{answer}"))
    job = plan_job(1_000_000, 24.0, mix, setup(), seed=1)
    rate = job.worker_documents_per_s
    assert rate == pytest.approx(slots / (answer * step_s), rel=0.15)
    assert (job.workers - 1) * rate < job.documents_per_s <= job.workers * rate


def test_a_job_has_its_price() -> None:
    mix = LengthMix(parse_lengths("100"), parse_lengths("10"))
    job = plan_job(3_600_000, 10.0, mix, setup(), seed=1, worker_hour_price=2.0)
    assert job.documents_per_s == pytest.approx(100.0)
    assert job.cost == pytest.approx(2.0 * job.worker_hours)
    assert job.worker_hours <= job.workers * 10.0
