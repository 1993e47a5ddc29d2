"""The cost of a step comes back out of steps that were measured with it."""

from random import Random

import pytest

from simulator.cost import SHIPPED, StepCost, StepSample, fit, named_cost
from simulator.trace import SimulationError

COST = StepCost(4e-3, 4e-5, 2e-4, 5e-7)


def measured(noise: float = 0.0, seed: int = 1) -> list[StepSample]:
    chance = Random(seed)
    samples = []
    for _ in range(300):
        prefill, rows = chance.choice([0, 0, 100, 400]), chance.randint(0, 32)
        context = rows * chance.randint(20, 400)
        seconds = COST(prefill, rows, context) * (1 + chance.uniform(-noise, noise))
        samples.append(StepSample(prefill, rows, context, seconds))
    return samples


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_fit_finds_the_cost(noise: float) -> None:
    found = fit(measured(noise))
    assert found.cost(100, 16, 3000) == pytest.approx(COST(100, 16, 3000), rel=0.05)
    assert found.cost(0, 1, 50) == pytest.approx(COST(0, 1, 50), rel=0.05)
    assert found.error <= noise or found.error < 1e-6


def test_disturbed_steps_are_left_out() -> None:
    samples = measured(0.02)
    disturbed = [StepSample(0, 8, 800, 0.5)] * 15
    found = fit(samples + disturbed)
    assert found.samples <= len(samples)
    assert found.cost(0, 8, 800) == pytest.approx(COST(0, 8, 800), rel=0.05)


def test_no_part_is_negative() -> None:
    samples = [StepSample(0, rows, 100 * rows, 0.01 - 1e-4 * rows) for rows in range(1, 20)]
    cost = fit(samples).cost
    assert min(cost.base_s, cost.prefill_token_s, cost.decode_row_s, cost.context_token_s) >= 0
    assert cost(0, 5, 500) == pytest.approx(0.0095, rel=0.2)


def test_too_few_steps_are_told() -> None:
    with pytest.raises(SimulationError, match="2 steps"):
        fit(measured()[:2])
    with pytest.raises(SimulationError, match="decoding"):
        fit([StepSample(10, 0, 0, 0.1)] * 20)


def test_shipped_costs_have_names() -> None:
    assert named_cost("small-cpu") is SHIPPED["small-cpu"]
    with pytest.raises(SimulationError, match="small-cpu"):
        named_cost("huge")
