"""Whole meshes in virtual time with faults everywhere; a seed plays one again, see `tests.simulated_mesh.seeds`."""

import pytest

from tests.simulated_mesh import backlogs
from tests.simulated_mesh.poison import PoisonedWorld
from tests.simulated_mesh.world import World


@pytest.mark.parametrize("seed", range(7))
def test_nobody_waits_in_vain(seed: int) -> None:
    World(seed).run()


@pytest.mark.long
@pytest.mark.parametrize("first", range(7, 207, 10))
def test_nobody_waits_in_vain_at_length(first: int) -> None:
    for seed in range(first, first + 10):
        World(seed).run()


def test_most_answers_are_whole_although_faults_happen() -> None:
    world = World(6)
    world.run()
    assert world.outcomes["finished"] > world.outcomes.total() / 2


@pytest.mark.parametrize("seed", range(5))
def test_no_innocent_call_fails_beside_poisoned_ones(seed: int) -> None:
    world = PoisonedWorld(seed)
    world.run()
    world.check_kills()


def test_capacity_of_a_suspended_batcher_goes_to_others() -> None:
    backlogs.StoppedBatcherWorld(0).run()


def test_workers_get_requests_by_their_speed() -> None:
    world = backlogs.MixedWorkersWorld(0)
    world.run()
    assert world.rows(world.fast) > 0.6 * backlogs.SLOW_S / backlogs.FAST_S * world.rows(world.slow)
    took_s = world.took_s("interactive")
    assert took_s[backlogs.INTERACTIVE // 2] < backlogs.TOKENS["interactive"] * backlogs.SLOW_S, (
        "half of them were not computed by the slow one"
    )
    # The longest had the slow one, and did not wait for it: its steps, the way there and back, and the rest of a step.
    assert took_s[-1] < (backlogs.TOKENS["interactive"] + 3) * backlogs.SLOW_S
